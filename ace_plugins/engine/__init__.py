"""The engine, which applies ACE to a model: state, branches, forward and optimizer hooks, dual loops, checkpoints."""
