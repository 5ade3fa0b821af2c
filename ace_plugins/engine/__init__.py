"""ACE on a model: state, dual loop, branches, the hooks of forward and optimizer, checkpoints."""
