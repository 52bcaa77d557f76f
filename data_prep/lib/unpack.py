"""Compressed files as plain bytes: gzip, zstd, xz and bzip2, recognised by their first bytes, never by their name.

A stream that ends early is an error, always: what was in the rest is unknown.
"""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

from megatron_llama.system.errors import UserError

# Small enough that one piece of a well-compressed file does not become hundreds of megabytes.
READ_BYTES = 1 << 17
# Files packed with a longer window (zstd --long, xz with a large dictionary) need that much memory to unpack.
ZSTD_MAX_WINDOW = 1 << 27
XZ_MAX_MEMORY = 1 << 28
_MAGIC = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", "xz": b"\xfd7zXZ\x00"}
_BZ2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")  # the first block, and the end of an empty stream


def compression_of(head: bytes) -> str:
    """``gzip``, ``zstd``, ``xz``, ``bz2`` or nothing, by a file's first 10 bytes."""
    if head[:3] == b"BZh" and head[4:10] in _BZ2_BLOCKS:
        return "bz2"
    return next((kind for kind, magic in _MAGIC.items() if head.startswith(magic)), "")


def unpack(path: str, kind: str, file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """The unpacked bytes of all frames, members or streams, in pieces, each with the bytes of the file read so far.

    By hand, because the libraries' own readers take a file that is cut off for a shorter one, or stop after the first
    frame. Zeros between and after gzip's members and xz's streams are padding.

    Raises:
        UserError: damaged, or cut off.
    """
    new, errors = _decompressor(path, kind)
    padded = kind in ("gzip", "xz")
    position = unpacked = 0
    frame: Any = None
    packed = b""
    while True:
        if not packed:
            packed = file.read(READ_BYTES)
            position += len(packed)
            if not packed:
                break
        if frame is None:
            packed = packed.lstrip(b"\0") if padded else packed
            if not packed:
                continue
            frame = new()
        try:
            piece = frame.decompress(packed)
        except errors as error:
            raise UserError(f"{path}: damaged {kind} data after {unpacked:,} good bytes: {error}") from None
        packed = frame.unused_data if frame.eof else b""
        if frame.eof:
            frame = None
        if piece:
            unpacked += len(piece)
            yield piece, position
    if frame is not None:
        raise UserError(
            f"{path} is cut off: its {kind} stream ends in the middle, after {unpacked:,} unpacked bytes. "
            "Fetch it again, or leave it out"
        )


def _decompressor(path: str, kind: str) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """(what makes a decompressor of one frame, the errors that it raises)"""
    if kind == "gzip":
        library: Any = zlib
        with contextlib.suppress(ImportError):
            library = importlib.import_module("isal.isal_zlib")  # twice as fast
        return partial(library.decompressobj, 31), (library.error, zlib.error)
    try:
        if kind == "xz":
            import lzma

            new = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, XZ_MAX_MEMORY)
            return new, (lzma.LZMAError, EOFError)
        if kind == "bz2":
            import bz2

            return bz2.BZ2Decompressor, (OSError, ValueError, EOFError)
        import zstandard
    except ImportError as error:  # Pythons built by hand may lack lzma or bz2
        advice = " (pip install zstandard)" if kind == "zstd" else ""
        raise UserError(f"{path} is {kind}: that needs Python's package {error.name}{advice}") from None
    return zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW).decompressobj, (zstandard.ZstdError,)
