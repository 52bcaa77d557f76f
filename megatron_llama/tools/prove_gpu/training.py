"""Parts that start train.py: the smoke test, resume, memory, compilation and float8."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_llama.system.files import read_json
from megatron_llama.system.programs import CONF_DIR
from megatron_llama.system.tables import gib
from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.prove_gpu.checks import Check, CheckFailed, NotRun, Outcome
from megatron_llama.tools.prove_gpu.session import PROFILING

if TYPE_CHECKING:
    from megatron_llama.plan.memory import Footprint
    from megatron_llama.tools.prove_gpu.session import Session, TrainingRun

QUIET = (*MOCK_RUN, "optim=constant", "optim.warmup_steps=0", "checkpoint.every_minutes=0")
NO_SAVE = "checkpoint.save_last=false"
SMOKE_STEPS = 20


def shape(session: Session) -> tuple[str, ...]:
    """Return the model and batch of short runs: 15 M parameters on an accelerator, fewer for ``--small``."""
    if session.small:
        return (
            *("model=llama_2m", "model.num_hidden_layers=2", "model.hidden_size=64", "model.intermediate_size=128"),
            *("data.seq_length=64", "trainer.micro_batch_size=2", "trainer.global_batch_size=4"),
        )
    return ("model=llama_15m", "data.seq_length=256", "trainer.micro_batch_size=8", "trainer.global_batch_size=16")


def smoke(session: Session) -> Outcome:
    """Check that a small Llama trains."""
    run = session.train("smoke", *shape(session), *QUIET, f"trainer.steps={SMOKE_STEPS}", "optim.lr=1e-3")
    first, last = require_losses(run, SMOKE_STEPS)
    saved = sorted(path.name for path in (run.folder / "checkpoints").glob("step_*"))
    if not saved:
        raise CheckFailed("the run saved no checkpoint", {"losses": run.losses})
    if not last < first:
        raise CheckFailed(f"the loss does not fall: {first:.4f} to {last:.4f} in {SMOKE_STEPS} steps")
    speed = run.tokens_per_second
    detail = f"loss {first:.3f} to {last:.3f} in {SMOKE_STEPS} steps, {speed:,.0f} tokens/s"
    return Outcome(detail, {"losses": run.losses, "tokens_per_second": speed})


def require_losses(run: TrainingRun, steps: int) -> tuple[float, float]:
    """Return the first and last loss. Raises CheckFailed unless each step has a finite loss that is not 0."""
    losses = run.losses
    if len(losses) != steps:
        raise CheckFailed(f"{len(losses)} of {steps} steps have metrics", {"losses": losses})
    if not all(map(math.isfinite, losses)):
        step = next(number for number, loss in enumerate(losses, 1) if not math.isfinite(loss))
        raise CheckFailed(f"the loss of step {step} is {losses[step - 1]}", {"losses": losses})
    if not all(losses):
        raise CheckFailed("the loss of a step is 0: the device computes nothing", {"losses": losses})
    return losses[0], losses[-1]


RESUME_STEPS, STOP_STEP = 8, 5
EXACT = ("reduced_train_loss", "gradient_norm")


def resume(session: Session) -> Sequence[Check[Session]]:
    """Return checks that a stopped and continued run has the values of an uninterrupted run."""
    rows: dict[str, tuple[int, tuple[str, ...]]] = {
        "fp32": (1, ("trainer.precision=fp32",)),
        "bf16": (1, ("trainer.precision=bf16",)),
        "bf16, stochastic rounding": (1, ("trainer.precision=bf16_sr",)),
        "dp2, zero 3": (2, ("trainer.precision=bf16", "trainer.zero=3")),
    }
    fitting = {name: row for name, row in rows.items() if row[0] <= session.ranks}
    return [Check(name, partial(_resume, name, *row)) for name, row in fitting.items()]


def _resume(name: str, ranks: int, overrides: tuple[str, ...], session: Session) -> Outcome:
    words = [*shape(session), *QUIET, *overrides, "trainer.deterministic=true", "trainer.compile=false"]
    folder = f"resume/{name.replace(',', '').replace(' ', '_')}"
    whole = session.train(f"{folder}/whole", *words, f"trainer.steps={RESUME_STEPS}", ranks=ranks)
    session.train(f"{folder}/stopped", *words, f"trainer.steps={STOP_STEP}", ranks=ranks)
    run = session.train(
        f"{folder}/resumed", *words, f"trainer.steps={RESUME_STEPS}", ranks=ranks, run=f"{folder}/stopped"
    )
    if re.search(rf"^step 1/{RESUME_STEPS} ", run.output, re.MULTILINE):
        raise CheckFailed("the second start did not resume from the checkpoint")
    for metric in EXACT:
        for step, (a, b) in enumerate(zip(run.column(metric), whole.column(metric), strict=True), 1):
            if a != b:
                raise CheckFailed(f"{metric} of step {step} is {a!r} after the resume, {b!r} without a stop")
    compare_weights(whole.folder, run.folder)
    return Outcome(f"{RESUME_STEPS} steps, resumed after {STOP_STEP}: losses, norms and weights are bit-identical")


def compare_weights(expected: Path, actual: Path) -> None:
    """Compare the bytes of all saved tensors of the last checkpoints. Raises CheckFailed at a difference."""
    step = f"checkpoints/step_{RESUME_STEPS:08d}"
    files = sorted((expected / step).glob("*.safetensors"))
    if not files:
        raise CheckFailed(f"the run saved no {step}")
    for file in files:
        if read_tensors(file) != read_tensors(actual / step / file.name):
            raise CheckFailed(f"weights or optimizer states differ in {file.name}")


def read_tensors(path: Path) -> tuple[dict[str, Any], str]:
    """Return the names and places of a safetensors file's tensors, and the hash of their bytes."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        return header, hashlib.file_digest(file, "sha256").hexdigest()


MEMORY_TOLERANCE = 0.10
WORKSPACES = 64 << 20  # bytes that torch allocates for cuBLAS on Hopper; the forecast does not count them


_GROUPED = ("model=llama3_1b", "model.num_hidden_layers=2", "data.seq_length=2048", "trainer.precision=fp32")


def memory(session: Session) -> Sequence[Check[Session]]:
    """Return checks of the peak memory against the plan's forecast."""
    base: tuple[str, ...]
    if session.small:
        base = ("model=llama_2m", "data.seq_length=256", "trainer.micro_batch_size=4", "trainer.global_batch_size=8")
        rows = {"fp32": base, "full recompute": (*base, "trainer.recompute=full")}
    else:
        base = ("model=llama7b", "model.num_hidden_layers=2", "data.seq_length=4096", "trainer.compile=false")
        base += ("trainer.micro_batch_size=1", "trainer.global_batch_size=2", "trainer.precision=bf16")
        rows = {
            "2 layers of 7 B, bf16": base,
            "full recompute": (*base, "trainer.recompute=full"),
            "compiled": (*base, "trainer.compile=true"),
            "stochastic rounding": (*base, "trainer.precision=bf16_sr"),
            "2 layers of a 1 B with grouped heads, fp32": (*base, *_GROUPED),
        }
    return [Check(name, partial(_memory, name, words)) for name, words in rows.items()]


def _memory(name: str, words: tuple[str, ...], session: Session) -> Outcome:
    folder = f"memory/{name.replace(',', '').replace(' ', '_')}"
    words = (*words, *QUIET, "trainer.steps=3", NO_SAVE)
    forecast = forecast_peak(f"device={session.device}", *words)
    if session.is_accelerator:
        run = session.train(folder, *words)
        return judge_memory(int(max(run.column("peak_memory_bytes"))), forecast.total, WORKSPACES)
    # A CPU's peak is the memory of the process, with Python and libraries: trace the tensors that a step allocates.
    run = session.train(folder, *words, "trainer.profile=[2,3]", program="profile")
    profile = read_json(run.folder / PROFILING / "profile/profile.json")
    allocated = forecast.total - forecast.weights - forecast.optimizer
    return judge_memory(int(profile["ranks"][0]["peak_bytes"]), allocated)


def forecast_peak(*settings: str) -> Footprint:
    """Return the planned memory of a run of one rank."""
    from megatron_llama.config import load_config
    from megatron_llama.plan import resolve
    from megatron_llama.plan.memory import stage_footprints

    return stage_footprints(resolve(load_config(settings, CONF_DIR), 1))[0]


def judge_memory(measured: int, forecast: int, workspaces: int = 0) -> Outcome:
    """Return the difference. Raises CheckFailed if it is larger than the tolerance.

    Args:
        workspaces: bytes that the measured memory may have in addition.
    """
    error = measured / forecast - 1
    values = {"measured": measured, "forecast": forecast, "error": abs(error)}
    text = f"peak {gib(measured)}, forecast {gib(forecast)}, {error:+.1%}"
    is_near = abs(error) <= MEMORY_TOLERANCE
    if not is_near and 0 < measured - forecast <= workspaces:
        text += f", within the {gib(workspaces)} of workspaces that the forecast omits"
    elif not is_near:
        raise CheckFailed(f"{text}: more than {MEMORY_TOLERANCE:.0%} apart", values)
    return Outcome(text, values)


# Compilation and float8.
SPEED_STEPS = 10
COMPILED_TOLERANCE = 1e-2
FLOAT8_TOLERANCE = 5e-2


def _speed_shape(session: Session) -> tuple[str, ...]:
    """Return a model large enough for the speed of matmuls to show, on an accelerator."""
    if session.small:
        return shape(session)
    return (
        *("model=llama7b", "model.num_hidden_layers=2", "data.seq_length=2048", "trainer.precision=bf16"),
        *("trainer.micro_batch_size=2", "trainer.global_batch_size=2"),
    )


def _timed(session: Session, name: str, *overrides: str) -> TrainingRun:
    words = (*_speed_shape(session), *QUIET, f"trainer.steps={SPEED_STEPS}", NO_SAVE, "optim.lr=1e-4")
    run = session.train(name, *words, *overrides)
    require_losses(run, SPEED_STEPS)
    return run


def compilation(session: Session) -> Outcome:
    """Compare compiled with eager runs."""
    if reason := session.environment["compiler_missing"]:
        raise NotRun(f"torch.compile is unavailable: {reason}")
    cache = f"trainer.compile_cache={session.work / 'compiled_twice'}"
    eager = _timed(session, "compile/eager", "trainer.compile=false")
    first = _timed(session, "compile/first", "trainer.compile=true", cache)
    detail, values = compare_runs("compiled", first, "eager", eager, COMPILED_TOLERANCE)
    second = session.train(
        *("compile/second", *_speed_shape(session), *QUIET, "trainer.steps=3", NO_SAVE, "optim.lr=1e-4"),
        *("trainer.compile=true", cache),
    )
    misses = re.search(r"misses (\d+)", second.output)
    if misses is None or int(misses[1]):
        count = "an unknown number of" if misses is None else misses[1]
        raise CheckFailed(f"the second start compiled {count} graphs; {detail}", values)
    return Outcome(f"{detail}; no new graphs at the second start", values)


def compare_runs(
    name: str, run: TrainingRun, other_name: str, other: TrainingRun, tolerance: float
) -> tuple[str, dict[str, Any]]:
    """Return a sentence with difference and speed, and the numbers. Raises CheckFailed if the losses are apart."""
    differences = [abs(a - b) / abs(b) for a, b in zip(run.losses, other.losses, strict=True)]
    error, ratio = max(differences), run.tokens_per_second / other.tokens_per_second
    text = f"losses of {name} and {other_name} within {error:.1e}; {name} has {ratio:.2f} times the speed"
    values = {"error": error, "speed_ratio": ratio, name: run.losses, other_name: other.losses}
    if not error <= tolerance:
        raise CheckFailed(f"{text}; at most {tolerance:.0e} is right", values)
    return text, values


def float8(session: Session) -> Sequence[Check[Session]]:
    """Return a check for each recipe of trainer.float8."""
    return [Check(recipe, partial(_float8, recipe)) for recipe in ("tensorwise", "rowwise")]


def _float8(recipe: str, session: Session) -> Outcome:
    compiled = session.is_accelerator and not session.environment["compiler_missing"]
    words = ("trainer.precision=bf16", f"trainer.compile={str(compiled).lower()}")
    base = session.shared.get("float8")
    if base is None:
        base = session.shared["float8"] = _timed(session, "float8/bf16", *words)
    run = _timed(session, f"float8/{recipe}", *words, f"trainer.float8={recipe}")
    if run.losses == base.losses:
        raise CheckFailed("the losses equal bf16's: float8 has no effect")
    return Outcome(*compare_runs(recipe, run, "bf16", base, FLOAT8_TOLERANCE))
