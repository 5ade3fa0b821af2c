"""ACE for EGNO, the Equivariant Graph Neural Operator."""
