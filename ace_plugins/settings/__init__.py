"""Every setting with its range, and where settings come from: a file, the environment, options."""
