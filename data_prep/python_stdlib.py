"""Write demo text: the sources of Python's standard library and its documentation topics.

Records have RedPajama's form, {"text": ..., "meta": {...}}, one per line:

    python data_prep/python_stdlib.py --output data/python_stdlib/python_stdlib.jsonl

The demo uses it, since it needs no download. The text has the PSF license.
"""

import os
import sys

if __package__ in (None, ""):  # run as a script: keep inspect.py in this folder from hiding the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    import megatron_llama  # noqa: F401  (ends the program at Ctrl-C while it imports the rest)

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
from megatron_llama.system.programs import name_commands
from megatron_llama.system.rerun_command import ArgumentParser

# Tests are repetitive, tables are generated, and installed packages differ between machines.
SKIPPED_FOLDERS = {
    "__pycache__", "dist-packages", "idle_test", "lib-dynload", "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip
SKIPPED_FILES = {"pydoc_data/topics.py", "html/entities.py", "_pydecimal.py", "this.py"}
MAX_FILE_BYTES = 400_000
MAX_DOCUMENT_CHARACTERS = 24_000


def source_files(root: Path) -> list[Path]:
    """Return the modules below ``root``, sorted, without tests and generated tables."""
    paths = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or relative.as_posix() in SKIPPED_FILES:
            continue
        if relative.parts[0].startswith("config-") or relative.name.startswith("_sysconfigdata"):
            continue
        # The other modules of encodings are generated tables of code points.
        if relative.parts[0] == "encodings" and relative.name not in ("__init__.py", "idna.py", "punycode.py"):
            continue
        if path.stat().st_size <= MAX_FILE_BYTES:
            paths.append(path)
    return paths


def split_source(text: str, limit: int = MAX_DOCUMENT_CHARACTERS) -> list[str]:
    """Split a long module between top-level definitions into documents of about ``limit`` characters.

    The joined parts equal the text. A definition longer than the limit is not split.
    """
    if len(text) <= limit:
        return [text]
    parts: list[str] = []
    part: list[str] = []
    size = 0
    previous = ""
    for line in text.splitlines(keepends=True):
        starts_definition = line.startswith(("class ", "def ", "async def ", "@")) and not previous.startswith("@")
        if starts_definition and size > limit // 2:
            parts.append("".join(part))
            part, size = [], 0
        part.append(line)
        size += len(line)
        previous = line
    parts.append("".join(part))
    return parts


def records(root: Path) -> Iterator[dict[str, Any]]:
    """Yield all records, ordered by the hash of their names, so that any prefix is a random sample."""
    topics: dict[str, str] = {}
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        pass  # some distributions package the topics separately
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
            with tokenize.open(content) as file:  # respects the encoding declaration
                text = file.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        for number, part in enumerate(split_source(text)):
            if part.strip():
                yield {"text": part, "meta": {**meta, "language": "Python", "part": number}}


def write_records(output: Path, max_bytes: int) -> tuple[int, int]:
    """Write records up to ``max_bytes`` of output; return (documents, bytes).

    Raises:
        UserError: This Python has no readable sources.
        OSError: The output cannot be written.
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
            raise UserError(
                "no record was written: this Python has no standard library sources, or --max-mib is too small"
            )
    return documents, size


def main() -> int:
    """Run the command line; return the exit status."""
    parser = ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=name_commands("Then: data_prep/train_tokenizer.py, data_prep/preprocess.py"),
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=".jsonl file to write")
    parser.add_argument("--max-mib", type=float, default=32.0, help="size limit of the file in MiB (default 32)")
    args = parser.parse_args()
    documents, size = write_records(args.output, int(args.max_mib * 2**20))
    print(f"{args.output}: {documents:,} documents, {size / 1e6:.1f} MB, Python {platform.python_version()}")
    return 0


if __name__ == "__main__":
    run_main(main)
