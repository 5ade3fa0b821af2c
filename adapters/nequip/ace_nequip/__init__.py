"""ACE for NequIP."""
