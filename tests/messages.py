"""What programs print, in a form that does not depend on the width of a terminal or the length of a path."""

from __future__ import annotations


def unwrapped(text: str) -> str:
    """The text on one line, each run of blanks and line ends as one space: wrapping never separates words that a test
    looks for."""
    return " ".join(text.split())
