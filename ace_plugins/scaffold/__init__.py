"""A new adapter as a whole package that works, for somebody to make their own: ``ace-patch new-adapter``."""
