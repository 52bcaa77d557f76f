"""``<run.dir>/checkpoints``: how a checkpoint comes to be there, complete or not at all, and how it leaves."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from megatron_llama.checkpoint.manifest import NAME, State, merge, read_manifest
from megatron_llama.checkpoint.stored_tensors import CorruptFile, plain_name
from megatron_llama.system.files import sync_folder, write_atomically, write_synced

POINTER, BEST = "latest", "best"
_STEP = re.compile(r"step_(\d{8,})")


def folder_name(step: int) -> str:
    """``step_00000100``."""
    return f"step_{step:08d}"


def partial_folder(checkpoints: Path, step: int) -> Path:
    """Where a checkpoint is written before it is one."""
    return checkpoints / f".{folder_name(step)}.partial"


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps that have a checkpoint, newest first; raises CorruptFile for a folder that can't be read."""
    try:
        names = os.listdir(checkpoints)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CorruptFile(f"{checkpoints}: {error.strerror}") from error
    found = (_STEP.fullmatch(name) for name in names)
    return sorted((int(match[1]) for match in found if match), reverse=True)


def clean(checkpoints: Path) -> None:
    """Remove what a run that was killed left half-written or half-removed. The run's lock keeps other runs out."""
    if not checkpoints.is_dir():
        return
    for entry in checkpoints.iterdir():
        if entry.name.startswith(".") and entry.name.endswith((".partial", ".removed")):
            _delete(entry)


def pointed(checkpoints: Path, pointer: str) -> Path:
    """The checkpoint that ``latest`` or ``best`` names; raises CorruptFile where it names none."""
    path = checkpoints / pointer
    try:
        return checkpoints / plain_name(path.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError, CorruptFile) as error:
        raise CorruptFile(f"{path} is unusable: {error}") from error


def best_checkpoint(checkpoints: Path) -> Path | None:
    """The checkpoint with the lowest validation loss, by their manifests, the first of equals; None without any."""
    found: list[tuple[float, int]] = []
    for step in saved_steps(checkpoints):
        try:
            loss = read_manifest(checkpoints / folder_name(step)).state.val_loss
        except CorruptFile:
            continue
        if loss is not None:
            found.append((loss, step))
    return checkpoints / folder_name(min(found)[1]) if found else None


def point_to_best(checkpoints: Path, new: State | None = None) -> Path | None:
    """Have ``best`` name the best checkpoint, and return that. ``new``, which has just been saved, is only compared
    with the one it names already; without it all are looked at, which also mends what a killed run left undone."""
    best: Path | None
    try:
        known = pointed(checkpoints, BEST)
        old = None if new is None or known.name == folder_name(new.step) else read_manifest(known).state.val_loss
    except CorruptFile:
        old = None
    if new is None or old is None:
        best = best_checkpoint(checkpoints)
    else:
        best = checkpoints / folder_name(new.step) if new.val_loss is not None and new.val_loss < old else known
    if best is None:
        (checkpoints / BEST).unlink(missing_ok=True)
    elif old is None or best != known:
        write_atomically(checkpoints / BEST, best.name + "\n")
    return best


def publish(checkpoints: Path, state: State, keep: int | None, keep_every: int | None, keep_best: bool = False) -> None:
    """Make a checkpoint of what all ranks have written: describe it, rename it, point to it, then drop old ones.

    Raises OSError or CorruptFile; until the rename nothing of the earlier checkpoints has changed.
    """
    aside, final = partial_folder(checkpoints, state.step), checkpoints / folder_name(state.step)
    text = merge(aside, state)
    for part in aside.glob("rank_*.json"):
        part.unlink()
    write_synced(aside / NAME, text.encode())
    sync_folder(aside)
    if final.exists() or final.is_symlink():  # a damaged one, whose step the run has reached again
        _remove(final)
    os.rename(aside, final)
    sync_folder(checkpoints)
    write_atomically(checkpoints / POINTER, final.name + "\n")
    best = point_to_best(checkpoints, state) if keep_best else None  # before the one it named may go
    prune(checkpoints, state.step, keep, keep_every, best)


def discard(checkpoints: Path, step: int) -> None:
    """Remove what was written of a checkpoint that could not be finished."""
    _delete(partial_folder(checkpoints, step))


def prune(checkpoints: Path, newest: int, keep: int | None, keep_every: int | None, best: Path | None = None) -> None:
    """Drop all but the ``keep`` newest of the checkpoints up to ``newest``, those at multiples of ``keep_every``, and
    ``best``."""
    if keep is None:
        return
    for step in [step for step in saved_steps(checkpoints) if step <= newest][keep:]:
        folder = checkpoints / folder_name(step)
        if not (keep_every and step % keep_every == 0) and folder != best:
            _remove(folder)


def set_aside(checkpoints: Path) -> Path | None:
    """Rename a folder with checkpoints so that a run that starts anew can't mix with them; returns the new name."""
    if not saved_steps(checkpoints):
        return None
    number = 1
    while (aside := checkpoints.with_name(f"{checkpoints.name}.{number}")).exists():
        number += 1
    os.rename(checkpoints, aside)
    return aside


def _remove(folder: Path) -> None:
    """Take a checkpoint away: first its name, at once, then its files."""
    removed = folder.with_name(f".{folder.name}.removed")
    _delete(removed)
    os.rename(folder, removed)
    _delete(removed)


def _delete(path: Path) -> None:
    """Delete a folder or file; a link is deleted, not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
