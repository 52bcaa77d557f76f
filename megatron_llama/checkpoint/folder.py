"""The folder ``<run.dir>/checkpoints``: checkpoints appear in it complete or not at all, and leave it at once."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from megatron_llama.checkpoint.manifest import NAME, State, merge, read_manifest
from megatron_llama.checkpoint.stored_tensors import CorruptFile, check_file_name
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.settings import CheckpointConfig
from megatron_llama.system.files import DRAFT, read_whole, sync_folder, write_atomically, write_synced

POINTER, BEST = "latest", "best"
_STEP = re.compile(r"step_(\d{8,})")


def folder_name(step: int) -> str:
    """``step_00000100``."""
    return f"step_{step:08d}"


def partial_folder(checkpoints: Path, step: int) -> Path:
    """Where a checkpoint is written before it is complete."""
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


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at ``path``: the folder itself, the newest of a run's, or the one that a pointer (``latest``,
    ``best``) names. Raises ConfigError."""
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
    rule = f"there is no {NAME} in it, so it is not a checkpoint"
    raise ConfigError(
        [Problem("CHECKPOINT", str(path), rule, "write RUN_FOLDER/checkpoints/step_..., or the run's folder")]
    )


def resume_candidates(checkpoints: Path, settings: CheckpointConfig) -> tuple[list[Path], Path | None]:
    """The checkpoints to resume from, best first; and where those of an earlier run were moved by resume=never.

    Deletes what a killed run left behind. Raises ConfigError.
    """
    clean(checkpoints)
    if settings.resume == "never":
        return [], move_aside(checkpoints)
    if settings.keep_best and checkpoints.is_dir():
        point_to_best(checkpoints)
    try:
        own = [checkpoints / folder_name(step) for step in saved_steps(checkpoints)]
    except CorruptFile as error:
        problem = Problem("run.dir", str(error), "its checkpoints can't be read", "make it readable")
        raise ConfigError([problem]) from None
    if settings.resume == "auto":
        return own, None
    # A path is where a run begins. Started again by the same command, the run resumes from its own checkpoints, unless
    # the path is one of these: then the user wants to go back to it.
    chosen = Path(os.path.abspath(settings.resume))
    if chosen.name in (POINTER, BEST) and chosen.is_file():
        chosen = find_checkpoint(chosen)
    return [chosen] if not own or chosen.parent == Path(os.path.abspath(checkpoints)) else own, None


def clean(checkpoints: Path) -> None:
    """Deletes what a killed run left half written or half deleted. The run's lock keeps other runs out."""
    if not checkpoints.is_dir():
        return
    for entry in checkpoints.iterdir():
        if entry.name.startswith(".") and entry.name.endswith((".partial", ".removed", DRAFT)):
            _delete(entry)


def read_pointer(checkpoints: Path, pointer: str) -> Path:
    """The checkpoint that the file ``latest`` or ``best`` names. Raises CorruptFile where it names none."""
    path = checkpoints / pointer
    try:
        return checkpoints / check_file_name(read_whole(path).decode().strip())
    except (OSError, UnicodeDecodeError, CorruptFile) as error:
        raise CorruptFile(f"{path} is unusable: {error}") from error


def best_checkpoint(checkpoints: Path) -> Path | None:
    """The checkpoint with the lowest validation loss in its manifest, the first of equals; None without any."""
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
    """Makes ``best`` name the best checkpoint, and returns that.

    ``new``, which has just been saved, is compared with the one that ``best`` names. Without it all are compared, which
    also repairs what a killed run left undone.
    """
    best: Path | None
    try:
        known = read_pointer(checkpoints, BEST)
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


def publish(checkpoints: Path, state: State, settings: CheckpointConfig) -> None:
    """Makes a checkpoint of what all ranks have written: describes it, renames it, points to it, deletes old ones.

    Raises OSError or CorruptFile; until the rename nothing of the earlier checkpoints has changed.
    """
    partial, final = partial_folder(checkpoints, state.step), checkpoints / folder_name(state.step)
    text = merge(partial, state)
    for part in partial.glob("rank_*.json"):
        part.unlink()
    write_synced(partial / NAME, text.encode())
    sync_folder(partial)
    if final.exists() or final.is_symlink():  # a damaged one, whose step the run has reached again
        _remove(final)
    os.rename(partial, final)
    sync_folder(checkpoints)
    point_to(final)
    best = point_to_best(checkpoints, state) if settings.keep_best else None  # before the old best may be deleted
    prune(checkpoints, state.step, settings, best)


def point_to(checkpoint: Path) -> None:
    """Makes ``latest`` name a checkpoint. A kill after a checkpoint's rename leaves the one before it there."""
    write_atomically(checkpoint.with_name(POINTER), checkpoint.name + "\n")


def prune(checkpoints: Path, newest: int, settings: CheckpointConfig, best: Path | None) -> None:
    """Deletes the checkpoints up to ``newest`` that neither keep nor keep_every keeps, except ``best``."""
    if settings.keep is None:
        return
    for step in [step for step in saved_steps(checkpoints) if step <= newest][settings.keep :]:
        folder = checkpoints / folder_name(step)
        if folder != best and not (settings.keep_every and step % settings.keep_every == 0):
            _remove(folder)


def discard(checkpoints: Path, step: int) -> None:
    """Deletes what was written of a checkpoint that failed."""
    _delete(partial_folder(checkpoints, step))


def move_aside(checkpoints: Path) -> Path | None:
    """Renames a folder with checkpoints, so that those of a new run don't mix with them; returns the new path."""
    if not saved_steps(checkpoints):
        return None
    number = 1
    while (aside := checkpoints.with_name(f"{checkpoints.name}.{number}")).exists():
        number += 1
    os.rename(checkpoints, aside)
    return aside


def _remove(folder: Path) -> None:
    """Deletes a checkpoint: first renames it, at once, then deletes its files."""
    removed = folder.with_name(f".{folder.name}.removed")
    _delete(removed)
    os.rename(folder, removed)
    _delete(removed)


def _delete(path: Path) -> None:
    """Deletes a folder or file; a link is deleted, not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
