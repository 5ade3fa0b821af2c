"""The demo of this adapter (``ace-patch demo c4``): the paper's toy task. The adapter works without it."""
