"""Facts of a run folder for its report. Each missing or damaged file becomes a note; only the metrics are required."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_llama.config import Config, ConfigError, from_yaml
from megatron_llama.config.data_settings import split_weights
from megatron_llama.config.settings import DataConfig, DeviceConfig, TrainerConfig
from megatron_llama.config.stored_settings import NAME, checkpoint_folder, read_values, stored_steps
from megatron_llama.corpus.blend import BlendTimeline, segments_from_json
from megatron_llama.launch.start_log import STARTS_FILE, Start, read_starts
from megatron_llama.launch.world import World
from megatron_llama.plan.format_plan import PLAN_FILE
from megatron_llama.system.files import read_json, read_whole
from megatron_llama.system.tables import plural
from megatron_llama.tools.pipeline.cli import plan_svg
from megatron_llama.tools.report.curves import Metrics, read_run_metrics
from megatron_llama.topology import AXES, Grid
from megatron_llama.train.sinks import SAMPLES_FILE

MOST_PLAN_BYTES = 1 << 18
MOST_TEXT_BYTES = 1 << 20
MOST_WORLD = 1 << 20  # maximum number of ranks of a layout on the page
KILLED = "ended without a message (killed?)"


@dataclass(frozen=True)
class Share:
    """Part of a dataset in the samples of a run."""

    path: str
    read: int | None
    """Samples read; None if only planned."""
    share: float | None
    """Share of the samples read; None if only planned."""
    planned: float | None
    """Share that the newest blend gives it; None if the blend has no weights."""

    @property
    def name(self) -> str:
        """Last part of the path."""
        return os.path.basename(self.path) or self.path


@dataclass
class Shares:
    """Datasets of a run."""

    label: str
    """Source of the numbers."""
    rows: list[Share] = field(default_factory=list)


@dataclass
class Run:
    """A run folder."""

    name: str
    folder: Path
    metrics: Metrics
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings in use, by full name; empty if config.yaml cannot be read."""
    starts: list[Start] = field(default_factory=list)
    plan: str = ""
    samples: dict[str, Any] | None = None
    """Texts generated at the end: ``step``, and ``texts`` with pairs (prompt, prompt with its continuation)."""
    shares: Shares | None = None
    notes: list[str] = field(default_factory=list)
    """Missing and damaged parts."""

    @property
    def status(self) -> str:
        """State of the run: running, the reason of its end, or its progress."""
        steps = self.settings.get("trainer.steps")
        progress = f"step {self.metrics.count:,}" + (f" of {steps:,}" if isinstance(steps, int) else "")
        if not self.starts:
            return progress
        last = self.starts[-1]
        return f"{'running' if last.is_running else describe_end(last, is_last=True)}, {progress}"

    @property
    def grid(self) -> Grid | None:
        """Ranks of the run; None without valid settings."""
        names = ("tp", "cp", "dp", "pp")
        sizes = {name: self.settings.get(f"trainer.{name}") for name in names}
        if not all(size is None or (type(size) is int and size > 0) for size in sizes.values()) or not self.settings:
            return None
        if math.prod(filter(None, sizes.values())) > MOST_WORLD:
            return None
        return Grid.of(SimpleNamespace(**sizes))


def describe_end(start: Start, is_last: bool) -> str:
    """Return the reason of a start's end. ``is_last``: no later start exists, so the run may be running elsewhere."""
    if start.ended is not None:
        return start.reason or f"status {start.status}"
    if is_last and start.is_running:
        return "running"
    return KILLED if not is_last or not start.host or start.is_here else f"running on {start.host}, or killed"


def read_run(folder: Path, name: str) -> Run:
    """Read a run folder. Raises OSError if its metrics cannot be read."""
    run = Run(name, folder, read_run_metrics(folder))
    run.notes += run.metrics.notes
    try:
        run.settings = read_values(folder)
    except ConfigError as error:
        run.notes += [f"no settings: {problem.rule}" for problem in error.problems]
    try:
        run.plan = read_whole(folder / PLAN_FILE, MOST_PLAN_BYTES, follow=False).decode(errors="replace").rstrip()
    except OSError as error:
        run.notes.append(f"no plan: {PLAN_FILE}: {error.strerror}")
    try:
        run.starts, invalid = read_starts(folder)
        if invalid:
            run.notes.append(f"{STARTS_FILE} has {invalid:,} invalid {plural(invalid, 'line')}, omitted here")
    except OSError as error:
        run.notes.append(f"no starts: {STARTS_FILE}: {error.strerror}")
    run.samples = _read_samples(run)
    run.shares = _read_shares(run)
    return run


def _read_samples(run: Run) -> dict[str, Any] | None:
    path = run.folder / SAMPLES_FILE
    if not os.path.lexists(path):
        return None
    try:
        content = read_json(path, MOST_TEXT_BYTES, follow=False)
        step = content["step"]
        texts = [(str(one["prompt"]), str(one["text"])) for one in content["samples"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        run.notes.append(f"no samples: {SAMPLES_FILE}: {getattr(error, 'strerror', None) or repr(error)}")
        return None
    return {"step": step if type(step) is int else None, "texts": texts}


def _read_shares(run: Run) -> Shares | None:
    """Return the samples read of each dataset up to the newest checkpoint, else the planned shares."""
    for step in stored_steps(run.folder)[:1]:
        # Imported here: the manifest needs torch.
        from megatron_llama.checkpoint.folder import folder_name
        from megatron_llama.checkpoint.manifest import read_manifest
        from megatron_llama.checkpoint.tensor_source import CorruptFile

        try:
            state = read_manifest(checkpoint_folder(run.folder) / folder_name(step)).state
            return shares_of_record(state.data or {}, step)
        except CorruptFile as error:
            run.notes.append(f"no data shares of step {step:,}: {error}")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            run.notes.append(f"no data shares of step {step:,}: the record of the data is damaged ({error!r})")
    return planned_shares(run.settings)


def shares_of_record(record: Mapping[str, Any], step: int) -> Shares | None:
    """Return the shares of a checkpoint's data record; None without one. Raises errors of a damaged record."""
    if not record:
        return None
    consumed = int(record["consumed_samples"])
    if record["kind"] == "mock":
        return Shares(f"{consumed:,} samples of random tokens (data.mock), up to step {step:,}")
    label = f"{consumed:,} samples, up to the checkpoint of step {step:,}"
    if not record["segments"]:
        return Shares(label, [Share(path, None, None, None) for path in record["training"]])
    timeline = BlendTimeline(segments_from_json(record["segments"]))
    weights, total = timeline.segments[-1].weights, sum(timeline.segments[-1].weights.values())
    rows = [
        Share(path, read, read / consumed if consumed else None, weights[path] / total if path in weights else 0.0)
        for path, read in timeline.read(consumed).items()
    ]
    return Shares(label, rows)


def planned_shares(settings: Mapping[str, Any]) -> Shares | None:
    """Return the shares of ``data.prefixes``, for a run without a checkpoint; None without settings."""
    if settings.get("data.mock"):
        return Shares("random tokens (data.mock)")
    prefixes = settings.get("data.prefixes")
    if not isinstance(prefixes, list) or not prefixes:
        return None
    try:
        weights, paths = split_weights(prefixes)
    except ValueError:
        return None
    total = sum(weights)
    shares = [weight / total for weight in weights] if total > 0 else [None] * len(paths)
    rows = [Share(path, None, None, share) for path, share in zip(paths, shares, strict=True)]
    return Shares("planned; no checkpoint yet", rows)


def differing_settings(runs: list[Run]) -> dict[str, list[Any]]:
    """Return the settings with several values among the runs that have settings: the value of each run, or None."""
    known = [run for run in runs if run.settings]
    names = dict.fromkeys(name for run in known for name in run.settings)
    differing = {name: [run.settings.get(name) for run in runs] for name in names}
    return {
        name: values
        for name, values in differing.items()
        if any(run.settings.get(name) != known[0].settings.get(name) for run in known[1:])
    }


def pipeline_svg(run: Run) -> str | None:
    """Return the picture of a run's pipeline; None with one stage. A failure becomes a note: a picture is optional."""
    stages = run.settings.get("trainer.pp")
    if type(stages) is not int or stages < 2:
        return None
    if run.grid is None:
        run.notes.append(f"no picture of ranks and pipeline: no valid layout of at most {MOST_WORLD:,} ranks")
        return None
    try:
        config = only_layout(from_yaml(read_whole(run.folder / NAME, MOST_TEXT_BYTES).decode()))
        return plan_svg(World(config, Grid.of(config.trainer).world_size, None).plan())
    except ConfigError as error:  # a layout or settings that this version rejects
        reasons = [f"{problem.field} {problem.rule}" for problem in error.problems]
        run.notes.append(f"no picture of the pipeline: {'; '.join(reasons)}")
    except Exception as error:  # settings of another version
        reason = " ".join(str(error).split()) or type(error).__name__
        run.notes.append(f"no picture of the pipeline: {reason}")
    return None


def only_layout(config: Config) -> Config:
    """Return the model, layout and batch of a config, so that its plan opens no file and needs no device."""
    names = [*(axis.name for axis in AXES), "vpp", "pipeline_layers", "micro_batch_size", "global_batch_size"]
    names += ["recompute", "recompute_every", "precision"]
    return Config(
        model=config.model,
        data=DataConfig(name=config.data.name, mock=True, seq_length=config.data.seq_length),
        trainer=TrainerConfig(**{name: getattr(config.trainer, name) for name in names}),
        device=DeviceConfig(name=config.device.name),
        dry_run=True,
    )
