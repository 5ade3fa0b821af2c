"""Finding, checking, loading and asking plugins; telling observers."""
