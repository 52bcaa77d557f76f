"""What the training loop knows of checkpoints: where to go on from, after each step, and at the end."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_llama.checkpoint import state as contents
from megatron_llama.checkpoint.adapter import fingerprint, open_adapter
from megatron_llama.checkpoint.export import export, find_checkpoint
from megatron_llama.checkpoint.folder import (
    BEST,
    POINTER,
    clean,
    folder_name,
    point_to_best,
    saved_steps,
    set_aside,
)
from megatron_llama.checkpoint.hf_folder import open_hf_folder
from megatron_llama.checkpoint.manifest import Manifest, State, dtype_of, read_manifest
from megatron_llama.checkpoint.rectangles import Rectangles
from megatron_llama.checkpoint.saving import Saver
from megatron_llama.checkpoint.stored_tensors import CorruptFile
from megatron_llama.config import ConfigError, Problem
from megatron_llama.model.names import is_lora
from megatron_llama.optim import Optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.parallel.agree import from_rank_0, together
from megatron_llama.plan import Plan
from megatron_llama.topology import Topology


class Checkpointer:
    """Saves and restores a run. All ranks must call each method, at the same steps."""

    def __init__(self, plan: Plan, topology: Topology, model: ParallelModel, optimizer: Optimizer) -> None:
        self.plan, self.topology, self.model, self.optimizer = plan, topology, model, optimizer
        self.checkpoints = plan.run_dir / "checkpoints"
        self.bytes_read = 0
        """Bytes that this rank read from files when it was last loaded."""
        self.saver = Saver(self.checkpoints, topology.rank, model.device, plan.config.checkpoint)
        self._saved: int | None = None
        self._validated: tuple[int, float] = (-1, math.nan)
        self._origin: tuple[str | None, str] = (None, plan.precision.param_dtype)
        self._lora = plan.config.finetune.method == "lora"
        self._base: str | None = None

    def resume(self) -> int:
        """Load the newest good checkpoint, or the weights that the run is to start from; returns the steps already
        taken.

        Raises ConfigError on all ranks for a checkpoint that does not fit the config, and where there are checkpoints
        but none is good: a run must not start anew by mistake.
        """
        candidates = from_rank_0(self._candidates)
        if self._lora:
            self._load_base()  # it is in no checkpoint
        reports = []
        for folder in candidates:
            report = self._try(folder)
            if report is None:
                found = read_manifest(folder).state
                self.optimizer.restore(found.updates, found.step)
                self._origin = self._origin if self._lora else (found.hf_folder, found.dtype)
                self._saved = found.step if folder.parent == self.checkpoints else None
                self._tell(f"going on from {folder}, step {found.step}{self._converted(found)}")
                return found.step
            reports.append(report)
            self._tell(f"{folder} is damaged and not used: {report}")
        if reports:
            instead = (
                "write checkpoint.resume=never to start anew (the checkpoints are kept), or the path of a good one"
            )
            rule = f"no checkpoint can be used: {'; '.join(reports)}"
            raise ConfigError([Problem("checkpoint.resume", self.plan.config.checkpoint.resume, rule, instead)])
        if self._lora and self.plan.config.finetune.adapter is not None:
            self._start_from("finetune.adapter", self.plan.config.finetune.adapter, self._load_adapter)
        elif not self._lora and self.plan.config.init_from is not None:
            self._start_from("init_from", self.plan.config.init_from, self._load_weights)
        return 0

    def after_step(self, step: int, stop: bool = False) -> bool:
        """Save if it is time to. True when ``stop`` is true on any rank: then the step has been saved by all of them.

        Raises SaveFailed on all ranks when a checkpoint could not be written.
        """
        stop = self.saver.advance(stop)
        every = self.plan.config.checkpoint.every_steps
        if stop or (every and step % every == 0):
            self._save(step)
        if stop:
            self.saver.wait()
        return stop

    def note_validation(self, step: int, val_loss: float) -> None:
        """Remember the validation loss after ``step``, for its checkpoint if it gets one."""
        self._validated = step, val_loss

    def finish(self, step: int) -> None:
        """Save the last step and wait until all is on disk."""
        if self.plan.config.checkpoint.save_last:
            self._save(step)
        self.saver.wait()

    def export(self) -> None:
        """Write the run's last checkpoint, or the best where that is kept, as a Hugging Face folder, on rank 0, where
        that was asked for."""
        chosen = self.plan.config.checkpoint
        if chosen.export_hf and self.topology.rank == 0:
            best = self.checkpoints / BEST
            is_best = chosen.keep_best and best.is_file()  # there is none where no validated loss was a number
            source = find_checkpoint(best if is_best else self.checkpoints)
            made = export(source, self.checkpoints.with_name("hf"), merge=self._lora)
            which = "the best in validation" if is_best else "the last"
            self._tell(f"exported {source.name}, {which}, to {made.folder}, {made.dtype}")

    def _converted(self, found: State) -> str:
        """What to add for a checkpoint of another precision; values were converted, to nearest, where dtypes differ."""
        ours, theirs = self.plan.config.trainer.precision, found.settings.get("trainer", {}).get("precision")
        return "" if theirs in (None, ours) else f"; saved with trainer.precision={theirs}, going on with {ours}"

    def _load_base(self) -> None:
        """The weights that LoRA leaves as they are, and what tells them from others."""
        trainer, model, folder = self.plan.config.trainer, self.plan.model, self.plan.config.init_from
        if folder is None:
            self._base = f"random weights of trainer.seed={trainer.seed}, {model.initializer_range:g}"
            return
        self._start_from("init_from", folder, self._load_weights)
        self._base = from_rank_0(lambda: fingerprint(open_hf_folder(Path(folder), model)))

    def _start_from(self, field: str, folder: str, load: Callable[[Path], None]) -> None:
        """Load the weights of a folder; raises ConfigError on all ranks where they can't be used."""
        try:
            with together(CorruptFile, ConfigError):
                load(Path(folder))
        except CorruptFile as error:
            raise ConfigError([Problem(field, folder, str(error), "get the folder again, or name another")]) from None
        what = "frozen weights" if self._lora and field == "init_from" else "starting"
        self._tell(f"{what} from {folder}")

    def _load_weights(self, folder: Path) -> None:
        stored = open_hf_folder(folder, self.plan.model)
        own = [shard for shard in self.model.shards if not is_lora(shard.name)]
        self.bytes_read = stored.load_into(contents.weights(shard for shard in own if shard.quantized is None))
        self.bytes_read += contents.load_quantized(own, stored)
        self._origin = os.path.abspath(folder), dtype_of(stored)

    def _load_adapter(self, folder: Path) -> None:
        adapter = open_adapter(folder, self.plan.model, self.plan.config.finetune)
        self.bytes_read += adapter.load_into(contents.weights(self.model.trained))

    def _save(self, step: int) -> None:
        if step == self._saved:
            return
        updates = self.optimizer.updates
        tensors = contents.weights(self.model.trained, owned=True)
        if step > 0:
            tensors |= contents.moments(self.optimizer, owned=True)
        tensors |= contents.random_state(self.topology.rank, self.model.device)
        self.saver.start(tensors, self._state(step, updates))
        self._saved = step

    def _state(self, step: int, updates: int) -> State:
        config = self.plan.config
        return State(
            step=step,
            consumed_samples=step * config.trainer.global_batch_size,
            optimizer=config.optim.name,
            updates=updates,
            world_size=self.plan.world_size,
            settings=asdict(config),
            hf_folder=self._origin[0],
            dtype=self._origin[1],
            # A loss that is no number would be neither better nor worse than any other.
            val_loss=self._validated[1] if self._validated[0] == step and math.isfinite(self._validated[1]) else None,
            base=self._base,
        )

    def _candidates(self) -> list[Path]:
        """The checkpoints to try, best first. Rank 0 only: it also clears away what a killed run left behind."""
        resume = self.plan.config.checkpoint.resume
        clean(self.checkpoints)
        if resume == "never":
            aside = set_aside(self.checkpoints)
            if aside is not None:
                self._tell(f"starting anew; the checkpoints of the earlier run are now in {aside}")
            return []
        if self.plan.config.checkpoint.keep_best and self.checkpoints.is_dir():
            point_to_best(self.checkpoints)
        try:
            own = [self.checkpoints / folder_name(step) for step in saved_steps(self.checkpoints)]
        except CorruptFile as error:
            raise ConfigError(
                [Problem("run.dir", str(error), "its checkpoints can't be read", "make it readable")]
            ) from None
        if resume == "auto":
            return own
        # A path is where a run begins. Started again by the same command, it goes on from what it has saved itself;
        # a path among its own checkpoints is a wish to go back to that one.
        chosen = Path(os.path.abspath(resume))
        if chosen.name in (POINTER, BEST) and chosen.is_file():
            chosen = find_checkpoint(chosen)
        inside = chosen.parent == Path(os.path.abspath(self.checkpoints))
        return [chosen] if inside or not own else own

    def _try(self, folder: Path) -> str | None:
        """Load a checkpoint on all ranks; returns what is wrong with it, the same text on all ranks, or None."""
        try:
            with together(CorruptFile, ConfigError):
                if self.topology.rank == 0:
                    read_manifest(folder).check_sizes()
            with together(CorruptFile, ConfigError):
                self._load(read_manifest(folder))
        except CorruptFile as error:
            return str(error)
        return None

    def _load(self, manifest: Manifest) -> None:
        """Fill weights and optimizer states. Raises CorruptFile, and ConfigError for a checkpoint of another run."""
        found, tensors = manifest.state, manifest.stored.tensors
        check_fits(self.plan, manifest)
        if found.base != self._base:
            rule = f"is not the model that the checkpoint {manifest.stored.folder} was trained on"
            instead = "write init_from=FOLDER with that model"
            raise ConfigError([Problem("init_from", self.plan.config.init_from, rule, instead)])
        wanted = contents.weights(self.model.trained)
        if found.step > 0:
            wanted |= contents.moments(self.optimizer)
        missing = sorted(name for name in wanted if name not in tensors)
        if missing:
            raise CorruptFile(f"{missing[0]} is not in it")
        own = contents.random_name(self.topology.rank)
        device = self.model.device
        if found.world_size == self.plan.world_size and own in tensors:
            saved = torch.empty(tensors[own].shape, dtype=torch.uint8)
            wanted[own] = Rectangles(tensors[own].shape, [((0,), saved)])
        self.bytes_read = manifest.stored.load_into(wanted)
        if own in wanted and saved.shape == contents.random_state(0, device)[contents.random_name(0)].shape:
            contents.set_random_state(saved, device)

    def _tell(self, text: str) -> None:
        """Say it once, where a progress line on stdout is not disturbed."""
        if self.topology.rank == 0:
            sys.stderr.write(f"checkpoint: {text}\n")


# Of LoRA's settings. The others say which tensors there are, and how much they count.
_MAY_CHANGE = ("lora_dropout", "frozen_dtype", "adapter")


def check_fits(plan: Plan, manifest: Manifest) -> None:
    """Raises ConfigError where going on from the checkpoint would not be the run that was asked for."""
    ours, theirs = asdict(plan.config), manifest.state.settings
    problems = []
    names = [f"model.{name}" for name in ours["model"] if name not in ("name", "initializer_range")]
    names += ["optim.name"]
    if "lora" in (ours["finetune"]["method"], theirs.get("finetune", {}).get("method")):
        names += [f"finetune.{name}" for name in ours["finetune"] if name not in _MAY_CHANGE]
    if manifest.state.step > 0:  # the position in the data is a number of samples of this many tokens, in this order
        names += ["trainer.global_batch_size", "trainer.seed", "data.seq_length"]
    for name in names:
        section, key = name.split(".")
        saved = theirs.get(section, {}).get(key)
        if saved != ours[section][key]:
            rule = f"the checkpoint {manifest.stored.folder} was trained with {saved}"
            instead = (
                f"write {name}={saved}, or start another run from its weights (scripts/export_hf.py, then init_from)"
            )
            problems.append(Problem(name, ours[section][key], rule, instead))
    if problems:
        raise ConfigError(problems)
