"""What programs print, in a form that does not depend on the width of a terminal or the length of a path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def unwrap(text: str) -> str:
    """The text on one line, each run of blanks and line ends as one space: wrapping never separates words that a test
    looks for."""
    return " ".join(text.split())


@contextmanager
def raises_with_message(kind: type[BaseException], pattern: str) -> Iterator[None]:
    """The block must raise an error of this kind, in whose message, unwrapped, the regular expression is found."""
    with pytest.raises(kind) as raised:
        yield
    message = unwrap(str(raised.value))
    assert re.search(pattern, message), message
