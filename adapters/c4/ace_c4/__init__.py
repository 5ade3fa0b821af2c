"""ACE for C4Net, a small image network that is equivariant under quarter turns."""
