"""The contract between host and adapters: the hooks, on one page, and the data they return."""
