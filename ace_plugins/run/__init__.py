"""Train a script with ACE in a separate process: ``ace-patch run`` and the import line of patched scripts."""
