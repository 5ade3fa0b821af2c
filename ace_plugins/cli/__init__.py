"""The command ace-patch: words and calls, nothing else."""
