"""One line of JSON to its text; Bad, with the reason, where it has none.

Fast where the line is good (orjson where it is installed), careful where it is not: a line that the fast parser refuses
is looked at again by Python's own, which accepts what Megatron's preprocessing accepts (NaN in the metadata, say).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from megatron_llama.text.conversation import Bad

BOM = b"\xef\xbb\xbf"
# What a bad line is counted under. "line_too_long" is found before parsing, where lines are cut.
REASONS = {
    "bad_utf8": "the line is not UTF-8",
    "bad_json": "the line is not one JSON value",
    "not_an_object": "the record is not a JSON object",
    "missing_text": "the record has no text under the key",
    "null_text": "the text is null",
    "text_not_a_string": "the text is not a string",
    "lone_surrogate": "the text holds half of a surrogate pair, which is no character",
    "line_too_long": "the line is longer than --max-line-mib",
}

loads: Callable[[bytes], Any]
_fast_dumps: Callable[[Any], bytes] | None = None
try:
    import orjson

    loads, _fast_dumps = orjson.loads, orjson.dumps
except ImportError:
    loads = json.loads


def dump_texts(record: dict[str, str] | list[str]) -> bytes:
    """A record of texts as a line of JSON, the same bytes with and without the fast library. What ``surrogateescape``
    made of bytes that are no UTF-8 becomes those bytes again."""
    if _fast_dumps is not None:
        with contextlib.suppress(TypeError):  # a surrogate
            return _fast_dumps(record)
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


def parse_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """The texts under `keys`, in their order. Raises Bad where one is missing or is no text."""
    try:
        record = loads(line)
        texts = [record[key] for key in keys]
        for text in texts:
            if type(text) is not str:
                return _parse_line_slowly(line, keys)
            if not text.isascii():
                text.encode()
        return texts
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return _parse_line_slowly(line, keys)


def parse_text(data: bytes) -> str:
    """A file, or a line, as one text. Raises Bad where it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        detail = f"byte {data[error.start]:#04x} at {error.start}: {error.reason}"
        raise Bad("bad_utf8", detail) from None


def parse_object(line: bytes) -> dict[str, Any]:
    """The line's JSON object. Raises Bad."""
    with contextlib.suppress(ValueError, RecursionError):
        record = loads(line)
        if isinstance(record, dict):
            return record
    return _parse_slowly(line)


def _parse_slowly(line: bytes) -> dict[str, Any]:
    """The object where only the fast parser has refused the line; else raises Bad with the exact reason."""
    text = parse_text(line)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Bad("bad_json", str(error) or type(error).__name__) from None
    if not isinstance(record, dict):
        raise Bad("not_an_object", f"it is a {type(record).__name__}")
    return record


def _parse_line_slowly(line: bytes, keys: Sequence[str]) -> list[str]:
    """The texts where only the fast parser has refused the line; else raises Bad with the exact reason."""
    record = _parse_slowly(line)
    for key in keys:
        if key not in record:
            there = ", ".join(sorted(record)[:8]) or "nothing"
            raise Bad("missing_text", f"no key {key!r}; there is {there[:200]}")
        text = record[key]
        if text is None:
            raise Bad("null_text", f"{key!r} is null")
        if not isinstance(text, str):
            raise Bad("text_not_a_string", f"{key!r} is a {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            detail = f"U+{ord(text[error.start]):04X} at character {error.start} of {key!r}"
            raise Bad("lone_surrogate", detail) from None
    return [record[key] for key in keys]
