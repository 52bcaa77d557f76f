"""The exit statuses of every program here; docs and batch scripts rely on them."""

EXIT_FAILED = 1
"""A failure; the failing rank's own traceback comes last on stderr."""
EXIT_USER = 2
"""A mistake in what was asked for: one message, no traceback."""
EXIT_RESTART = 75
"""Stopped by a signal after all work was saved; the same command continues. sysexits.h calls it EX_TEMPFAIL."""
EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C: 128 + SIGINT, as shells report it."""
EXIT_PIPE = 141
"""The reader of the output has gone: 128 + SIGPIPE, as of any program in a pipe."""
