"""Records of runs: trace files, verdicts, tables, charts, the HTML page, loggers and the live view."""
