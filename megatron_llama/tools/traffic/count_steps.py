"""Counts what a rank sends in real training steps, for comparison with ``plan/traffic.py``."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import torch

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.data.batches import build_data
from megatron_llama.devices import Device
from megatron_llama.optim import build_optimizer
from megatron_llama.optim.norm import parameter_norm
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan
from megatron_llama.plan.traffic import Traffic
from megatron_llama.tools.traffic.count_collectives import TrafficCounter, axes_of
from megatron_llama.topology import build_topology
from megatron_llama.train.loop import training_step
from megatron_llama.train.sanity import FiniteCheck

STEPS = 2


def count_steps(plan: Plan, rank: int, device: Device, torch_device: torch.device) -> list[Traffic]:
    """What ``rank`` sends in each of the first STEPS steps of ``train``, which must save no checkpoint in them.

    Nothing is logged or saved. All ranks of the plan must call it.
    """
    topology = build_topology(plan, rank)
    counted = []
    with process_groups(plan, topology, device, torch_device), tempfile.TemporaryDirectory() as folder:
        model = build_model(plan, topology, device, torch_device)
        optimizer = build_optimizer(plan, model)
        data = build_data(plan, topology, torch_device)
        config = replace(plan.config, run=replace(plan.config.run, dir=folder))
        checkpointer = Checkpointer(replace(plan, config=config), topology, model, optimizer, data)
        finite = FiniteCheck(plan.config.trainer.skip_nonfinite_steps)
        with TrafficCounter(axes_of(model)) as counter:
            for step in range(1, STEPS + 1):
                training_step(step, plan, model, optimizer, data.train, finite)
                if plan.config.logging.parameter_norm:
                    parameter_norm(model.shards, torch_device)
                checkpointer.after_step(step)
                counted.append(counter.taken())
    return counted
