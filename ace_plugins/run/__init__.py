"""A process that trains with ACE: the marked line, 'ace-patch run', what is told at the start and the end."""
