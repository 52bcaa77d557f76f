"""Comparison of messages, independent of line wrapping."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def unwrap(text: str) -> str:
    """Join the text to one line, with single spaces."""
    return " ".join(text.split())


@contextmanager
def raises_with_message(kind: type[BaseException], pattern: str) -> Iterator[None]:
    """Expect an error of this kind whose unwrapped message matches the pattern."""
    with pytest.raises(kind) as raised:
        yield
    message = unwrap(str(raised.value))
    assert re.search(pattern, message), message
