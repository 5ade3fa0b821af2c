"""The contract between host and adapters: the hooks, all in one module, and the data that they return."""
