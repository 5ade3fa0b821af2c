"""ACE for MACE (PyPI mace-torch): an adapter for ace-plugins."""
