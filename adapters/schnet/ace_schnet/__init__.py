"""ACE for SchNet of PyTorch Geometric."""
