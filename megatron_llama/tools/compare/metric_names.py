"""What the series of a run are called: here, in NeMo, Megatron-LM and Hugging Face's Trainer, and by the user."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

# Megatron-LM logs a series twice: over iterations, and under this longer name over consumed samples.
OVER_SAMPLES = " vs samples"
# What a JSON line may call its step.
STEPS = ("step", "global_step", "iteration", "consumed_samples")


@dataclass(frozen=True)
class Program:
    """The names that a program logs under; of several, the first that a run has."""

    name: str
    loss: tuple[str, ...] = ()
    """The training loss of a step, nats per token."""
    samples: tuple[str, ...] = ()
    """Sequences consumed so far."""
    tokens: tuple[str, ...] = ()
    """Tokens consumed so far."""
    batch: tuple[str, ...] = ()
    """Sequences in a step's batch; adds up to the samples where those are not logged."""
    step_time: tuple[str, ...] = ()
    """Seconds of a step."""
    throughput: tuple[str, ...] = ()
    """Sequences per second."""
    from_zero: bool = False
    """Its steps are counted from 0: what is logged at step N is of the N+1st batch."""


PROGRAMS = (
    # neuronx-nemo-megatron and NxDT log under NeMo's names, and so do we.
    Program(
        "megatron_llama or NeMo",
        loss=("reduced_train_loss",),
        samples=("consumed_samples",),
        tokens=("consumed_tokens",),
        step_time=("step_time_s", "train_step_timing in s", "train_step_timing"),
        throughput=("throughput",),
    ),
    # Its "throughput" is TFLOP/s of a GPU. The names with a slash are Megatron-DeepSpeed's.
    Program(
        "Megatron-LM",
        loss=("lm loss", "lm-loss-training/lm loss"),
        batch=("batch-size", "batch-size/batch-size"),
        step_time=("iteration-time", "iteration-time/iteration-time"),
    ),
    # "train/" in TensorBoard, without it in trainer_state.json.
    Program(
        "Hugging Face Trainer",
        loss=("train/loss", "loss"),
        tokens=("train/num_input_tokens_seen", "num_input_tokens_seen"),
        throughput=("train/train_samples_per_second", "train_samples_per_second"),
    ),
    # With log_every_n_steps=50 it logs at steps 49, 99, ...
    Program("Lightning", loss=("train_loss",), from_zero=True),
)
ROLES = tuple(field.name for field in fields(Program) if field.name not in ("name", "from_zero"))


def program_of(there: Collection[str], named: Mapping[str, Sequence[str]]) -> Program | None:
    """Whose names the run with the series ``there`` uses; None where none of the losses looked for is among them.

    ``named`` are the user's names by role. Where the user names a role, only those names count: that one run has
    ``val_loss`` and the other falls back to ``reduced_train_loss`` would be a comparison of two things.
    """
    names: dict[str, Any] = {role: tuple(given) for role, given in named.items()}
    chosen = [replace(program, **names) for program in PROGRAMS]
    for original, program in zip(PROGRAMS, chosen, strict=True):
        if first(original.loss, there) and first(program.loss, there):
            return program
    if "loss" not in named or not first(named["loss"], there):
        return None
    # A loss of the user's own: the rest by whichever known name is there, but for speeds, whose unit would be a guess.
    merged: dict[str, Any] = {role: tuple(name for one in PROGRAMS for name in getattr(one, role)) for role in ROLES}
    merged |= {"throughput": ()} | names
    return Program("named by --tag", **merged)


def first(names: Sequence[str], there: Collection[str]) -> str | None:
    """The first of ``names`` that is there, on its own or over samples."""
    return next((name for name in names if name in there or name + OVER_SAMPLES in there), None)


def known_losses() -> str:
    """The built-in names of the loss, for messages."""
    return ", ".join(name for program in PROGRAMS for name in program.loss)
