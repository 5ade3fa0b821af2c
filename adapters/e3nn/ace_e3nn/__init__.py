"""ACE for models built of e3nn modules."""
