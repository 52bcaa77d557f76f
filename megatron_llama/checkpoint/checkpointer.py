"""The checkpoints of a run, as the training loop uses them: resume, save after a step, finish."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from megatron_llama.arch.names import is_lora
from megatron_llama.checkpoint import state as contents
from megatron_llama.checkpoint.adapter import fingerprint, open_adapter
from megatron_llama.checkpoint.differences import Difference, check_allowed, data_record, find_differences
from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import BEST, find_checkpoint, point_to, resume_candidates
from megatron_llama.checkpoint.hf_folder import open_hf_folder
from megatron_llama.checkpoint.manifest import Manifest, State, dtype_of, read_manifest
from megatron_llama.checkpoint.saving import Saver
from megatron_llama.checkpoint.stored_tensors import CorruptFile, Rectangles
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.settings import ALLOWED
from megatron_llama.data.batches import Data
from megatron_llama.optim import Optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.parallel.groups import broadcast_from_rank_0, sync_errors
from megatron_llama.plan import Plan
from megatron_llama.plan.schedules import BatchSchedule
from megatron_llama.system import phase
from megatron_llama.topology import Topology


class Checkpointer:
    """Saves and restores a run. All ranks must call each method, at the same steps."""

    def __init__(self, plan: Plan, topology: Topology, model: ParallelModel, optimizer: Optimizer, data: Data) -> None:
        assert plan.config.run.dir is not None, "a run has a folder"
        self.plan, self.topology, self.model, self.optimizer, self.data = plan, topology, model, optimizer, data
        self.checkpoints = Path(plan.config.run.dir) / "checkpoints"
        self.bytes_read = 0
        """Bytes that this rank read from files when it was last loaded."""
        self.saver = Saver(self.checkpoints, topology.rank, model.device, plan.config.checkpoint)
        self._saved: int | None = None
        self._differences: list[Difference] = []
        self._val_loss: float | None = None
        self._tokens: int | None = None
        self._origin: tuple[str | None, str] = (None, plan.precision.param_dtype)
        self._lora = plan.config.finetune.method == "lora"
        self._base: str | None = None

    def resume(self) -> Plan:
        """Loads the newest good checkpoint, or the weights that the run starts from; returns the plan, whose ``start``
        is where the run stands.

        Raises ConfigError on all ranks for a checkpoint that does not fit the config, and where there are checkpoints
        but none is good: a run must not start anew by mistake.
        """
        settings = self.plan.config.checkpoint
        candidates, moved = broadcast_from_rank_0(lambda: resume_candidates(self.checkpoints, settings))
        if moved is not None:
            self._report(f"starting anew; the checkpoints of the earlier run are now in {moved}")
        if self._lora:
            self._load_base()  # no checkpoint has it
        failures = []
        for folder in candidates:
            try:
                found = self._load(folder)
            except CorruptFile as error:
                failures.append(str(error))
                self._report(f"{folder} is damaged and not used: {error}")
                continue
            self._origin = self._origin if self._lora else (found.hf_folder, found.dtype)
            self._saved = found.step if folder.parent == self.checkpoints else None
            if self._saved is not None and settings.resume == "auto" and self.topology.rank == 0:
                point_to(folder)  # this run may have nothing more to save
            self._go_on(folder, found)
            return self.plan
        if failures:
            instead = (
                "write checkpoint.resume=never to start anew (the checkpoints are kept), or the path of a good one"
            )
            rule = f"no checkpoint can be used: {'; '.join(failures)}"
            raise ConfigError([Problem("checkpoint.resume", settings.resume, rule, instead)])
        if self._lora and self.plan.config.finetune.adapter is not None:
            self._start_from("finetune.adapter", self.plan.config.finetune.adapter, self._load_adapter)
        elif not self._lora and self.plan.config.init_from is not None:
            self._start_from("init_from", self.plan.config.init_from, self._load_weights)
        return self.plan

    def after_step(
        self, step: int, stop: bool = False, val_loss: float | None = None, consumed_tokens: int | None = None
    ) -> bool:
        """Saves if the step is due. True when ``stop`` is true on any rank: then all ranks have saved the step.

        ``val_loss`` is the validation loss after the step, where it was validated; ``consumed_tokens`` are the run's
        tokens so far, where they were counted. Raises SaveFailed on all ranks when a checkpoint could not be written.
        """
        # NaN would compare as neither better nor worse than any other loss.
        self._val_loss = val_loss if val_loss is not None and math.isfinite(val_loss) else None
        self._tokens = consumed_tokens
        stop = self.saver.advance(stop)
        every = self.plan.config.checkpoint.every_steps
        if stop or (every and step % every == 0):
            phase.enter(f"saving step {step}", phase.PATIENT)
            self._save(step)
        if stop:
            self.saver.wait()
        return stop

    def finish(self, step: int) -> None:
        """Saves the last step and waits until everything is on disk."""
        phase.enter(f"saving step {step}, the last", phase.PATIENT)
        if self.plan.config.checkpoint.save_last:
            self._save(step)
        self.saver.wait()

    def export(self) -> None:
        """With checkpoint.export_hf, writes the run's last checkpoint, or with keep_best the best one, as a Hugging
        Face folder. Rank 0 does it alone."""
        settings = self.plan.config.checkpoint
        if settings.export_hf and self.topology.rank == 0:
            best = self.checkpoints / BEST
            is_best = settings.keep_best and best.is_file()  # there is none where no validation loss was finite
            source = find_checkpoint(best if is_best else self.checkpoints)
            made = export(source, self.checkpoints.with_name("hf"), merge=self._lora)
            which = "the best in validation" if is_best else "the last"
            self._report(f"exported {source.name}, {which}, to {made.folder}, {made.dtype}")

    def _load_base(self) -> None:
        """Loads the weights that LoRA freezes, and takes their fingerprint."""
        trainer, model, folder = self.plan.config.trainer, self.plan.model, self.plan.config.init_from
        if folder is None:
            self._base = f"random weights of trainer.seed={trainer.seed}, {model.initializer_range:g}"
            return
        self._start_from("init_from", folder, self._load_weights)
        self._base = broadcast_from_rank_0(lambda: fingerprint(open_hf_folder(Path(folder), model)))

    def _start_from(self, field: str, folder: str, load: Callable[[Path], None]) -> None:
        """Loads the weights of a folder. Raises ConfigError on all ranks where they can't be used."""
        try:
            with sync_errors(CorruptFile, ConfigError):
                load(Path(folder))
        except CorruptFile as error:
            raise ConfigError([Problem(field, folder, str(error), "get the folder again, or name another")]) from None
        what = "frozen weights" if self._lora and field == "init_from" else "starting"
        self._report(f"{what} from {folder}")

    def _load_weights(self, folder: Path) -> None:
        stored = open_hf_folder(folder, self.plan.model)
        own = [shard for shard in self.model.shards if not is_lora(shard.name)]
        self.bytes_read = stored.load_into(contents.weights(shard for shard in own if shard.quantized is None))
        self.bytes_read += contents.load_quantized(own, stored)
        self._origin = os.path.abspath(folder), dtype_of(stored)

    def _load_adapter(self, folder: Path) -> None:
        adapter = open_adapter(folder, self.plan.model, self.plan.config.finetune)
        self.bytes_read += adapter.load_into(contents.weights(self.model.trained))

    def _load(self, folder: Path) -> State:
        """Loads a checkpoint. Raises on all ranks CorruptFile, and ConfigError for a checkpoint of another run."""
        with sync_errors(CorruptFile, ConfigError):
            if self.topology.rank == 0:
                read_manifest(folder).check_sizes()
        with sync_errors(CorruptFile, ConfigError):
            manifest = read_manifest(folder)
            self._differences = find_differences(
                self.plan, manifest.state, self.data.record(manifest.state.consumed_samples)
            )
            check_allowed(self._differences, self.plan.config.checkpoint.allow, folder)
            if manifest.state.base != self._base:
                rule = f"is not the model that the checkpoint {folder} was trained on"
                instead = "write init_from=FOLDER with that model"
                raise ConfigError([Problem("init_from", self.plan.config.init_from, rule, instead)])
            self._fill(manifest)
        return manifest.state

    def _go_on(self, folder: Path, found: State) -> None:
        """Puts optimizer, data and plan where the checkpoint's run stood, and tells what differs."""
        self._report(f"going on from {folder}, step {found.step}")
        for difference in self._differences:
            self._report(f"{difference}{', allowed' if difference.kind in ALLOWED else ''}")
        self.optimizer.restore(found.updates, found.step)
        if found.step > 0:
            self.data.resume(data_record(found), found.position)
        self.plan = replace(self.plan, start=found.position)
        steps, batches = self.plan.config.trainer.steps, self.plan.batches
        planned, ends = BatchSchedule.of(self.plan.config).after(steps).samples, batches.after(max(steps, found.step))
        if self.plan.requested.trainer.epochs is not None and ends.samples != planned:
            instead = f"for {planned:,} write trainer.steps={batches.last_step_within(planned)}"
            self._report(f"the {steps} steps of trainer.epochs now end at sample {ends.samples:,}; {instead}")
        if found.lr is not None and found.lr != self.optimizer.lr:
            self._report(f"the learning rate of step {found.step + 1} is {self.optimizer.lr:g}, not {found.lr:g}")

    def _fill(self, manifest: Manifest) -> None:
        """Fills weights and optimizer states, and restores the random state where it is this rank's. Raises
        CorruptFile."""
        found, tensors, device = manifest.state, manifest.stored.tensors, self.model.device
        wanted, converted, read = contents.weights(self.model.trained), set[str](), 0
        if found.step > 0:
            wanted |= contents.optimizer_states(self.optimizer)
            converted, read = contents.load_converted(self.optimizer, manifest.stored)
            wanted = {name: mine for name, mine in wanted.items() if name not in converted}
        missing = sorted(name for name in wanted if name not in tensors)
        if missing:
            raise CorruptFile(f"{missing[0]} is not in it")
        ((own, current),) = contents.random_state(self.topology.rank, device).items()
        same_ranks = found.world_size == self.plan.world_size and own in tensors
        if same_ranks:
            saved = torch.empty(tensors[own].shape, dtype=torch.uint8)
            wanted[own] = Rectangles(tensors[own].shape, [((0,), saved)])
        extra = contents.extra_states(self.optimizer, self.topology.rank) if found.step > 0 else {}
        same = all(name in tensors and tensors[name].shape == held.shape for name, held in extra.items())
        self.bytes_read = read + manifest.stored.load_into(wanted | (extra if same else {}))
        if extra and same:
            contents.load_extra_states(self.optimizer, extra)
        elif extra:
            self._report(f"{self.optimizer.inner.extra_states_label} begin at zero: another layout saved them")
        if same_ranks and saved.shape == current.shape:  # else another kind of device saved it
            contents.set_random_state(saved, device)

    def _save(self, step: int) -> None:
        if step == self._saved:
            return
        tensors = contents.weights(self.model.trained, owned=True)
        if step > 0:
            tensors |= contents.optimizer_states(self.optimizer, owned=True)
            tensors |= contents.extra_states(self.optimizer, self.topology.rank)
        tensors |= contents.random_state(self.topology.rank, self.model.device)
        config = self.plan.config
        position = self.plan.batches.after(step)
        state = State(
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
        )
        self.saver.start(tensors, state)
        self._saved = step

    def _report(self, text: str) -> None:
        """Writes a line to stderr on rank 0; stdout has the progress line."""
        if self.topology.rank == 0:
            sys.stderr.write(f"checkpoint: {text}\n")
