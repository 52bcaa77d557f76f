"""Checkpoints of a run: resume, save after a step, finish, export."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic
from typing import Any, Protocol

import torch

from megatron_llama.arch.hf_tp_mapping import is_lora
from megatron_llama.arch.recognize_format import TRAINER, is_foreign, recognize
from megatron_llama.checkpoint import BEST
from megatron_llama.checkpoint import state as contents
from megatron_llama.checkpoint.changed_settings import Difference, check_allowed, data_record, find_differences
from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import (
    begin_writing,
    clean,
    fallback_folder,
    find_checkpoint,
    move_aside,
    point_to,
    resume_candidates,
)
from megatron_llama.checkpoint.hf_folder import SafetensorsFiles, open_hf_folder
from megatron_llama.checkpoint.lora_adapter import fingerprint, open_adapter
from megatron_llama.checkpoint.manifest import Manifest, State, dtype_of, read_manifest
from megatron_llama.checkpoint.memory_copies import MemoryCopies, MemoryCopy, UnusableCopy, forget_copies
from megatron_llama.checkpoint.saving import Saver
from megatron_llama.checkpoint.tensor_source import CorruptFile, Rectangles
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.data_settings import NewTokens
from megatron_llama.config.limits import ALLOWED
from megatron_llama.config.settings import CheckpointConfig
from megatron_llama.config.stored_settings import checkpoint_folder, leaves_newest, step_of
from megatron_llama.data.batches import Data
from megatron_llama.optim import Optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.parallel.compare_copies import Copies
from megatron_llama.parallel.groups import broadcast_from_rank_0, sync_errors
from megatron_llama.parallel.parallelize import init_magnitudes, init_token_rows
from megatron_llama.plan import Plan
from megatron_llama.plan.data_schedules import BatchSchedule
from megatron_llama.system import phase
from megatron_llama.system.object_store import Location
from megatron_llama.system.wrapping import escape_controls
from megatron_llama.topology import Topology


class GuardState(Protocol):
    """An object whose state belongs to the checkpoint."""

    def state(self) -> dict[str, Any] | None:
        """Return the state, as JSON."""

    def restore(self, state: State) -> State:
        """Restore the result of ``state``; return the state from which the run resumes."""


class Checkpointer:
    """Saves and restores a run. Each method is a collective: all ranks call it at the same step."""

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        model: ParallelModel,
        optimizer: Optimizer,
        data: Data,
        guard: GuardState | None = None,
    ) -> None:
        assert plan.config.run.dir is not None, "run.dir must be set"
        self.plan, self.topology, self.model, self.optimizer, self.data = plan, topology, model, optimizer, data
        self.guard = guard
        self.checkpoints = checkpoint_folder(plan.run_dir, plan.config)
        self.saver = Saver(self.checkpoints, topology.rank, model.device, plan.config.checkpoint)
        every = plan.config.checkpoint.memory_every_steps
        self.memory = None if every is None else MemoryCopies(self.checkpoints, topology.rank, model.device, every)
        """Copies in memory; None without checkpoint.memory_every_steps."""
        self._copies = Copies(topology, model.device)
        self._compared: int | None = None
        self._saved: int | None = None
        self._resumed: MemoryCopy | None = None
        self._saved_at = monotonic()
        self._differences: list[Difference] = []
        self._val_loss: float | None = None
        self._tokens: int | None = None
        self._origin: tuple[str | None, str] = (None, plan.precision.param_dtype)
        self._lora = plan.config.finetune.method == "lora"
        self._base: str | None = None

    def resume(self) -> Plan:
        """Load the newest intact checkpoint, or the initial weights; return the plan, with ``start`` set.

        Tries the candidates of ``resume_candidates`` in order and skips damaged ones.

        Raises:
            ConfigError: On all ranks, if a checkpoint does not match the config, or if all checkpoints are damaged.
        """
        plan = self._resume()
        # Last: a rejected start must not stop the run that writes to an object store.
        self.saver.writer = broadcast_from_rank_0(lambda: begin_writing(self.checkpoints, self.plan.run_dir))
        if (memory := self.memory) is None:
            forget_copies(self.checkpoints)
        else:
            self._report(memory.open(self._tensors(1, owned=False), self._resumed))
            self.optimizer.inner.register_step_pre_hook(lambda *_: memory.hold_updates())
        return plan

    def _resume(self) -> Plan:
        settings = self.plan.config.checkpoint
        broadcast_from_rank_0(lambda: _check_fallback(settings, self.checkpoints))
        candidates: list[Location | MemoryCopy]
        candidates = [*broadcast_from_rank_0(lambda: resume_candidates(self.checkpoints, settings))]
        if self.memory is not None and not leaves_newest(self.plan.config):
            # Stable: of the same step, the checkpoint on the disk comes first.
            candidates = sorted([*candidates, *self.memory.steps()], key=self._step_of, reverse=True)
        if self._lora:
            self._load_base()  # checkpoints do not contain the base model
            init_magnitudes(self.model)
            init_token_rows(self.model)
        failures = []
        for candidate in candidates:
            try:
                state = self._load(candidate)
            except UnusableCopy as error:
                self._report(f"skipping {candidate}: {error}")
                continue
            except CorruptFile as error:
                failures.append(str(error))
                self._report(f"skipping damaged {candidate}: {error}")
                continue
            self._origin = self._origin if self._lora else (state.hf_folder, state.dtype)
            if isinstance(candidate, MemoryCopy):
                self._resumed = candidate
            elif candidate.parent == self.checkpoints:
                self._saved = state.step
            self._restore(candidate, state)
            if not isinstance(candidate, MemoryCopy) and self._saved is not None and self.topology.rank == 0:
                point_to(candidate)  # the run may end without another save
            self._move_aside(state.step)
            return self.plan
        if failures:
            instead = "write checkpoint.resume=never to start from scratch (moves them aside), or an intact one's path"
            rule = f"all checkpoints are damaged: {'; '.join(failures)}"
            raise ConfigError([Problem("checkpoint.resume", settings.resume, rule, instead)])
        if self._lora and self.plan.config.finetune.adapter is not None:
            self._start_from("finetune.adapter", self.plan.config.finetune.adapter, self._load_adapter)
        elif not self._lora and self.plan.config.init_from is not None:
            self._start_from("init_from", self.plan.config.init_from, self._load_weights)
        self._move_aside()
        return self.plan

    def _move_aside(self, after: int = -1) -> None:
        """Move the checkpoints aside that checkpoint.resume leaves. Last: a rejected start must not move them."""
        leaves = leaves_newest(self.plan.config)
        if leaves and (moved := broadcast_from_rank_0(lambda: move_aside(self.checkpoints, after))):
            self._report(moved)

    def after_step(
        self, step: int, stop: bool = False, val_loss: float | None = None, consumed_tokens: int | None = None
    ) -> bool:
        """Compare copies (``trainer.check_copies_every``). Save by ``checkpoint``, and if ``stop`` is true on any rank.

        Returns whether ``stop`` is true on any rank. Then all ranks have saved the step and its files are on disk.

        Args:
            val_loss: Validation loss after the step, if it was validated.
            consumed_tokens: Tokens of the run so far, if counted.

        Raises:
            SaveFailed: On all ranks, if checkpoint.max_failed_saves in a row, or the last one, could not be written.
            TrainingFault: On all ranks, if copies of a weight or state differ. The step is not saved.
        """
        if (often := self.plan.config.trainer.check_copies_every) and step % often == 0:
            self.compare_copies(step)
        memory = self.memory if self.memory is not None and step % self.memory.every == 0 else None
        if memory is not None:
            memory.wait()  # before the collective below: then all ranks have a complete copy
        # NaN is neither better nor worse than another loss.
        self._val_loss = val_loss if val_loss is not None and math.isfinite(val_loss) else None
        self._tokens = consumed_tokens
        every, minutes = self.plan.config.checkpoint.every_steps, self.plan.config.checkpoint.every_minutes
        is_late = bool(minutes) and monotonic() - self._saved_at >= 60 * float(minutes or 0)
        stop, due = self.saver.advance(stop, due=is_late and self.topology.rank == 0)  # by rank 0's clock
        if stop or due or (every and step % every == 0):
            phase.enter(f"saving step {step}", phase.PATIENT)
            self._save(step, replaceable=self.plan.replaces_checkpoints and step < self.plan.config.trainer.steps)
        if stop:
            self.saver.finish()
            self.forget_copies()
        elif memory is not None:
            memory.copy(self._tensors(step, owned=False), self._state(step))
        return stop

    def forget_copies(self) -> None:
        """Delete the copies in memory, if any. A collective."""
        if self.memory is not None:
            self.memory.delete()

    def compare_copies(self, step: int, *, saves: bool = False) -> None:
        """Compare the copies of weights and optimizer states after ``step``, unless it was compared. A collective.

        Args:
            saves: whether a save follows, for the message.

        Raises:
            TrainingFault: On all ranks, if copies differ.
        """
        if step == self._compared:
            return
        parts = [("", shard, shard.local) for shard in self.model.shards]
        with_states = step > 0  # before the first step the optimizer may not have created them
        parts += self.optimizer.tensors() if with_states else ()
        self._copies.compare(parts, f"step {step} is not saved" if saves else f"step {step}", with_states=with_states)
        self._compared = step

    def finish(self, step: int) -> None:
        """Save the last step (``checkpoint.save_last``) and wait until all files are on disk."""
        phase.enter(f"saving step {step}, the last", phase.PATIENT)
        if self.plan.config.checkpoint.save_last:
            self._save(step)
            self.saver.finish()
        self.saver.wait()
        self.forget_copies()

    def export(self) -> None:
        """With checkpoint.export_hf, write the last checkpoint (with keep_best: the best) as a Hugging Face folder.

        Never replaces an export: an extended run adds ``hf_step_N``, and a finished run that starts again adds none.
        Only rank 0 works.
        """
        settings = self.plan.config.checkpoint
        if settings.export_hf and self.topology.rank == 0:
            best = self.checkpoints / BEST
            is_best = settings.keep_best and best.is_file()  # missing if no validation loss was finite
            source = find_checkpoint(best if is_best else self.checkpoints)
            out, trained = self.plan.run_dir / "hf", self.plan.config.trainer.steps > self.plan.start.step
            if out.exists() and trained:
                out = out.with_name(f"hf_{source.name}")
            if out.exists():
                self._report(f"{out} exists: nothing is exported")
                return
            exported = export(source, out, merge=self._lora)
            label = "best validation loss" if is_best else "last"
            self._report(f"exported {source.name} ({label}) to {exported.folder} as {exported.dtype}")

    def _load_base(self) -> None:
        """Load the weights that LoRA freezes, and store their fingerprint."""
        trainer, model, folder = self.plan.config.trainer, self.plan.model, self.plan.config.init_from
        if folder is None:
            self._base = f"random weights of trainer.seed={trainer.seed}, {model.initializer_range:g}"
            return
        self._start_from("init_from", folder, self._load_weights)
        self._base = broadcast_from_rank_0(lambda: fingerprint(self._open_hf_folder(Path(folder))))

    def _open_hf_folder(self, folder: Path) -> SafetensorsFiles:
        return open_hf_folder(folder, self.plan.model, grows=bool(NewTokens.of(self.plan.config.data)))

    def _start_from(self, field: str, folder: str, load: Callable[[Path], None]) -> None:
        """Load the weights of a folder. Raises ConfigError on all ranks if they do not match."""
        try:
            with sync_errors(CorruptFile, ConfigError):
                load(Path(folder))
        except CorruptFile as error:
            instead = "download the folder again, or name another"
            raise ConfigError([Problem(field, folder, str(error), instead)]) from None
        label = "frozen weights" if self._lora and field == "init_from" else "initial weights"
        self._report(f"{label} from {folder}")

    def _load_weights(self, folder: Path) -> None:
        from megatron_llama.checkpoint.foreign.detect import open_foreign  # most runs start without these readers
        from megatron_llama.checkpoint.foreign.tensors import NO_SETTINGS

        model, recognized = self.plan.model, recognize(folder)
        is_trainer = recognized is not None and recognized.format == TRAINER and recognized.folder == folder
        # With Hugging Face's config.json and files. The errors of unknown folders assume it.
        has_config = recognized is None or not recognized.is_foreign or is_trainer
        foreign = None if has_config else open_foreign(folder, model)
        stored = self._open_hf_folder(folder) if foreign is None else foreign.tensors
        if foreign is not None and not foreign.has_settings:
            self._report(f"{folder} lacks {NO_SETTINGS}")
        base = [shard for shard in self.model.shards if not is_lora(shard.name)]
        stored.load_into(contents.weights(shard for shard in base if shard.quantized is None))
        contents.load_quantized(base, stored)
        self._origin = os.path.abspath(folder) if has_config else None, dtype_of(stored)

    def _load_adapter(self, folder: Path) -> None:
        adapter = open_adapter(folder, self.plan.model, self.plan.config.finetune)
        adapter.load_into(contents.weights(self.model.trained))

    def _step_of(self, candidate: Location | MemoryCopy) -> int:
        """Return the step of a candidate for the resume; 0 for a checkpoint of another run."""
        if isinstance(candidate, MemoryCopy):
            return candidate.step
        return step_of(candidate.name) if candidate.parent == self.checkpoints else 0

    def _load(self, folder: Location | MemoryCopy) -> State:
        """Load a checkpoint. Raises CorruptFile or, for a checkpoint of another run, ConfigError on all ranks."""
        if isinstance(folder, Path) and broadcast_from_rank_0(lambda: is_foreign(folder)):
            return self._load_foreign(folder)
        if isinstance(folder, MemoryCopy):
            assert self.memory is not None, "it has the copy"
            manifest = self.memory.load(folder, self._tensors(1, owned=False))
        else:
            with sync_errors(CorruptFile):
                manifest = read_manifest(folder)
                if self.topology.rank == 0:
                    manifest.check_sizes()
        with sync_errors(CorruptFile, ConfigError):
            self._differences = find_differences(
                self.plan, manifest.state, self.data.record(manifest.state.consumed_samples)
            )
            check_allowed(self._differences, self.plan.config.checkpoint.allow, folder)
            if manifest.state.base != self._base:
                rule = f"is not the base model of the checkpoint {folder}"
                instead = "write init_from=FOLDER with the base model"
                raise ConfigError([Problem("init_from", self.plan.config.init_from, rule, instead)])
            self._fill(manifest)
        return manifest.state

    def _load_foreign(self, folder: Path) -> State:
        """Load another program's checkpoint. Raises CorruptFile or ConfigError on all ranks."""
        with sync_errors(CorruptFile, ConfigError):
            from megatron_llama.checkpoint.foreign.detect import open_foreign, resumed_state

            foreign = open_foreign(folder, self.plan.model, resumes=True)
            state, self._differences = resumed_state(self.plan, foreign, self.data.record(0))
            states = contents.load_converted(self.optimizer, foreign.tensors)
            foreign.tensors.load_into(contents.weights(self.model.trained) | states)
            self._origin = None, dtype_of(foreign.tensors)
        for part in foreign.missing:
            self._report(f"{foreign.folder} lacks {part}")
        return replace(state, dtype=self._origin[1])

    def _restore(self, folder: Location | MemoryCopy, state: State) -> None:
        """Restore optimizer, data and plan; log changed settings."""
        self._report(f"resuming from {folder}{'' if isinstance(folder, MemoryCopy) else f', step {state.step}'}")
        for difference in self._differences:
            self._report(f"{difference}{', allowed' if difference.kind in ALLOWED else ''}")
        state = state if self.guard is None else self.guard.restore(state)
        self.optimizer.restore(state.updates, state.step)
        if state.consumed_samples > 0:
            self.data.resume(data_record(state), state.position)
        self.plan = replace(self.plan, start=state.position)
        steps, batches = self.plan.config.trainer.steps, self.plan.batches
        planned, ends = BatchSchedule.of(self.plan.config).after(steps).samples, batches.after(max(steps, state.step))
        if self.plan.requested.trainer.epochs is not None and ends.samples != planned:
            instead = f"for {planned:,} samples write trainer.steps={batches.last_step_within(planned)}"
            self._report(f"{steps} steps (trainer.epochs) end at sample {ends.samples:,}; {instead}")
        if state.lr is not None and not math.isclose(state.lr, self.optimizer.lr, rel_tol=1e-6):
            self._report(f"the learning rate of step {state.step + 1} is {self.optimizer.lr:g}, not {state.lr:g}")

    def _fill(self, manifest: Manifest) -> None:
        """Fill weights and optimizer states; restore the random state if the world size is equal.

        Raises CorruptFile.
        """
        state, tensors, device = manifest.state, manifest.stored.tensors, self.model.device
        states = contents.load_converted(self.optimizer, manifest.stored) if state.step > 0 else {}
        targets = contents.weights(self.model.trained) | states
        missing = sorted(name for name in targets if name not in tensors)
        if missing:
            raise CorruptFile(f"{missing[0]} is missing")
        ((random_name, current),) = contents.random_state(self.topology.rank, device).items()
        same_ranks = state.world_size == self.plan.world_size and random_name in tensors
        if same_ranks:
            shape = tensors[random_name].shape
            saved = torch.empty(shape, dtype=torch.uint8)
            targets[random_name] = Rectangles(shape, [((0,), saved)])
        extra = contents.extra_states(self.optimizer, self.topology.rank) if state.step > 0 else {}
        same = all(name in tensors and tensors[name].shape == held.shape for name, held in extra.items())
        manifest.stored.load_into(targets | (extra if same else {}))
        if extra and same:
            contents.load_extra_states(self.optimizer, extra)
        elif extra:
            self._report(
                f"{self.optimizer.inner.extra_states_label} start at zero: the layout differs from the checkpoint"
            )
        if same_ranks and saved.shape == current.shape:  # shapes differ between device types
            contents.set_random_state(saved, device)

    def _save(self, step: int, replaceable: bool = False) -> None:
        self._saved_at = monotonic()
        if step == self._saved and self.saver.lost is None:
            return
        self.compare_copies(step, saves=True)  # a checkpoint has one copy: it would hide the difference
        self.saver.start(self._tensors(step, owned=True), self._state(step, replaceable))
        self._saved = step

    def _tensors(self, step: int, *, owned: bool) -> dict[str, Rectangles]:
        """Return views of this rank's tensors after ``step``; with ``owned`` only of its part of a checkpoint."""
        tensors = contents.weights(self.model.trained, owned)
        if step > 0:
            tensors |= contents.optimizer_states(self.optimizer, owned)
            tensors |= contents.extra_states(self.optimizer, self.topology.rank)
        return tensors | contents.random_state(self.topology.rank, self.model.device)

    def _state(self, step: int, replaceable: bool = False) -> State:
        config = self.plan.config
        position = self.plan.batches.after(step)
        return State(
            step=step,
            consumed_samples=position.samples,
            optimizer=config.optim.name,
            updates=self.optimizer.updates,
            world_size=self.plan.world_size,
            settings=asdict(config),
            hf_folder=self._origin[0],
            dtype=self._origin[1],
            val_loss=self._val_loss,
            base=self._base,
            lr=self.optimizer.lr,
            consumed_tokens=position.tokens if self._tokens is None else self._tokens,
            data=self.data.record(position.samples),
            working_dir=_working_dir(),
            replaceable=replaceable,
            spikes=None if self.guard is None else self.guard.state(),
        )

    def _report(self, text: str) -> None:
        """Write a line to stderr on rank 0; stdout has the progress line."""
        if self.topology.rank == 0:
            sys.stderr.write(f"checkpoint: {escape_controls(text)}\n")


def _check_fallback(settings: CheckpointConfig, checkpoints: Location) -> None:
    """Create or clean the run's folder in checkpoint.fallback_dir. Raises ConfigError if it cannot be written."""
    folder = fallback_folder(settings, checkpoints)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
            clean(folder)
        except OSError as error:
            rule, instead = f"cannot be written: {error.strerror}", "name a folder on another disk, or omit it"
            raise ConfigError([Problem("checkpoint.fallback_dir", settings.fallback_dir, rule, instead)]) from None


def _working_dir() -> str | None:
    """Return the current folder; None if it was deleted, which must not prevent the save."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
