"""Signals that stop a run, and the last lines of a stopped or finished run.

SIGINT (Ctrl-C) and ``JOB_SIGNALS``: finish the step, save, exit with 75. A second signal ends the process immediately,
except under Slurm (SIGINT there too) and except ``REPEATED_SIGNALS``. nohup ignores SIGHUP.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from contextlib import ExitStack, suppress
from types import FrameType

from megatron_llama.checkpoint.folder import folder_name
from megatron_llama.config.problems import write_override
from megatron_llama.config.stored_settings import checkpoint_folder
from megatron_llama.plan import Plan
from megatron_llama.system import phase
from megatron_llama.system.exit_status import EXIT_RESTART
from megatron_llama.system.interrupts import signal_name
from megatron_llama.system.rerun_command import noted_command
from megatron_llama.system.signals import JOB_SIGNALS, REPEATED_SIGNALS, announce_interrupt, handle_signals
from megatron_llama.system.wrapping import WIDTH

# A signal to a job reaches a rank twice, directly and from its launcher. Signals within this time count as one.
_ECHO_SECONDS = 1.0
# Slurm sends SIGUSR1 before the time limit and SIGTERM at the limit: the second signal repeats the first.
_SLURM_JOB = "SLURM_JOB_ID"


class RunStopped(SystemExit):
    """Exit with status 75 after a signal and a save."""

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_RESTART)
        self.step, self.reason = step, ""


class StopSignals(ExitStack):
    """Records stop signals to this rank inside its ``with`` block; rank 0 reports a stop after the block."""

    def __init__(self, plan: Plan, *, reports: bool) -> None:
        super().__init__()
        self.plan, self.reports = plan, reports
        self._number: int | None = None
        self._first_at: float | None = None

    @property
    def received(self) -> bool:
        """Whether a stop signal was received."""
        return self._first_at is not None

    def __enter__(self) -> StopSignals:
        self.enter_context(handle_signals((signal.SIGINT, *JOB_SIGNALS), self._receive))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool | None:
        if isinstance(error, RunStopped) and self.reports:
            _write_last_lines(describe_stop(self.plan, error.step, self._number))
            error.reason = f"stopped by {signal.Signals(self._number).name} after saving" if self._number else ""
        return super().__exit__(kind, error, trace)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at, self._number = now, number
            if self.reports and number == signal.SIGINT and os.isatty(2) and not phase.is_shared():
                announce_interrupt()
        elif number in REPEATED_SIGNALS or now - self._first_at <= _ECHO_SECONDS:
            return
        elif number == signal.SIGINT or _SLURM_JOB not in os.environ:  # only a user sends a second SIGINT
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def describe_stop(plan: Plan, step: int, number: int | None) -> str:
    """Return the last lines of a run that a signal stopped after ``step``. ``number``: None if another rank got it."""
    cause = "a signal" if number is None else signal_name(number)
    saved = checkpoint_folder(plan.run_dir, plan.config) / folder_name(step)
    return f"{_fit(f'Stopped by {cause} at step {step}, saved', f'{saved};')}\n{_command('resume', plan)}"


def describe_finished(plan: Plan) -> str:
    """Return the last lines of a start that had no step to train."""
    step, epochs = plan.start.step, plan.requested.trainer.epochs
    longer = f"trainer.steps={2 * step}" if epochs is None else f"trainer.epochs={2 * epochs}"
    return f"{_fit(str(plan.run_dir), f'is finished at step {step};')}\n{_command('train on', plan, longer)}"


def report_finished(plan: Plan) -> None:
    """Report that the run was finished before this start."""
    if 0 < plan.config.trainer.steps <= plan.start.step:
        _write_last_lines(describe_finished(plan))


def _command(aim: str, plan: Plan, *more: str) -> str:
    """Return the command that resumes the run, or the settings to add to it if it is unknown."""
    words = [write_override("run.dir", str(plan.run_dir)), *more]
    if plan.config.allow_targets:  # a file must not permit classes to run
        words.append(write_override("allow_targets", plan.config.allow_targets))
    if plan.config.hook.on_event is not None:
        words.append(write_override("hook.on_event", plan.config.hook.on_event))
    command, launcher = noted_command()
    if command is not None:
        return _fit(f"{aim} with:", f"{command} {shlex.join(words)}")
    return _fit(f"to {aim}, run the same {f'{launcher} ' * bool(launcher)}command with", shlex.join(words))


def _fit(start: str, end: str) -> str:
    """Join two texts on one line if it fits the terminal."""
    return f"{start} {end}" if len(start) + len(end) < WIDTH else f"{start}\n  {end}"


def _write_last_lines(text: str) -> None:
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
