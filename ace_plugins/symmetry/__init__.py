"""Groups, how their elements act on tensors and models, and how far a model is from equivariant."""
