"""The command ``ace-patch``."""
