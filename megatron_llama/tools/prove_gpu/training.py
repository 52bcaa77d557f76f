"""Parts that start train.py: the smoke test, resume, compilation and float8."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.prove_gpu.checks import Check, CheckFailed, Outcome

if TYPE_CHECKING:
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


def smoke(session: Session) -> Sequence[Check[Session]]:
    """Return the check that a small Llama trains."""
    return [Check("smoke", _smoke)]


def _smoke(session: Session) -> Outcome:
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
    """Return the first and last loss. Raises CheckFailed unless each step has a finite loss."""
    losses = run.losses
    if len(losses) != steps:
        raise CheckFailed(f"{len(losses)} of {steps} steps have metrics", {"losses": losses})
    if not all(map(math.isfinite, losses)):
        step = next(number for number, loss in enumerate(losses, 1) if not math.isfinite(loss))
        raise CheckFailed(f"the loss of step {step} is {losses[step - 1]}", {"losses": losses})
    return losses[0], losses[-1]
