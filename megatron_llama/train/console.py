"""Console output of a run: progress bar on a terminal, log lines elsewhere, summary at the end."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from megatron_llama import optional_tools
from megatron_llama.config.stored_settings import checkpoint_folder
from megatron_llama.devices import Peak, get_device
from megatron_llama.plan import Plan
from megatron_llama.system.object_store import RemotePath
from megatron_llama.system.progress import LOG_SECONDS, duration
from megatron_llama.system.tables import open_console
from megatron_llama.system.wrapping import WIDTH, escape_controls

Value = float | int | None
BAR_WIDTH = 24
LONG_RUN = 10_000
"""Steps from which the bar has half the width, because numbers and times are longer."""
DATA_WAIT_SHARE = 0.05
"""The summary reports waits for data above this share of the run time."""


class StepPrinter:
    """Prints the steps of a run and a summary. Prints nothing before ``start``."""

    def __init__(self, steps: int, start_step: int, every_steps: int, console: Console | None = None) -> None:
        self._steps, self._start_step, self._every = steps, start_step, max(1, every_steps)
        self._console = console or open_console()
        self._bar: Bar | None = None
        self._bar_width = BAR_WIDTH if steps < LONG_RUN else BAR_WIDTH // 2
        self._task, self._validation_start, self._validation_shown = TaskID(0), 0.0, 0.0
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(finished_text="[green]✓"),
                BarColumn(bar_width=self._bar_width),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[text]}"),
            )
            self._bar = Bar(*columns, console=self._console, refresh_per_second=8)
            # The first step of a large run takes minutes (compiling, reading indices): show the bar before it.
            self._task = self._bar.add_task("train", total=steps, completed=start_step, text="[dim]first step …")

    def start(self) -> None:
        """Show the progress bar if this is a terminal."""
        if self._bar is not None:
            self._bar.start()

    def stop(self) -> None:
        """Stop redrawing the bar; later output goes below it."""
        if self._bar is not None:
            self._bar.stop()

    def print_lines(self, lines: Sequence[str]) -> None:
        """Print lines above the bar."""
        self._console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    def step(self, metrics: Mapping[str, Value], seconds_per_step: float | None) -> None:
        """Show a step. The time left is computed from ``seconds_per_step``, a recent mean; None: no time is shown."""
        step = int(metrics["step"] or 0)
        left = None if seconds_per_step is None else (self._steps - step) * seconds_per_step
        shown = step % self._every == 0 or step == self._steps or "val_loss" in metrics
        if self._bar is not None and not self._console.is_terminal:  # the terminal closed; stdout is a file
            self._bar.stop()
            self._bar = None
        if self._bar is None:
            if shown:
                line = f"step {step}/{self._steps}  {_plain_text(metrics, left)}"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        if metrics.get("val_loss") is not None:
            self._bar.console.print(f"[dim]step {step}[/]  {format_losses(metrics)}", highlight=False)
        self._bar.update(self._task, completed=step)
        if shown:
            self._bar.update(self._task, text=self._bar_text(metrics, left, step))

    def validation(self, done: int, total: int) -> None:
        """Show the validated batches in the bar, or without a terminal in a line every LOG_SECONDS."""
        now = time.monotonic()
        if not done:
            self._validation_start = self._validation_shown = now
        left = duration((now - self._validation_start) / done * (total - done)) if done else "?"
        text = f"validation {done:,}/{total:,} batches  {left} left" if done < total else ""
        if self._bar is not None:
            self._bar.update(self._task, text=text)
        elif text and now - self._validation_shown >= LOG_SECONDS:
            self._validation_shown = now
            self.print_lines([text])

    def _bar_text(self, metrics: Mapping[str, Value], left: float | None, step: int) -> str:
        """Format a step next to the bar, in WIDTH columns with it: long runs show no MFU, which is in the logs."""
        loss, speed = _number(metrics["reduced_train_loss"], ".4f"), _number(metrics["tokens_per_second"], ",.0f")
        parts = [f"loss [bold cyan]{loss}[/]", f"{speed} tokens/s", f"MFU {_number(metrics['mfu'], '.1%')}"]
        parts += [] if left is None else [f"[dim]{duration(left)} left"]
        used = len(f"⠋ {' ' * self._bar_width} {step}/{self._steps} ")
        if used + len(Text.from_markup("  ".join(parts))) > WIDTH:
            del parts[2]
        return "  ".join(parts)

    def summary(
        self, plan: Plan, peak: Peak, records: Sequence[Mapping[str, Any]], samples: Sequence[str], picture: Path | None
    ) -> None:
        """Print loss, speed, generated samples and paths of output files."""
        lines = ["", *_result(plan, peak, records, self._start_step)]
        for sample in samples:
            lines += ["", "[dim]sample:[/]", *(f"  │ {escape(escape_controls(line))}" for line in sample.splitlines())]
        lines += _outputs(plan, picture)
        self._console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _plain_text(metrics: Mapping[str, Value], left: float | None) -> str:
    """Format a step as a log line."""
    parts = [f"loss {_number(metrics['reduced_train_loss'], '.4f')}"]
    if "rewards/margins" in metrics:  # preference training
        parts.append(f"margin {_number(metrics['rewards/margins'], '.3f')}")
    if "val_loss" in metrics:
        parts.append(format_losses(metrics))
    parts += [
        f"lr {_number(metrics['lr'], '.2e')}",
        f"grad norm {_number(metrics['gradient_norm'], '.3f')}",
        f"{_number(metrics['tokens_per_second'], ',.0f')} tokens/s",
        f"MFU {_number(metrics['mfu'], '.1%')}",
    ]
    if left is not None:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def format_losses(metrics: Mapping[str, Value]) -> str:
    """Format the validation loss, and in parentheses the loss of each named set."""
    named = [(name[9:], value) for name, value in metrics.items() if name.startswith("val_loss/")]
    sets = ", ".join(f"{name} {_number(value, '.4f')}" for name, value in named)
    return f"val loss {_number(metrics['val_loss'], '.4f')}" + (f" ({sets})" if sets else "")


def _number(value: Value, form: str) -> str:
    """Format a value; "?" if unknown or non-finite."""
    return "?" if value is None else format(value, form)


def _result(plan: Plan, peak: Peak, records: Sequence[Mapping[str, Any]], start_step: int) -> list[str]:
    """Return lines with first and last loss, and with the median speed and the MFU of the steps of this start."""
    if not records:
        return []
    first, last = records[0], records[-1]
    recent = [record for record in records if record["step"] > start_step] or records
    speeds = sorted(record["tokens_per_second"] for record in recent)
    median = f"{speeds[len(speeds) // 2]:,.0f} tokens/s"
    with_padding = sorted(record.get("padded_tokens_per_second", record["tokens_per_second"]) for record in recent)
    if with_padding != speeds:
        median += f", {with_padding[len(speeds) // 2]:,.0f} with padding"
    seconds = sum(record["step_time_s"] for record in records)
    lines = [
        f"[bold]loss {first['reduced_train_loss']:.3f} → {last['reduced_train_loss']:.3f}[/]"
        f" after {last['consumed_tokens']:,} tokens, {duration(seconds)}",
        f"{median} (median step)",
        f"peak memory {last['peak_memory_bytes'] / 2**20:,.0f} MiB on rank 0"
        f" ({get_device(plan.config.device.name).peak_memory_label})",
    ]
    # Without the first step, which always waits. Old versions did not log data_time_s.
    waited = sum(record.get("data_time_s") or 0.0 for record in records[1:])
    if waited > DATA_WAIT_SHARE * seconds:
        lines.append(f"{waited / seconds:.0%} of the time: waiting for data (docs/reference/metrics.md)")
    if last.get("spike_skipped_steps") or last.get("spike_rewinds"):
        samples = f" ({last['spike_skipped_samples']:,} samples)"
        lines.append(f"spikes: {last['spike_skipped_steps']} updates skipped, {last['spike_rewinds']} rewinds{samples}")
    if last.get("failed_saves"):
        lines.append(f"checkpoints that could not be written: {last['failed_saves']}")
    utilizations = sorted(record["mfu"] for record in recent if record["mfu"] is not None)
    if utilizations and peak.flops:
        median, most = utilizations[len(utilizations) // 2], utilizations[-1]
        shown = f"{median:.1%} of" if most <= 1 else f"unknown: {most:.0%} in a step, so the peak is too low:"
        share = f"MFU {shown} {plan.world_size} × {peak.flops / 1e9:,.0f} GFLOP/s"
        separator = " " if len(f"{share} ({peak.source})") <= WIDTH else "\n    "
        lines.append(f"{share}{separator}[dim]({escape(peak.source)})[/]")
    elif not peak.flops:
        lines.append(f"MFU ? [dim](peak {escape(peak.source)})[/]")
    return lines


def _outputs(plan: Plan, picture: Path | None) -> list[str]:
    """Return lines with the paths of the run's files."""
    run_dir, checkpoints = plan.run_dir, checkpoint_folder(plan.run_dir, plan.config)
    outputs = [
        ("loss curve", picture),
        ("report", run_dir / optional_tools.REPORT_FILE),
        ("metrics", run_dir / "metrics.jsonl"),
        ("TensorBoard", run_dir / "tensorboard"),
        ("checkpoints", checkpoints),
        ("profile", run_dir / "profile" / "profile.txt"),
        ("settings, plan", run_dir / "config.yaml"),
    ]
    lines = [""]
    for label, path in outputs:
        is_due = label == "report" and optional_tools.is_installed(optional_tools.REPORT)  # after the ranks have ended
        if path is not None and (is_due or isinstance(path, RemotePath) or path.exists()):
            shown = f"tensorboard --logdir {shlex.quote(str(path))}" if label == "TensorBoard" else str(path)
            lines.append(f"  {label:15s} {escape(shown)}")
    return lines
