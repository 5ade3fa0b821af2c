"""A clone of an upstream: its layout, the marked line, and planning to patch, revert and inspect it."""
