"""Many runs of one script, with and without ACE: isolated, seeded, read, and judged."""
