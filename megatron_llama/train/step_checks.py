"""Checks of a step: finite loss and gradients (else the update is skipped), labels, a gradient for each weight."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.manifest import State
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.settings import DataConfig
from megatron_llama.parallel import Shard
from megatron_llama.parallel.groups import gather_objects
from megatron_llama.system.errors import TrainingFault
from megatron_llama.system.wrapping import wrap


class StepGuard:
    """Skips up to ``skips`` updates with non-finite (NaN or Inf) loss or gradient norm, then stops the run."""

    def __init__(self, skips: int) -> None:
        self.skips = skips
        """Remaining skips."""

    def rejects(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return whether the update must be skipped, bool scalar on the device of the fp32 scalars ``loss``, ``norm``.

        No sync. ``check`` gets the same values later, on the host.
        """
        return ~(loss.isfinite() & norm.isfinite())

    def check(self, step: int, loss: float, norm: float, shards: Sequence[Shard]) -> bool:
        """Return whether loss and norm are finite; count a skip if not. A collective, with equal numbers on all ranks.

        Call it before the gradients are freed.

        Raises:
            TrainingFault: On all ranks, if no skips are left. Names ranks and weights.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        fault = f"step {step}: loss {loss:.4g}, gradient norm {norm:.4g}; {_describe_nonfinite(shards)}"
        if self.skips == 0:
            raise TrainingFault(f"{fault}; the weights were not updated")
        self.skips -= 1
        if dist.get_rank() == 0:
            sys.stderr.write(f"skipped {fault}; {self.skips} skips left\n")
        return False

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this check after a step."""
        return {}

    def after_step(self, metrics: Mapping[str, float], checkpointer: Checkpointer, stop: bool) -> None:
        """Act after a step, before it is saved. A collective.

        Args:
            metrics: Metrics of the step, such as consumed_samples.
            stop: Whether this rank received a stop signal.
        """

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint, as JSON. None: no state."""
        return None

    def restore(self, state: State) -> State:
        """Restore the result of ``state`` from a checkpoint; return the state from which the run resumes."""
        return state


class LabelCheck:
    """Warns once of a batch in which no token has loss; stops a run without labels."""

    def __init__(self, data: DataConfig, epoch: int) -> None:
        """``epoch``: samples of an epoch."""
        self._data, self._epoch = data, max(1, epoch)
        self._unlabelled = 0  # samples since the last batch with a label
        self._has_warned = self._has_label = False

    def check(self, step: int, with_loss: float, samples: int) -> None:
        """Check a step of ``samples`` samples and ``with_loss`` tokens with loss, both of the global batch.

        Raises:
            ConfigError: On all ranks, if a whole epoch has no label.
        """
        if with_loss:
            self._unlabelled, self._has_label = 0, True
            return
        self._unlabelled += samples
        if self._unlabelled >= self._epoch:
            raise self._error(f"have no label in a whole epoch of {self._epoch:,} samples, up to step {step}")
        if not self._has_warned and dist.get_rank() == 0:
            text = f"data: no label in the batch of step {step}, so its loss is 0: {self._cause()} (reported once)"
            sys.stderr.write(wrap(text) + "\n")
        self._has_warned = True

    def finish(self) -> None:
        """Check the run. Raises ConfigError on all ranks, if none of its batches has a label."""
        if self._unlabelled and not self._has_label:
            raise self._error(f"have no label in any of the {self._unlabelled:,} samples of the run")

    def _error(self, rule: str) -> ConfigError:
        fix = "prepare the dataset again, with answers that have loss"
        fix += ", and check data.curriculum" if self._data.curriculum else ""
        return ConfigError([Problem("data.prefixes", self._data.prefixes, f"{rule}: {self._cause()}", fix)])

    def _cause(self) -> str:
        if self._data.kind != "sft":
            return "data.eod_mask_loss masks each of its tokens"
        cut = ", or data.curriculum cut the answers off" if self._data.curriculum else ""
        return f"the dataset's loss masks exclude each of its tokens{cut}"


def _describe_nonfinite(shards: Sequence[Shard]) -> str:
    """Describe the first non-finite weight of each rank, otherwise the first gradient. A collective."""
    names = [f"the weight {s.name}" for s in shards if not s.values.isfinite().all()]
    names = names or [f"the gradient of {s.name}" for s in shards if s.grad is not None and not s.grad.isfinite().all()]
    descriptions = [
        f"rank {rank}: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} not finite"
        for rank, names in enumerate(gather_objects(names))
        if names
    ]
    return ", ".join(descriptions) or "each weight and gradient is finite"


def check_every_gradient(shards: Sequence[Shard]) -> None:
    """Raise TrainingFault if a trained weight got no gradient in the first backward pass."""
    missing = [s.name for s in shards if s.is_trained and s.grad is None]
    if missing:
        raise TrainingFault(f"no gradient reached {', '.join(missing)}")
