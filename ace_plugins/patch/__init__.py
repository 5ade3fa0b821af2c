"""Attaches ACE to models that the user's script builds: wrapped constructors, import hooks, compatibility shims."""
