"""Counts what a rank sends in real training steps, for comparison with ``tools/forecast/traffic.py``."""

from __future__ import annotations

import torch

from megatron_llama.data.batches import build_data
from megatron_llama.devices import Device
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan
from megatron_llama.tools.forecast.traffic import Traffic
from megatron_llama.tools.steps import steps_of
from megatron_llama.tools.traffic.count_collectives import TrafficCounter

STEPS = 2


def count_steps(
    plan: Plan, rank: int, device: Device, torch_device: torch.device, per_node: int | None = None
) -> list[Traffic]:
    """What ``rank`` sends in each of the first STEPS steps of ``train``; with ``per_node`` ranks on a node, followed by
    what it sends to other nodes in each.

    Nothing is logged or saved. All ranks of the plan must call it.
    """
    topology = plan.topology(rank)
    counted, left = [], []
    with process_groups(plan, topology, device, torch_device):
        model = build_model(plan, topology, device, torch_device)
        optimizer = build_optimizer(plan, model)
        data = build_data(plan, topology, torch_device)
        with (
            steps_of(plan, topology, model, optimizer, data) as steps,
            TrafficCounter(per_node) as counter,
        ):
            for step in range(1, STEPS + 1):
                steps.run(step)
                counted.append(counter.taken())
                left.append(counter.left())
    return counted if per_node is None else counted + left
