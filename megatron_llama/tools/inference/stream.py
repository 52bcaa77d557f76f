"""Prints text while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from megatron_llama.text.tokenizer import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_KNOWN_TAIL = 8  # ids of the prompt that are decoded with an answer's first piece, so that its space is kept


class Decoder:
    """Ids to text, piece by piece; a piece that ends inside a character is held back until the rest is there."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_KNOWN_TAIL:])
        self._printed = len(self._ids)
        self._start = 0

    def add(self, number: int | None) -> str:
        """The text that can be printed once ``number`` is known; with None, at the end, the text that was held back."""
        if number is not None:
            self._ids.append(number)
        # Both are decoded from the same start: a tokenizer treats the first piece of a text in its own way.
        before = self._tokenizer.decode(self._ids[self._start : self._printed])
        now = self._tokenizer.decode(self._ids[self._start :])
        if number is not None and now.endswith(_BROKEN):
            return ""
        self._start, self._printed = self._printed, len(self._ids)
        return now[len(before) :]


class Printer:
    """Answers of a batch, one after the other although they grow together: the first streams, then the next one."""

    def __init__(self, out: TextIO, tokenizer: Tokenizer, prompts: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
        self._out = out
        self._decoders = [Decoder(tokenizer, prompt) for prompt in ids]
        self._ended = [False for _ in prompts]
        self._waiting = list(prompts)
        self._row = 0
        self._show()

    def __call__(self, row: int, number: int | None) -> None:
        """A new id of a row, or None where the row has ended."""
        self._waiting[row] += self._decoders[row].add(number)
        self._ended[row] = number is None
        self._show()

    def _show(self) -> None:
        while self._row < len(self._waiting):
            self._out.write(self._waiting[self._row])
            self._waiting[self._row] = ""
            if not self._ended[self._row]:
                break
            self._row += 1
            self._out.write("\n" if self._row == len(self._waiting) else "\n\n")
        self._out.flush()
