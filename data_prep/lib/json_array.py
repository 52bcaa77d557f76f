"""A file that is one JSON array, as ShareGPT and Alpaca are published, to one element a line.

Only strings and brackets are distinguished here, piece by piece, so memory does not depend on the file's size. Whether
an element is good JSON is seen where lines are parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from data_prep.lib.json_lines import BOM
from megatron_llama.system.errors import UserError

_OUTSIDE = re.compile(rb'["\[\]{},]|\s+')
_INSIDE = re.compile(rb'["\\\n]')


def element_lines(path: str, pieces: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    """The array's elements, each ended by a line feed, in pieces; the numbers (bytes on disk) are passed on.

    Raises:
        UserError: the array has no end, or something else follows it.
    """
    scanner = _Scanner(path)
    first = True
    for piece, position in pieces:
        lines = scanner.feed(piece.removeprefix(BOM) if first else piece)
        first = False
        if lines:
            yield lines, position
    if scanner.depth or not scanner.begun:
        raise UserError(f"{path} is cut off: it begins a JSON array that has no end. Fetch it again, or leave it out")


class _Scanner:
    """Where in the array the last piece ended."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.depth = 0  # brackets and braces that are open
        self.begun = self.in_string = self.escaped = False

    def feed(self, piece: bytes) -> bytes:
        """The lines of the next piece."""
        found: list[bytes] = []
        offset = 0
        while offset < len(piece):
            offset = self._inside(piece, offset, found) if self.in_string else self._outside(piece, offset, found)
        return b"".join(found)

    def _inside(self, piece: bytes, offset: int, found: list[bytes]) -> int:
        """Takes a part of a string. A raw line feed, which no string may hold, becomes what none may hold either."""
        if self.escaped:
            self.escaped = False
            found.append(piece[offset : offset + 1].replace(b"\n", b"\r"))
            return offset + 1
        match = _INSIDE.search(piece, offset)
        if match is None:
            found.append(piece[offset:])
            return len(piece)
        found.append(piece[offset : match.end()].replace(b"\n", b"\r"))
        self.in_string, self.escaped = match[0] != b'"', match[0] == b"\\"
        return match.end()

    def _outside(self, piece: bytes, offset: int, found: list[bytes]) -> int:
        """Takes what is between strings, up to the next mark."""
        match = _OUTSIDE.search(piece, offset)
        start, end = match.span() if match else (len(piece), len(piece))
        mark = piece[start:end]
        if self.depth == 0:
            if start > offset or not (mark.isspace() or (mark == b"[" and not self.begun)):
                raise UserError(f"{self.path} begins with a JSON array, and something else comes after the array")
            if mark == b"[":
                self.depth, self.begun = 1, True
            return end
        found.append(piece[offset:start])
        if mark == b'"':
            self.in_string = True
        elif mark in (b"[", b"{"):
            self.depth += 1
        elif mark in (b"]", b"}"):
            self.depth -= 1
        if self.depth == 0 and mark == b"}":
            raise UserError(f"{self.path} is no JSON array: its brackets do not match")
        if self.depth == 0 or (self.depth == 1 and mark == b","):
            found.append(b"\n")
        else:
            found.append(b" " if mark.isspace() else mark)
        return end
