"""Data generators (``ace-patch data shapes``). The adapter works without them."""
