"""Texts for users within 79 columns: messages, and commands that can still be pasted into a shell."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence

WIDTH = 79
"""Columns of texts for users: one fewer than a terminal's, which some terminals fill with the cursor."""


def wrap(text: str, start: str = "", *, width: int = WIDTH) -> str:
    """Wrap each line of ``start`` and ``text``; further lines are indented by four spaces more than the line.

    Words such as paths are not broken, so that they can be copied.
    """
    wrapped = []
    for line in (start + text).split("\n"):
        indent = " " * (len(line) - len(line.lstrip(" ")))
        wrapper = textwrap.TextWrapper(
            width, indent, indent + "    ", break_long_words=False, break_on_hyphens=False, replace_whitespace=False
        )
        wrapped.append(wrapper.fill(line.lstrip(" ")) if len(line) > width else line)
    return "\n".join(wrapped)


def wrap_command(words: Sequence[str], indent: str = "  ", *, width: int = WIDTH) -> str:
    """Quote the words of a command for the shell and wrap it, with a backslash at the end of each unfinished line."""
    lines, line = [], indent
    for word in map(shlex.quote, words):
        if line.strip() and len(line) + len(word) + 2 > width:  # the space and the backslash at its end
            lines.append(line + "\\")
            line = indent + "    "
        line += word + " "
    return "\n".join([*lines, line.rstrip()])
