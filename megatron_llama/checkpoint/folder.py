"""``<run.dir>/checkpoints``: how a checkpoint comes to be there, complete or not at all, and how it leaves."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from megatron_llama.checkpoint.files import Damaged, replace_text, sync_folder, write_synced
from megatron_llama.checkpoint.manifest import NAME, State, merge

POINTER = "latest"
_STEP = re.compile(r"step_(\d{8,})")


def folder_name(step: int) -> str:
    """``step_00000100``."""
    return f"step_{step:08d}"


def partial_folder(checkpoints: Path, step: int) -> Path:
    """Where a checkpoint is written before it is one."""
    return checkpoints / f".{folder_name(step)}.partial"


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps that have a checkpoint, newest first; raises Damaged for a folder that can't be read."""
    try:
        names = os.listdir(checkpoints)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Damaged(f"{checkpoints}: {error.strerror}") from error
    found = (_STEP.fullmatch(name) for name in names)
    return sorted((int(match[1]) for match in found if match), reverse=True)


def clean(checkpoints: Path) -> None:
    """Remove what a run that was killed left half-written or half-removed. The run's lock keeps other runs out."""
    if not checkpoints.is_dir():
        return
    for entry in checkpoints.iterdir():
        if entry.name.startswith(".") and entry.name.endswith((".partial", ".removed")):
            _delete(entry)


def publish(checkpoints: Path, state: State, keep: int | None, keep_every: int | None) -> None:
    """Make a checkpoint of what all ranks have written: describe it, rename it, point to it, then drop old ones.

    Raises OSError or Damaged; until the rename nothing of the earlier checkpoints has changed.
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
    replace_text(checkpoints / POINTER, final.name + "\n")
    prune(checkpoints, state.step, keep, keep_every)


def discard(checkpoints: Path, step: int) -> None:
    """Remove what was written of a checkpoint that could not be finished."""
    _delete(partial_folder(checkpoints, step))


def prune(checkpoints: Path, newest: int, keep: int | None, keep_every: int | None) -> None:
    """Drop all but the ``keep`` newest of the checkpoints up to ``newest``, and those at multiples of
    ``keep_every``."""
    if keep is None:
        return
    for step in [step for step in saved_steps(checkpoints) if step <= newest][keep:]:
        if not (keep_every and step % keep_every == 0):
            _remove(checkpoints / folder_name(step))


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
