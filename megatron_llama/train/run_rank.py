"""Entry of one rank: device, process groups, model, optimizer, data, training."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megatron_llama import event_hook
from megatron_llama.data.batches import Data, build_data
from megatron_llama.devices import Device
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import ParallelModel, build_model, open_device, process_groups
from megatron_llama.plan import Plan
from megatron_llama.system import phase
from megatron_llama.topology import Topology
from megatron_llama.train.loop import train
from megatron_llama.train.spike_guard import Rewind, SpikeGuard
from megatron_llama.train.step_checks import StepGuard


def run_rank(plan: Plan) -> None:
    """Run one rank of the plan. Reads RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: The data cannot be used; on all ranks.
        TrainingFault: As ``train``.
        SystemExit: Status 75, after a signal and a save.
    """
    phase.enter("opening the device", phase.PATIENT)
    device, torch_device = open_device(plan)
    topology = plan.topology(int(os.environ["RANK"]))
    phase.enter("meeting the other ranks", phase.PATIENT)
    command = plan.config.hook.on_event if topology.is_logger else None
    with (
        event_hook.listening(command, Path(str(plan.config.run.dir))),
        process_groups(plan, topology, device, torch_device),
    ):
        device.seed(plan.config.trainer.seed)  # after the process group, which some runtimes must initialize first
        phase.enter("building the model", phase.PATIENT)
        model = build_model(plan, topology, device, torch_device)
        phase.enter("opening the data", phase.PATIENT)
        train_model(plan, topology, device, model, build_data(plan, topology, torch_device, device.pins_memory))
        phase.enter("leaving the other ranks")


def train_model(plan: Plan, topology: Topology, device: Device, model: ParallelModel, data: Data) -> None:
    """Build the optimizer and train with the guard of trainer.spike_guard. After a rewind, train again.

    Raises:
        TrainingFault, ConfigError, SystemExit: As ``train``.
    """
    trainer = plan.config.trainer
    guard = SpikeGuard(trainer) if trainer.spike_guard != "off" else StepGuard(trainer.skip_nonfinite_steps)
    while True:
        phase.enter("building the optimizer", phase.PATIENT)
        with suppress(Rewind):
            return train(plan, topology, device, model, build_optimizer(plan, model), replace(data), guard)
        gc.collect()  # the last optimizer: its states are as large as the next one's
        # The checkpoint of the rewind is the newest of this run, also if the run began with never or a path.
        plan = replace(plan, config=replace(plan.config, checkpoint=replace(plan.config.checkpoint, resume="auto")))
