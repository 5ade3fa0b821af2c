"""ACE on models that somebody else builds: wrapped constructors, import hooks, repairs."""
