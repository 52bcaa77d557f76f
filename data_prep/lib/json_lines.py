"""One line of JSON to its text, or to the reason why it is no good.

Fast where the line is good (orjson where it is installed), careful where it is not: a line that the fast parser refuses
is looked at again by Python's own, which accepts what Megatron's preprocessing accepts (NaN in the metadata, say).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from megatron_llama.system.errors import BadLine

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
try:
    import orjson

    loads = orjson.loads
except ImportError:
    loads = json.loads


def parse_line(line: bytes, keys: Sequence[str]) -> list[str] | BadLine:
    """The texts under `keys`, in their order; every one must be there, or the whole line is bad."""
    try:
        record = loads(line)
        texts = [record[key] for key in keys]
        for text in texts:
            if type(text) is not str:
                return _explain(line, keys)
            if not text.isascii():
                text.encode()
        return texts
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return _explain(line, keys)


def parse_text(data: bytes) -> list[str] | BadLine:
    """A whole file as one text."""
    try:
        return [data.decode("utf-8")]
    except UnicodeDecodeError as error:
        return BadLine("bad_utf8", _utf8_detail(error))


def _utf8_detail(error: UnicodeDecodeError) -> str:
    return f"byte {error.object[error.start]:#04x} at {error.start}: {error.reason}"


def parse_object(line: bytes) -> dict[str, Any] | BadLine:
    """The line's JSON object."""
    try:
        record = loads(line)
    except (ValueError, RecursionError):
        return _parse_slowly(line)
    return record if isinstance(record, dict) else BadLine("not_an_object", f"it is a {type(record).__name__}")


def _parse_slowly(line: bytes) -> dict[str, Any] | BadLine:
    """The exact reason why a line is no object, or the object where only the fast parser had refused the line."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadLine("bad_utf8", _utf8_detail(error))
    except (ValueError, RecursionError) as error:
        return BadLine("bad_json", str(error) or type(error).__name__)
    return record if isinstance(record, dict) else BadLine("not_an_object", f"it is a {type(record).__name__}")


def _explain(line: bytes, keys: Sequence[str]) -> list[str] | BadLine:
    """The slow path: the exact reason, or the texts where only the fast parser had refused the line."""
    record = _parse_slowly(line)
    if isinstance(record, BadLine):
        return record
    texts = []
    for key in keys:
        if key not in record:
            there = ", ".join(sorted(record)[:8]) or "nothing"
            return BadLine("missing_text", f"no key {key!r}; there is {there[:200]}")
        text = record[key]
        if text is None:
            return BadLine("null_text", f"{key!r} is null")
        if not isinstance(text, str):
            return BadLine("text_not_a_string", f"{key!r} is a {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return BadLine("lone_surrogate", f"U+{ord(text[error.start]):04X} at character {error.start} of {key!r}")
        texts.append(text)
    return texts
