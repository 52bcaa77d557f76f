"""Exit statuses, signals, errors that end a program, atomic file writes, console output and tables."""
