"""Run fuzz targets in child processes with limits on time and memory.

A case is a folder of files. A target reads it and either returns or raises one of ANSWERS, which programs print as one
message with status 2 (or 1 for damage). Other exceptions, crashes and exceeded limits are findings.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from megatron_llama.checkpoint.tensor_source import CorruptFile
from megatron_llama.config import ConfigError
from megatron_llama.system.errors import UserError
from megatron_llama.text.conversation import RecordError
from tests.processes import run_forked

Files = Mapping[str, bytes]
ANSWERS = (ConfigError, UserError, CorruptFile, RecordError)
CASE_SECONDS = 10.0
"""CPU time limit of a case."""
SILENCE_SECONDS = 120.0
"""Wall time without a new case after which the child is killed."""
SHRINK_SECONDS = 20.0
"""Time limit for minimizing a finding."""
MEMORY_BYTES = 1 << 30
"""Address space limit of a case, in addition to the process's at its start."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Target:
    """Code that reads untrusted files."""

    name: str
    files: SearchStrategy[Files]
    """Cases: file contents by name."""
    read: Callable[[Path], object]
    """Reads the case in a folder."""


@dataclass(frozen=True)
class Outcome:
    """Result of a round of cases."""

    cases: int
    finding: str | None
    """Error of the case in ``folder``/kept; None without a finding."""


class OutOfTime(BaseException):
    """A case took CASE_SECONDS. Derives from BaseException so that ``except Exception`` does not catch it."""


def fuzz(target: Target, folder: Path, number: int, cases: int) -> Outcome:
    """Run ``cases`` cases with seed ``number`` in a child process; stop at a failing case and minimize it."""
    case, output, counted = folder / "case", folder / "output.txt", folder / "counted"
    counted.touch()
    end = ""
    status = run_forked(partial(_run_cases, target, case, number, cases), output, output, None)
    if status == -signal.SIGALRM:
        end = f"no answer in {SILENCE_SECONDS:.0f} s"
    elif status < 0:
        end = f"the process was ended by {signal.Signals(-status).name}"
    if end and case.exists():
        shutil.copytree(case, folder / "kept", dirs_exist_ok=True)
    elif (finding := folder / "finding.txt").exists():
        end = finding.read_text(encoding="utf-8")
    return Outcome(counted.stat().st_size, end or None)


def read_case(target: Target, case: Path) -> None:
    """Read one case under the limits of time and memory. Raises an exception if it is a finding."""
    with _limits():
        try:
            target.read(case)
        except ANSWERS as answer:
            str(answer).encode()  # the message must be printable


def _run_cases(target: Target, case: Path, number: int, cases: int) -> None:
    """Run the cases in a child process, which ends with the status of the first finding."""
    first: float | None = None  # time of the first finding
    folder = case.parent

    @seed(number)
    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    @given(target.files)
    def each(files: Files) -> None:
        nonlocal first
        if first is not None and time.monotonic() - first > SHRINK_SECONDS:
            os._exit(1)
        with (folder / "counted").open("a") as file:
            file.write(".")
        signal.setitimer(signal.ITIMER_REAL, SILENCE_SECONDS)  # then SIGALRM kills, in C code too
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir(parents=True)
        for name, content in files.items():
            (case / name).write_bytes(content)
        try:
            read_case(target, case)
        except BaseException as error:
            # The latest failing case is the smallest: hypothesis only continues from smaller ones.
            first = first or time.monotonic()
            _keep(folder, case, error)
            raise

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        each()
    except BaseException as error:
        if not (folder / "finding.txt").exists():
            _keep(folder, case, error)


def _keep(folder: Path, case: Path, error: BaseException) -> None:
    """Store a finding: the case's files in ``folder``/kept, and the traceback."""
    shutil.rmtree(folder / "kept", ignore_errors=True)
    if case.exists():
        shutil.copytree(case, folder / "kept")
    (folder / "finding.txt").write_text(_described(error), encoding="utf-8", errors="backslashreplace")


@contextmanager
def _limits() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise OutOfTime(f"more than {CASE_SECONDS:.0f} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        signal.signal(signal.SIGPROF, before)


def _described(error: BaseException) -> str:
    """Format the traceback with truncated lines, as a case may contain megabytes."""
    return "\n".join(line[:300] for line in "".join(traceback.format_exception(error)).splitlines()[-60:]) + "\n"


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


def as_yaml(value: Any) -> bytes:
    """YAML in UTF-8, halves of surrogate pairs replaced."""
    return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "replace")


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


def named(name: str, content: SearchStrategy[bytes]) -> SearchStrategy[dict[str, bytes]]:
    """Cases of one file."""
    return content.map(lambda content: {name: content})


def json_files(name: str, document: Any, more: Sequence[Any] = ()) -> SearchStrategy[dict[str, bytes]]:
    """One JSON file: the document edited, now and then damaged, or something else altogether."""
    other = st.sampled_from([b"", DEEP.encode(), b'{"a":' * 100_000, b"null", b"[]", b"9" * 5000, b"\xff\xfe{\0}\0"])
    twice = [damaged(edited(document, more).map(as_json)) for _ in range(2)]
    return named(name, st.one_of(*twice, other))
