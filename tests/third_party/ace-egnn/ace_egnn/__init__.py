"""ACE for EGNN_Network of egnn-pytorch: an adapter for ace-plugins."""
