"""Real text that every machine with Python has: its standard library and its documentation topics.

Writes RedPajama-shaped records, {"text": ..., "meta": {...}}, one a line:

    python data_prep/python_stdlib.py --output data/python_stdlib/python_stdlib.jsonl

It serves the demo, which must need no download. The text is Python's own (PSF licence) and stays on this machine.
"""

import os
import sys

if __package__ in (None, ""):  # run as a script: this folder holds inspect.py, which must not hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import hashlib
import importlib
import json
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_llama.system.errors import UserError, run_main
from megatron_llama.system.files import atomic_open

# Tests repeat themselves, tables are generated, and installed packages differ from machine to machine.
SKIPPED_FOLDERS = {
    "__pycache__", "dist-packages", "idle_test", "lib-dynload", "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip
SKIPPED_FILES = {"pydoc_data/topics.py", "html/entities.py", "_pydecimal.py", "this.py"}
MAX_FILE_BYTES = 400_000
MAX_DOCUMENT_CHARACTERS = 24_000


def source_files(root: Path) -> list[Path]:
    """The library's own modules below `root`, in alphabetical order, without tests and generated tables."""
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or relative.as_posix() in SKIPPED_FILES:
            continue
        if relative.parts[0].startswith("config-") or relative.name.startswith("_sysconfigdata"):
            continue
        # encodings/cp437.py and its 80 siblings are tables of code points; only the package itself reads like a program
        if relative.parts[0] == "encodings" and relative.name not in ("__init__.py", "idna.py", "punycode.py"):
            continue
        if path.stat().st_size <= MAX_FILE_BYTES:
            found.append(path)
    return found


def split_source(text: str, limit: int = MAX_DOCUMENT_CHARACTERS) -> list[str]:
    """Cuts a long module into documents of at most about `limit` characters, between top-level definitions.

    Nothing is lost: the pieces joined are the text. A single definition longer than the limit stays whole.
    """
    if len(text) <= limit:
        return [text]
    pieces: list[str] = []
    piece: list[str] = []
    size = 0
    previous = ""
    for line in text.splitlines(keepends=True):
        starts_definition = line.startswith(("class ", "def ", "async def ", "@")) and not previous.startswith("@")
        if starts_definition and size > limit // 2:
            pieces.append("".join(piece))
            piece, size = [], 0
        piece.append(line)
        size += len(line)
        previous = line
    pieces.append("".join(piece))
    return pieces


def records(root: Path) -> Iterator[dict[str, Any]]:
    """All records. Files and topics come in the order of their names' hashes, so any slice is a fair sample."""
    topics: dict[str, str] = {}
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        pass  # some distributions package the topics apart; the sources alone are enough
    entries: list[tuple[str, Path | str]] = [(path.relative_to(root).as_posix(), path) for path in source_files(root)]
    entries += [(f"topic:{name}", text) for name, text in topics.items()]
    entries.sort(key=lambda entry: hashlib.sha256(entry[0].encode()).digest())
    version = platform.python_version()
    for name, content in entries:
        meta: dict[str, Any] = {"source": "python_stdlib", "python": version, "path": name}
        if isinstance(content, str):
            yield {"text": content, "meta": {**meta, "language": "English"}}
            continue
        try:
            with tokenize.open(content) as file:  # honours the coding line
                text = file.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        for number, piece in enumerate(split_source(text)):
            if piece.strip():
                yield {"text": piece, "meta": {**meta, "language": "Python", "part": number}}


def write_records(output: Path, max_bytes: int) -> tuple[int, int]:
    """Writes the records until `max_bytes` of output are reached; returns (documents, bytes).

    Raises:
        UserError: this Python has no readable sources.
        OSError: the output can't be written.
    """
    documents = size = 0
    with atomic_open(output) as file:
        for record in records(Path(sysconfig.get_paths()["stdlib"])):
            line = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            if size + len(line) > max_bytes:
                break
            file.write(line)
            documents += 1
            size += len(line)
        if not documents:
            raise UserError("this Python's standard library has no readable sources, or --max-mib is too small")
    return documents, size


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="Then: data_prep/train_tokenizer.py, data_prep/preprocess.py",
    )
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument("--max-mib", type=float, default=32.0, help="stop before this size (default 32)")
    args = parser.parse_args()
    documents, size = write_records(args.output, int(args.max_mib * 2**20))
    print(f"{args.output}: {documents:,} documents, {size / 1e6:.1f} MB, Python {platform.python_version()}")
    return 0


if __name__ == "__main__":
    run_main(main)
