"""ACE for TorchMD-NET (PyPI torchmd-net): an adapter for ace-plugins."""
