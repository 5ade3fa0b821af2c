"""ACE for NequIP (PyPI nequip)."""
