"""Finds, checks, loads and calls plugins, and notifies observers."""
