"""A first look into the input: what the text's key is, and some text for the encoder's self-check."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from data_prep.lib.json_lines import BOM, loads, parse_line
from data_prep.lib.sources import Source, read_pieces
from megatron_llama.system.errors import UserError
from megatron_llama.text.conversation import Bad

LOOK_BYTES = 1 << 17
SAMPLE_FILES = 4
SAMPLE_CHARACTERS = 1 << 16
# A record's text is under the first of these that it has: RedPajama-1T and most others; RedPajama-V2; OSCAR.
TEXT_KEYS = ("text", "raw_content", "content")


def _head(source: Source) -> bytes:
    """About the first LOOK_BYTES bytes, unpacked."""
    head = b""
    for piece, _ in read_pieces(source):
        head += piece[:LOOK_BYTES]
        if len(head) >= LOOK_BYTES:
            break
    return head[:LOOK_BYTES].removeprefix(BOM)


def detect_keys(sources: Sequence[Source]) -> list[str]:
    """The key that the first good record's text is under, where the user did not name it.

    Raises:
        UserError: a damaged compressed file.
    """
    for source in sources[:SAMPLE_FILES]:
        if source.is_text:
            continue
        head = _head(source)
        for line in head.split(b"\n")[: 64 if head.count(b"\n") else 0]:
            try:
                record = loads(line)
            except (ValueError, RecursionError):
                continue
            for key in TEXT_KEYS:
                if isinstance(record, dict) and isinstance(record.get(key), str):
                    return [key]
    return ["text"]


def sample_texts(sources: Sequence[Source], keys: Sequence[str]) -> list[str]:
    """Some 64 K characters from the beginnings of the first, middle and last files."""
    picked = sorted({0, len(sources) // 3, 2 * len(sources) // 3, len(sources) - 1})[:SAMPLE_FILES]
    texts: list[str] = []
    for index in picked:
        size = 0
        try:
            head = _head(sources[index])
        except UserError:
            continue  # it will be reported in the input's order
        for line in [head] if sources[index].is_text else head.split(b"\n"):
            found = [line.decode("utf-8", "ignore")]
            with contextlib.suppress(Bad):  # a bad line is a sample of bytes, at least
                found = found if sources[index].is_text else parse_line(line, keys)
            for text in found:
                texts.append(text[: SAMPLE_CHARACTERS // SAMPLE_FILES - size])
                size += len(texts[-1])
            if size >= SAMPLE_CHARACTERS // SAMPLE_FILES:
                break
    return texts
