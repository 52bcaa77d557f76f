"""Cases for the fuzz targets: good files with a few things wrong, as bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

DEEP = "[" * 100_000
LONG = "x" * 200_000
_NUMBERS = [0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 10**17, -(10**17), 10**9, 10**6]
_FLOATS = [0.0, -0.0, 0.5, -1.5, 1e-320, 1e17, 1e308, float("inf"), float("-inf"), float("nan")]
_TEXTS = [
    "", " ", "\0", "x", "null", "llama", "../x", "/dev/zero", "/", "\ud800", "é😀", "nan", "1e5", "${a}",
    "${oc.env:HOME}",
]  # fmt: skip
ODD: SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(_NUMBERS),
    st.sampled_from(_FLOATS),
    st.sampled_from(_TEXTS),
    st.integers(),
    st.text(max_size=8),
    st.sampled_from([[], {}, [[]], [{}], {"": None}, [None], ["x"], [1, 2], {"a": 1}, [1.5], LONG]),
)
"""Values of unexpected types and sizes."""


def edited(document: Any, more: Sequence[Any] = ()) -> SearchStrategy[Any]:
    """Return the document with up to four values replaced, removed, moved or added; ``more`` adds values to try."""
    value = st.one_of(ODD, st.sampled_from(list(more))) if more else ODD
    edit = st.tuples(st.integers(0, 10**6), st.sampled_from("rrrrrdasx"), value)
    return st.lists(edit, max_size=4).map(lambda edits: _apply(document, edits))


def _places(value: Any, places: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return (container, key) of all nested values."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        places.append((value, key))
        _places(value[key], places)
    return places


def _apply(document: Any, edits: list[tuple[int, str, Any]]) -> Any:
    root = [copy.deepcopy(document)]
    for position, operation, value in edits:
        nested = _places(root, [])
        container, key = nested[position % len(nested)]
        value = copy.deepcopy(value)
        if operation == "d":
            del container[key]
        elif operation == "a" and isinstance(container, dict):
            container[value if isinstance(value, str) else "extra"] = value
        elif operation == "a":
            container.insert(key, value)
        elif operation == "s":
            other, name = nested[(position // 7) % len(nested)]
            container[key] = copy.deepcopy(other[name])
        elif operation == "x" and isinstance(container[key], (int, float)):
            container[key] = container[key] * 1000 + 1
        else:
            container[key] = value
        if not root:
            root.append(None)
    return root[0]


def as_json(value: Any) -> bytes:
    """JSON in UTF-8; halves of surrogate pairs escaped."""
    return json.dumps(value).encode()


def damaged(content: SearchStrategy[bytes]) -> SearchStrategy[bytes]:
    """Return the content, mostly unchanged, else truncated or with bytes flipped, removed, repeated or inserted."""
    damage = st.tuples(st.sampled_from("ctfirb"), st.integers(0, 2**32), st.integers(0, 2**16), st.binary(max_size=9))
    none: SearchStrategy[list[Any]] = st.just([])
    return st.tuples(content, st.one_of(none, none, st.lists(damage, max_size=3))).map(_damage)


def _damage(case: tuple[bytes, list[tuple[str, int, int, bytes]]]) -> bytes:
    content, damages = case
    for operation, position, size, put in damages:
        at = position % (len(content) + 1)
        if operation == "c":
            content = content[:at] + content[at + size % 64 :]
        elif operation == "t":
            content = content[:at]
        elif operation == "f" and at < len(content):
            content = content[:at] + bytes([content[at] ^ (1 << size % 8)]) + content[at + 1 :]
        elif operation == "i":
            content = content[:at] + put + content[at:]
        elif operation == "r":
            content = content[:at] + content[at : at + size % 64] * (1 + size % 5) + content[at:]
        elif operation == "b":
            content = content[:at] + (put or b"\0")[:1] * min(size, 4096) + content[at:]
    return content


def json_files(name: str, document: Any, more: Sequence[Any] = ()) -> SearchStrategy[dict[str, bytes]]:
    """One JSON file: the document edited, now and then damaged, or something else altogether."""
    other = st.sampled_from([b"", DEEP.encode(), b'{"a":' * 100_000, b"null", b"[]", b"9" * 5000, b"\xff\xfe{\0}\0"])
    return st.one_of(
        damaged(edited(document, more).map(as_json)), damaged(edited(document, more).map(as_json)), other
    ).map(lambda content: {name: content})
