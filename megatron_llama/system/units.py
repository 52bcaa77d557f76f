"""Numbers as people read them: counts with a unit, bytes, nouns in the plural."""

from __future__ import annotations

GIB = 2**30
_STEPS = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3))


def short_count(count: float) -> str:
    """A count with four significant digits: 6.738 B, 250 k, 1,024 T."""
    for unit, size in _STEPS:
        if abs(count) >= size:
            return f"{count / size:.4g} {unit}" if abs(count) < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.4g}"


def gib(size: int) -> str:
    """Bytes in binary units: 512 MiB, 1,002 MiB, 25.1 GiB, 1,024 GiB."""
    number, unit = (size / 2**20, "MiB") if size < GIB else (size / GIB, "GiB")
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:,.0f} {unit}"


def plural(count: int, noun: str) -> str:
    """``noun`` for one, ``nouns`` for any other count."""
    return noun if count == 1 else f"{noun}s"
