"""Data generators (``ace-patch data nbody``). The adapter works without them."""
