"""A clone of somebody's repository: its layout, the marked line, patch, status and revert."""
