"""Work on checkouts (clones of an upstream): compare the layout, mark scripts, and plan to patch or revert them."""
