"""What host and adapters share: the hooks on one page, and the data they carry."""
