"""Files of records that data.prefixes names are prepared before the ranks start, by data_prep/sft.py's own code.

A set lies in a folder that is named after everything that decides its content: the file's bytes, the tokenizer's files
and the settings. It appears there whole, by a rename; the next run finds it, on whatever path the same records lie.
"""

from __future__ import annotations

import copy
import errno
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_llama.config import Config, ConfigError, DataConfig, Problem
from megatron_llama.config.data_prefixes import is_table, record_files, tokenizer_of_records
from megatron_llama.launch.rendezvous import LaunchFailed

MOST_BYTES = 256 << 20
"""Of a file on disk. Beyond it preparation takes many minutes, which belong in a job of their own."""
_NAME, _READ_BYTES = "records", 1 << 20
_VERSION = 2  # of what data_prep/sft.py makes of the same records; raise it when that changes
# All that tokenizers and chat templates are read from.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class Wanted:
    """A file of records, and where its set is or will be."""

    setting: str
    path: str
    tokenizer: str
    folder: Path
    stamp: tuple[int, int]
    """The file's size and time when it was read for the folder's name."""

    @property
    def prefix(self) -> str:
        """What stands in data.prefixes instead."""
        return str(self.folder / f"{_NAME}_sft")


class PreparationStopped(Exception):
    """A signal asked for an end; the same command starts again."""


def with_finished(config: Config) -> Config:
    """The config with the sets that are there already in the place of their files; prepares nothing.

    Raises ConfigError for files that are too large; what else is wrong with one is for ``resolve`` to say.
    """
    problems: list[Problem] = []
    found = _wanted(config, problems, [])
    if problems:
        raise ConfigError(problems)
    return _replaced(config, [wanted for wanted in found if wanted.folder.is_dir()])


def with_prepared(config: Config, *, speaks: bool = True) -> Config:
    """The config with a set in the place of each file of records, made now where it is not there.

    ``speaks``: say also what was there already. Raises ConfigError for a file that can't be used, bad records among the
    reasons, LaunchFailed where the machine gave up, and PreparationStopped for a signal.
    """
    problems: list[Problem] = []
    found = _wanted(config, problems, problems)
    if problems:
        raise ConfigError(problems)
    for wanted in found:
        _make(wanted, config.data, speaks)
    return _replaced(config, found)


def _wanted(config: Config, too_large: list[Problem], unreadable: list[Problem]) -> list[Wanted]:
    """The files of records that can be used; what is wrong with the others goes to the two lists."""
    found: list[Wanted] = []
    tokenizer = tokenizer_of_records(config)
    if tokenizer is None:  # a rule asks for it
        return found
    for setting, path in record_files(config.data):
        try:
            status = os.stat(path)
            if status.st_size > MOST_BYTES:
                size, most = status.st_size / 2**20, MOST_BYTES >> 20
                rule = f"has {size:,.0f} MiB; files of up to {most} MiB are prepared at the start"
                instead = f"make a dataset of it: {_command(path, tokenizer, config.data)}"
                too_large.append(Problem(setting, path, rule, instead))
                continue
            folder = _cache(config.data) / _key(path, tokenizer, config.data)
        except OSError as error:
            rule = f"{error.filename or path} can't be read: {error.strerror}"
            unreadable.append(Problem(setting, path, rule, "make it readable, or name another file"))
            continue
        found.append(Wanted(setting, path, tokenizer, folder, (status.st_size, status.st_mtime_ns)))
    return found


def _replaced(config: Config, sets: list[Wanted]) -> Config:
    places = {(wanted.setting, wanted.path): wanted.prefix for wanted in sets}
    config = copy.deepcopy(config)
    data = config.data
    data.prefixes = [places.get(("data.prefixes", str(item)), item) for item in data.prefixes]
    data.validation_prefixes = [places.get(("data.validation_prefixes", p), p) for p in data.validation_prefixes]
    if sets and not record_files(data):  # what is left are sets, which have their templates in them
        data.template, data.chat_template = DataConfig.template, DataConfig.chat_template
    return config


def _cache(data: DataConfig) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return Path(os.path.abspath(os.path.expanduser(data.cache_dir or os.path.join(home, "megatron_llama", "data"))))


def _key(path: str, tokenizer: str, data: DataConfig) -> str:
    """A digest of everything that decides what the set holds. Raises OSError."""
    own = Path(tokenizer)
    folder = own if own.is_dir() else own.parent
    files = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    files += [] if own.is_dir() else [own]
    said = {
        "version": _VERSION,
        "records": _digest(Path(path)),
        "table": data.template if is_table(path) else None,
        "tokenizer": [(file.name, _digest(file)) for file in files],
        "reads": None if own.is_dir() else own.name,
        "chat_template": data.chat_template,
        "seq_length": data.seq_length,
    }
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:24]


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _make(wanted: Wanted, data: DataConfig, speaks: bool) -> None:
    """Make the set, unless it is there: one process at a time, the others find it."""
    if wanted.folder.is_dir():
        if speaks:
            _say(f"{wanted.path}: prepared before, in {wanted.folder}")
        return
    cache = wanted.folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{wanted.folder.name}.lock").open("a") as lock, _locked(lock, wanted.path) as alone:
            if wanted.folder.is_dir():
                _say(f"{wanted.path}: prepared by another start, in {wanted.folder}")
                return
            if alone:  # what is left of starts that were killed
                for rest in cache.glob(f".{wanted.folder.name}.partial.*"):
                    shutil.rmtree(rest, ignore_errors=True)
            aside = cache / f".{wanted.folder.name}.partial.{os.uname().nodename}.{os.getpid()}"
            try:
                _say(_summary(wanted, _prepare(wanted, data, aside)))
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise LaunchFailed(f"{wanted.path} can't be prepared in {cache}: {error.strerror or error}") from error


@contextmanager
def _locked(lock: IO[str], path: str) -> Iterator[bool]:
    """Waits until no other start works on the same set; False where the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            yield False
            return
        _say(f"{path}: another start prepares it; waiting")
        fcntl.flock(lock, fcntl.LOCK_EX)
    yield True


def _prepare(wanted: Wanted, data: DataConfig, aside: Path) -> dict[str, Any]:
    """Make the set in ``aside`` and move it to its place; returns its manifest."""
    from data_prep import sft
    from megatron_llama.system.errors import MachineError, Stopped, UserError

    asked = _arguments(wanted.path, wanted.tokenizer, data)
    args = sft.parser().parse_args([*asked, "--output-prefix", str(aside / _NAME)])
    aside.mkdir()
    try:
        sft.check(args)
        manifest = sft.prepare(args, args.input, args.output_prefix, lambda _: None)
    except UserError as error:
        rule, _, advice = str(error).partition(" Nothing was written.")
        instead = "mend the file"
        if advice:
            instead = f"mend it, or leave bad lines out: {_command(wanted.path, wanted.tokenizer, data)}"
        raise ConfigError([Problem(wanted.setting, wanted.path, rule.rstrip("."), instead)]) from None
    except MachineError as error:
        raise LaunchFailed(f"{wanted.path} could not be prepared: {error}") from error
    except Stopped as error:
        raise PreparationStopped(f"{wanted.path} is not prepared yet: {str(error).partition('.')[0]}") from None
    status = os.stat(wanted.path)
    if (status.st_size, status.st_mtime_ns) != wanted.stamp:
        instead = "start again when nothing writes to it"
        raise ConfigError([Problem(wanted.setting, wanted.path, "was changed while it was read", instead)])
    try:
        os.rename(aside, wanted.folder)
    except OSError:  # without locks, another start was faster: the same content
        if not wanted.folder.is_dir():
            raise
    return manifest


def _arguments(path: str, tokenizer: str, data: DataConfig) -> list[str]:
    """data_prep/sft.py's arguments for a file, but for the output."""
    made = ["--input", os.path.abspath(path), "--tokenizer-model", tokenizer, "--seq-length", str(data.seq_length)]
    made += ["--chat-template", data.chat_template] if data.chat_template != DataConfig.chat_template else []
    made += ["--template", str(data.template)] if is_table(path) and data.template else []
    return made


def _command(path: str, tokenizer: str, data: DataConfig) -> str:
    """What makes a dataset of the file by hand, leaving bad lines out."""
    name = Path(path).name.partition(".")[0]
    made = [*_arguments(path, tokenizer, data), "--on-bad-line", "skip", "--output-prefix", f"datasets/{name}/{name}"]
    return f"python data_prep/sft.py {shlex.join(made)}, and write datasets/{name}/{name}_sft"


def _summary(wanted: Wanted, manifest: dict[str, Any]) -> str:
    changed = "".join(f"; {count:,} {what}" for what, count in manifest["changed"].items())
    return (
        f"{wanted.path}: {manifest['documents_written']:,} documents, {manifest['tokens']:,} tokens "
        f"({manifest['tokens_with_loss']:,} learned), {manifest['documents_skipped']:,} skipped{changed}; "
        f"prepared in {wanted.folder}"
    )


def _say(text: str) -> None:
    sys.stdout.write(f"data: {text}\n")
    sys.stdout.flush()
