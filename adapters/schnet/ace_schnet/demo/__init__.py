"""The demo of this adapter (``ace-patch demo schnet``): SchNet on QM9. The adapter works without it."""
