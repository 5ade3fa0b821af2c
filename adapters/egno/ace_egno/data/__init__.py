"""The data set of ``ace-patch data mocap``. The adapter works without it."""
