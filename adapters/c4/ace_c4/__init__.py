"""A small image network that is equivariant under quarter turns, and ACE for it."""
