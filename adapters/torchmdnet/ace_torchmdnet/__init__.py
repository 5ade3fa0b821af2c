"""ACE for TorchMD-NET (PyPI torchmd-net)."""
