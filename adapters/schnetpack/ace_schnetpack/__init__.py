"""ACE for PaiNN and other models of SchNetPack (PyPI schnetpack)."""
