"""The settings of ``cluster``: machines that a plan is made for and that need not be here.

Only scripts/plan.py and scripts/tune.py have them. They are no part of ``Config``: a run's machines are those it finds,
so train.py neither takes nor saves them, and a resumed run has nothing to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from megatron_llama.config.limits import above_zero, at_least
from megatron_llama.config.problems import Problem
from megatron_llama.config.tool_settings import load_section

SECTION = "cluster"


@dataclass
class ClusterConfig:
    """Machines to plan for; of scripts/plan.py and scripts/tune.py."""

    device: str = "h100"
    """Accelerator, a name of the hardware table: a100, h100, h200, b200, mi300x, trn1, gaudi2, ...; python
    scripts/plan.py --devices lists them. cpu: this machine, as scripts/plan.py --calibrate has measured it."""
    nodes: Annotated[int | None, at_least(1)] = None
    """Machines. Derived: as many as tp * pp * dp need."""
    devices_per_node: Annotated[int | None, at_least(1)] = None
    """Devices of a machine. Derived: what the hardware table says."""
    price: Annotated[float | None, above_zero()] = None
    """Price of one device for an hour, in any currency; null leaves the cost out."""
    tokens: Annotated[float | None, above_zero()] = None
    """Tokens to train on. Derived: those of the run's steps."""
    failure_hours: Annotated[float, above_zero()] = 50_000.0
    """Mean hours between failures of one device that stop the run. The default is what 16,384 H100 had while Llama 3
    was trained, 419 in 54 days (arXiv:2407.21783)."""
    restart_minutes: Annotated[float, at_least(0)] = 10.0
    """From a failure to the first new step, without the steps that are lost."""
    storage_gbps: Annotated[float, above_zero()] = 1.0
    """Gigabytes per second that one machine writes of a checkpoint."""


def load_cluster(overrides: Sequence[str]) -> tuple[ClusterConfig, list[str], list[Problem]]:
    """The cluster of a command line, the overrides that are not about it, and what is wrong with those that are."""
    return load_section(ClusterConfig, SECTION, overrides)
