"""ACE for EGNO."""
