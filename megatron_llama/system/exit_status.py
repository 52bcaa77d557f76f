"""Exit statuses of all programs of this project. Docs and batch scripts rely on them."""

EXIT_FAILED = 1
"""Failure; the traceback of the failing rank comes last on stderr."""
EXIT_USER = 2
"""User error: one message, no traceback."""
EXIT_RESTART = 75
"""Stopped by a signal after all work was saved; the same command continues. sysexits.h calls it EX_TEMPFAIL."""
EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C: 128 + SIGINT, as shells report it."""
EXIT_PIPE = 141
"""The reader of the output exited: 128 + SIGPIPE."""

STATUS_VARIABLE = "MEGATRON_LLAMA_STATUS"
"""Variable with the path of a file for exit status and run folder, which batch scripts read."""
