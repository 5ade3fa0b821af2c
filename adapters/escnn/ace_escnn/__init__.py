"""ACE for convolutions of escnn on images."""
