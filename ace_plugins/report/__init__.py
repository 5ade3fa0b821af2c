"""What a run came to: its record, the trace, verdicts and the table at the end."""
