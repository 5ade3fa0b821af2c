"""ACE for the Steerable E(3) GNNs, SEGNN and SEConv."""
