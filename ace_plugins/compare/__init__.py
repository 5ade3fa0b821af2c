"""Comparisons: many runs of one script with and without ACE, isolated and seeded, and statistics of their results."""
