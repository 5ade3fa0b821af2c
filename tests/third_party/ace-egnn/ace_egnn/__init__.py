"""Adapter of ace-plugins for EGNN_Network of egnn-pytorch."""
