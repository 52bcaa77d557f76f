"""The folder ``<run.dir>/checkpoints``. Renames publish and delete checkpoints atomically."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron_llama.checkpoint import BEST, POINTER
from megatron_llama.checkpoint.manifest import NAME, State, merge, read_manifest
from megatron_llama.checkpoint.stored_tensors import CorruptFile, check_file_name
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.settings import KEPT_BY_TIME, CheckpointConfig
from megatron_llama.config.stored import list_steps
from megatron_llama.system.files import DRAFT, read_whole, sync_folder, write_atomically, write_synced

CLAIM = "publisher"
"""File in a partial folder, created by the rank that publishes it after a failure."""


def folder_name(step: int) -> str:
    """Return the folder name of a step, such as ``step_00000100``."""
    return f"step_{step:08d}"


def partial_folder(checkpoints: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is written before its rename."""
    return checkpoints / f".{folder_name(step)}.partial"


def saved_steps(checkpoints: Path) -> list[int]:
    """Return the steps with a checkpoint, newest first. Raises CorruptFile if the folder cannot be read."""
    try:
        return list_steps(checkpoints)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CorruptFile(f"{checkpoints}: {error.strerror}") from error


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint folder of ``path``: a checkpoint, a run (its newest), or a pointer (``latest``, ``best``).

    The newest complete checkpoint is used if a kill left no pointer. Raises ConfigError.
    """
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
        for step in saved_steps(folder) if folder.is_dir() else ():
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


def resume_candidates(checkpoints: Path, settings: CheckpointConfig) -> list[Path]:
    """Return the checkpoints to resume from, preferred first.

    Deletes partial files of a killed run. Raises ConfigError.
    """
    clean(checkpoints)
    if settings.resume == "never":
        return []
    if settings.keep_best and checkpoints.is_dir():
        point_to_best(checkpoints)
    try:
        saved = [checkpoints / folder_name(step) for step in saved_steps(checkpoints)]
    except CorruptFile as error:
        problem = Problem("run.dir", str(error), "checkpoints cannot be read", "change its permissions")
        raise ConfigError([problem]) from None
    if settings.resume == "auto":
        return saved
    # A path gives the first start. A restart with the same command resumes from the run's newest checkpoint, unless the
    # path is one of the run's checkpoints: then the run returns to it.
    chosen = Path(os.path.abspath(settings.resume))
    if chosen.name in (POINTER, BEST) and chosen.is_file():
        chosen = find_checkpoint(chosen)
    return [chosen] if not saved or chosen.parent == Path(os.path.abspath(checkpoints)) else saved


def clean(checkpoints: Path) -> None:
    """Delete partial files of a killed run. The caller holds the lock of the run folder."""
    if not checkpoints.is_dir():
        return
    for entry in checkpoints.iterdir():
        if entry.name.startswith(".") and entry.name.endswith((".partial", ".removed", DRAFT)):
            delete(entry)


def read_pointer(checkpoints: Path, pointer: str) -> Path:
    """Return the checkpoint named by the file ``latest`` or ``best``. Raises CorruptFile if the file is invalid."""
    path = checkpoints / pointer
    try:
        return checkpoints / check_file_name(read_whole(path).decode().strip())
    except (OSError, UnicodeDecodeError, CorruptFile) as error:
        raise CorruptFile(f"{path} is not a valid pointer: {error}") from error


def best_checkpoint(checkpoints: Path) -> Path | None:
    """Return the checkpoint with the lowest validation loss, the earliest of equals; None if none has a loss."""
    states = {step: _state_of(checkpoints / folder_name(step)) for step in saved_steps(checkpoints)}
    losses = [(state.val_loss, step) for step, state in states.items() if state and state.val_loss is not None]
    return checkpoints / folder_name(min(losses)[1]) if losses else None


def point_to_best(checkpoints: Path, new: State | None = None) -> Path | None:
    """Write the name of the best checkpoint to ``best``, and return its folder.

    Args:
        new: The state just saved, compared with the current best. None: compare all checkpoints.
    """
    best: Path | None
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
        (checkpoints / BEST).unlink(missing_ok=True)
    elif old is None or best != known:
        write_atomically(checkpoints / BEST, best.name + "\n")
    return best


def publish(checkpoints: Path, state: State, settings: CheckpointConfig) -> None:
    """Publish the files that all ranks have written: write the manifest, rename, update pointers, delete old ones.

    Raises OSError or CorruptFile. An error before the rename leaves earlier checkpoints unchanged.
    """
    partial, final = partial_folder(checkpoints, state.step), checkpoints / folder_name(state.step)
    text = merge(partial, state)
    for part in (*partial.glob("rank_*.json"), *partial.glob(CLAIM)):
        part.unlink()
    write_synced(partial / NAME, text.encode())
    sync_folder(partial)
    if final.exists() or final.is_symlink():  # a damaged checkpoint of the same step
        _remove(final)
    os.rename(partial, final)
    sync_folder(checkpoints)
    point_to(final)
    best = point_to_best(checkpoints, state) if settings.keep_best else None  # before the old best may be deleted
    prune(checkpoints, state.step, settings, best)


def point_to(checkpoint: Path) -> None:
    """Write a checkpoint's name to ``latest``."""
    write_atomically(checkpoint.with_name(POINTER), checkpoint.name + "\n")


def prune(checkpoints: Path, newest: int, settings: CheckpointConfig, best: Path | None) -> None:
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


def _state_of(folder: Path) -> State | None:
    """Return the state of a checkpoint; None for a damaged one."""
    try:
        return read_manifest(folder).state
    except CorruptFile:
        return None


def move_aside(checkpoints: Path) -> Path | None:
    """Rename a folder with checkpoints to ``checkpoints.N``; return the new path, or None without checkpoints."""
    if not saved_steps(checkpoints):
        return None
    number = 1
    while (aside := checkpoints.with_name(f"{checkpoints.name}.{number}")).exists():
        number += 1
    try:
        os.rename(checkpoints, aside)
    except OSError as error:  # a mount point
        rule = f"cannot rename {checkpoints} to {aside.name}: {error.strerror}"
        instead = "move its checkpoints away, or write another run.dir=PATH"
        raise ConfigError([Problem("checkpoint.resume", "never", rule, instead)]) from error
    return aside


def _remove(folder: Path) -> None:
    """Delete a checkpoint: rename it first, then delete its files."""
    removed = folder.with_name(f".{folder.name}.removed")
    delete(removed)
    os.rename(folder, removed)
    delete(removed)


def delete(path: Path) -> None:
    """Delete a folder, file or link. Links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
