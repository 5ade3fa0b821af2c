"""ACE for image models with R2Conv layers of escnn (PyPI escnn)."""
