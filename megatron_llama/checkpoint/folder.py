"""The folder ``<run.dir>/checkpoints``, or ``checkpoint.dir`` in an object store.

On a disk, renames publish and delete checkpoints atomically. In a store a checkpoint exists if it has a manifest, which
is written last and deleted first. The names of objects contain the start that wrote them, so no start changes an
object of another one, and a start stops when another one writes to the same folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_llama.arch.recognize_format import LABELS, recognize
from megatron_llama.checkpoint import BEST, POINTER
from megatron_llama.checkpoint.manifest import NAME, State, merge, read_manifest
from megatron_llama.checkpoint.rank_files import part_name
from megatron_llama.checkpoint.tensor_source import CorruptFile, check_file_name, read_json
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.problems import quote_value
from megatron_llama.config.settings import KEPT_BY_TIME, CheckpointConfig
from megatron_llama.config.stored_settings import checkpoint_folder, list_steps, step_of
from megatron_llama.system.files import (
    DRAFT,
    FolderTaken,
    mirror,
    read_whole,
    sync_folder,
    write_atomically,
    write_synced,
)
from megatron_llama.system.object_store import Location, RemotePath, location, missing_package
from megatron_llama.system.tables import plural

CLAIM = "publisher"
"""File in a partial folder, created by the rank that publishes it after a failure."""


def folder_name(step: int) -> str:
    """Return the folder name of a step, such as ``step_00000100``."""
    return f"step_{step:08d}"


WRITER = "writer.json"
"""Object of a store that names the last start which writes there."""


def begin_writing(checkpoints: Location, run_dir: Path) -> str:
    """Return the name of this start in a store, for its objects; "" on a disk, where a lock excludes other starts.

    Deletes the objects of checkpoints that other starts have not published. Raises ConfigError.
    """
    if isinstance(checkpoints, Path):
        return ""
    writer = secrets.token_hex(4)
    facts = {"writer": writer, "host": socket.gethostname(), "run_dir": str(run_dir.absolute())}
    with store_errors("checkpoint.dir", checkpoints):
        (checkpoints / WRITER).write_bytes(json.dumps(facts).encode())
        checkpoints.delete_files(_unpublished(checkpoints))
    return writer


def _unpublished(checkpoints: RemotePath) -> set[str]:
    """Return the names of the objects of checkpoints without a manifest."""
    files = checkpoints.files()
    return {name for name in files if _is_in_checkpoint(name) and f"{name.partition('/')[0]}/{NAME}" not in files}


def _is_in_checkpoint(name: str) -> bool:
    """Return whether an object belongs to a checkpoint. A folder of a store may have objects of other programs."""
    folder, _, file = name.partition("/")
    return bool(file) and folder == folder_name(step_of(folder))


@contextmanager
def store_errors(field: str, path: RemotePath) -> Iterator[None]:
    """Raise errors of a store as ConfigError."""
    try:
        yield
    except OSError as error:
        rule, instead = missing_package(path.url) or (str(error.strerror), "correct the URL, or the rights of its user")
        raise ConfigError([Problem(field, path.url, rule, instead)]) from error


def partial_folder(checkpoints: Location, step: int) -> Location:
    """Return the folder in which a checkpoint is written before it is published."""
    if isinstance(checkpoints, RemotePath):
        return checkpoints / folder_name(step)
    return checkpoints / f".{folder_name(step)}.partial"


def fallback_folder(settings: CheckpointConfig, checkpoints: Location) -> Path | None:
    """Return the folder in ``checkpoint.fallback_dir`` of the run with these checkpoints; no other run uses it."""
    path = checkpoints.absolute()
    name = f"{path.parent.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    return None if settings.fallback_dir is None else Path(settings.fallback_dir) / name


def saved_steps(checkpoints: Location) -> list[int]:
    """Return the steps with a checkpoint, newest first. Raises CorruptFile if the folder cannot be read."""
    try:
        return list_steps(checkpoints)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CorruptFile(f"{checkpoints}: {error.strerror}") from error


def find_checkpoint(path: Location) -> Path:
    """Return the checkpoint folder of ``path``: a checkpoint, a run (its newest), or a pointer (``latest``, ``best``).

    The newest complete checkpoint is used if a kill left no pointer. A checkpoint in a store is downloaded to the
    user's cache. Raises ConfigError.
    """
    if isinstance(path, Path) and isinstance(remote := checkpoint_folder(path), RemotePath):
        path = remote
    if isinstance(path, Path):
        return _find(path)  # type: ignore[return-value]
    with store_errors("CHECKPOINT", path):
        return mirror(_find(path))  # type: ignore[arg-type]


def local_model(path: Location) -> Path:
    """Return a path on this host; for the URL of a Hugging Face folder, checkpoint or run, a downloaded copy.

    Raises ConfigError.
    """
    if isinstance(path, Path):
        return path
    with store_errors("CHECKPOINT", path):
        return mirror(path) if (path / "config.json").is_file() else find_checkpoint(path)


def _find(path: Location) -> Location:
    if isinstance(path, Path) and (other := recognize(path)) is not None and other.is_foreign:
        instead = f"convert it: python train.py init_from={quote_value(str(path))} model=NAME data=mock trainer.steps=0"
        raise ConfigError([Problem("CHECKPOINT", str(path), f"is {LABELS[other.format]}", instead)])
    candidates = [(path.parent, path.name)] if path.name in (POINTER, BEST) and path.is_file() else []
    candidates += [(path, POINTER), (path / "checkpoints", POINTER)]
    for folder, pointer in candidates:
        if (folder / NAME).is_file():
            return folder
        if (folder / pointer).is_file():
            try:
                return read_pointer(folder, pointer)
            except CorruptFile as error:
                raise ConfigError([Problem("CHECKPOINT", str(path), str(error), "name a checkpoint")]) from error
    for folder in (path, path / "checkpoints"):
        for step in saved_steps(folder) if isinstance(folder, RemotePath) or folder.is_dir() else ():
            return folder / folder_name(step)
    rule = f"is not a checkpoint: it has no {NAME}"
    raise ConfigError([Problem("CHECKPOINT", str(path), rule, "write RUN_FOLDER/checkpoints/step_... or RUN_FOLDER")])


def older_checkpoints(checkpoint: Path, count: int) -> list[Path]:
    """Return the ``count`` checkpoints of the same run before this one, newest first. Raises ConfigError."""
    step = read_manifest(checkpoint).state.step
    older = [other for other in saved_steps(checkpoint.parent) if other < step][:count]
    if len(older) < count:
        saved = len(older) + 1
        rule = f"is above the number of checkpoints up to {checkpoint.name}, {saved}, which checkpoint.keep limits"
        raise ConfigError([Problem("--average", count + 1, rule, f"write --average {saved}")])
    return [checkpoint.parent / folder_name(other) for other in older]


def resume_candidates(checkpoints: Location, settings: CheckpointConfig) -> list[Location]:
    """Return the checkpoints to resume from, preferred first.

    Deletes partial files of a killed run. Raises ConfigError.
    """
    if isinstance(checkpoints, Path):
        clean(checkpoints)
    if settings.resume == "never":
        return []
    if settings.keep_best and (isinstance(checkpoints, RemotePath) or checkpoints.is_dir()):
        point_to_best(checkpoints)
    saved: list[Location]
    try:
        saved = [checkpoints / folder_name(step) for step in saved_steps(checkpoints)]
    except CorruptFile as error:
        problem = Problem("run.dir", str(error), "checkpoints cannot be read", "change its permissions")
        raise ConfigError([problem]) from None
    if settings.resume == "auto":
        return saved
    # A path gives the first start. The same command resumes from the run's newest checkpoint, unless the path is one of
    # the run's checkpoints: then the run returns to it.
    chosen = location(settings.resume).absolute()
    if chosen.name in (POINTER, BEST) and chosen.is_file():
        chosen = _find(chosen)
    return [checkpoints / chosen.name] if chosen.parent == checkpoints.absolute() else saved or [chosen]


def clean(checkpoints: Path) -> None:
    """Delete partial files of a killed run. The caller holds the lock of the run folder."""
    if not checkpoints.is_dir():
        return
    for entry in checkpoints.iterdir():
        if entry.name.startswith(".") and entry.name.endswith((".partial", ".removed", DRAFT)):
            delete(entry)


def read_pointer(checkpoints: Location, pointer: str) -> Location:
    """Return the checkpoint named by the file ``latest`` or ``best``. Raises CorruptFile if the file is invalid."""
    path = checkpoints / pointer
    try:
        return checkpoints / check_file_name(read_whole(path).decode().strip())
    except (OSError, UnicodeDecodeError, CorruptFile) as error:
        raise CorruptFile(f"{path} is not a valid pointer: {error}") from error


def best_checkpoint(checkpoints: Location) -> Location | None:
    """Return the checkpoint with the lowest validation loss, the earliest of equals; None if none has a loss."""
    states = {step: _state_of(checkpoints / folder_name(step)) for step in saved_steps(checkpoints)}
    losses = [(state.val_loss, step) for step, state in states.items() if state and state.val_loss is not None]
    return checkpoints / folder_name(min(losses)[1]) if losses else None


def point_to_best(checkpoints: Location, new: State | None = None) -> Location | None:
    """Write the name of the best checkpoint to ``best``, and return its folder.

    Args:
        new: The state just saved, compared with the current best. None: compare all checkpoints.
    """
    best: Location | None
    try:
        known = read_pointer(checkpoints, BEST)
        state = None if new is None or known.name == folder_name(new.step) else _state_of(known)
    except CorruptFile:
        state = None
    old = None if state is None else state.val_loss
    if new is None or old is None:
        best = best_checkpoint(checkpoints)
    else:
        best = checkpoints / folder_name(new.step) if new.val_loss is not None and new.val_loss < old else known
    if best is None:
        delete(checkpoints / BEST)
    elif old is None or best != known:
        write_atomically(checkpoints / BEST, best.name + "\n")
    return best


def publish(checkpoints: Location, state: State, settings: CheckpointConfig, writer: str = "") -> None:
    """Publish the files that all ranks have written: write the manifest, rename, update pointers, delete old ones.

    Raises OSError or CorruptFile. An error before the rename leaves earlier checkpoints unchanged.
    """
    partial, final = partial_folder(checkpoints, state.step), checkpoints / folder_name(state.step)
    manifest = merge(partial, state, writer)
    if isinstance(partial, RemotePath):
        manifest.check_sizes()
        _check_writer(partial.parent, writer)
        (partial / NAME).write_bytes(manifest.text.encode())
        partial.delete_files(name for name in partial.files() if name not in (NAME, *manifest.files))
    else:
        for part in (*partial.glob("rank_*.json"), *partial.glob(CLAIM)):
            part.unlink()
        write_synced(partial / NAME, manifest.text.encode())
        sync_folder(partial)
        if isinstance(final, Path) and (final.exists() or final.is_symlink()):  # a damaged checkpoint of the same step
            _remove(final)
        os.rename(partial, str(final))
        sync_folder(partial.parent)
    point_to(final)
    best = point_to_best(checkpoints, state) if settings.keep_best else None  # before the old best may be deleted
    prune(checkpoints, state.step, settings, best)


def _check_writer(checkpoints: RemotePath, writer: str) -> None:
    """Raise FolderTaken if another start has begun to write in a store's folder since."""
    facts = read_json(checkpoints / WRITER)
    if facts.get("writer") != writer:
        other = f"{facts.get('run_dir')} on {facts.get('host')}"
        raise FolderTaken(errno.EBUSY, f"another run writes there: {other}", str(checkpoints))


def written_parts(checkpoints: Location, state: State, writer: str = "") -> tuple[int, bool] | None:
    """Return the bytes of a checkpoint that are written, and whether all ranks have finished; None if published.

    Raises OSError or CorruptFile.
    """
    folder = partial_folder(checkpoints, state.step)
    if isinstance(folder, RemotePath):
        sizes = {name: facts.size for name, facts in folder.files().items()}
        published = NAME in sizes and any(writer in name for name in read_manifest(folder).files)
    else:
        published = not folder.is_dir()
        sizes = {} if published else {file.name: file.stat().st_size for file in folder.iterdir()}
    complete = all(part_name(rank, writer) in sizes for rank in range(state.world_size))
    return None if published else (sum(sizes.values()), complete)


def discard(checkpoints: Location, step: int, writer: str = "") -> None:
    """Delete what a writer has written of a checkpoint that is not published."""
    folder = partial_folder(checkpoints, step)
    if isinstance(folder, RemotePath):
        folder.delete_files(name for name in folder.files() if f".{writer}." in name)
    else:
        delete(folder)


def point_to(checkpoint: Location) -> None:
    """Write a checkpoint's name to ``latest``."""
    write_atomically(checkpoint.with_name(POINTER), checkpoint.name + "\n")


def prune(checkpoints: Location, newest: int, settings: CheckpointConfig, best: Location | None) -> None:
    """Delete checkpoints up to ``newest`` by checkpoint.keep and keep_every, except ``best``.

    Without checkpoint.keep, only checkpoints of the default of checkpoint.every_minutes are deleted.
    """
    keep = KEPT_BY_TIME if settings.keep is None else settings.keep
    for step in [step for step in saved_steps(checkpoints) if step <= newest][keep:]:
        folder = checkpoints / folder_name(step)
        if folder == best or (settings.keep_every and step % settings.keep_every == 0):
            continue
        if settings.keep is not None or ((state := _state_of(folder)) is not None and state.replaceable):
            _remove(folder)


def _state_of(folder: Location) -> State | None:
    """Return the state of a checkpoint; None for a damaged one."""
    try:
        return read_manifest(folder).state
    except CorruptFile:
        return None


def move_aside(checkpoints: Location, after: int = -1) -> str:
    """Move the checkpoints after a step to a new ``checkpoints.N`` on their disk; return a report, "" without any."""
    if not (steps := [step for step in saved_steps(checkpoints) if step > after]):
        return ""
    number, real = 1, checkpoints if after < 0 or isinstance(checkpoints, RemotePath) else checkpoints.resolve()
    while _exists(aside := real.with_name(f"{real.name}.{number}")):
        number += 1
    if isinstance(checkpoints, RemotePath):
        files = {name for name in checkpoints.files() if name in (POINTER, BEST) or _is_in_checkpoint(name)}
        names = {name for name in files - _unpublished(checkpoints) if step_of(name.partition("/")[0]) > after}
        for name in sorted(names, key=lambda name: name.endswith(NAME)):
            (checkpoints / name).copy_to(checkpoints.with_name(aside.name) / name)
        checkpoints.delete_files(names)
    else:
        try:
            if after < 0:
                os.rename(checkpoints, str(aside))
            else:
                os.mkdir(str(aside))
                for name in map(folder_name, steps):
                    os.rename(checkpoints / name, f"{aside}/{name}")
        except OSError as error:  # a mount point
            rule = f"cannot move checkpoints to {aside}: {error.strerror}"
            instead = "move its checkpoints away, or write another run.dir=PATH"
            raise ConfigError([Problem("run.dir", str(checkpoints.parent), rule, instead)]) from error
    if (checkpoints / BEST).is_file():
        point_to_best(checkpoints)
    count = f"{len(steps)} {'earlier' if after < 0 else 'later'} {plural(len(steps), 'checkpoint')}"
    return f"{'starting from scratch; ' if after < 0 else ''}moved {count} to {aside}"


def _exists(path: Location) -> bool:
    return bool(path.files()) if isinstance(path, RemotePath) else path.exists()


def _remove(folder: Location) -> None:
    """Delete a checkpoint: rename it first, or delete its manifest, then delete its files."""
    if isinstance(folder, RemotePath):
        (folder / NAME).delete()
        folder.delete_files(folder.files())
        return
    removed = folder.with_name(f".{folder.name}.removed")
    delete(removed)
    os.rename(folder, removed)
    delete(removed)


def delete(path: Location) -> None:
    """Delete a folder, file or link, or an object. Links are not followed."""
    if isinstance(path, RemotePath):
        path.delete()
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
