"""ACE for MACE (PyPI mace-torch)."""
