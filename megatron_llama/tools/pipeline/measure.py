"""Training steps on this machine, recorded: when each stage of the pipeline computed what."""

from __future__ import annotations

import os
import pickle
import tempfile
from functools import partial
from pathlib import Path

from megatron_llama.launch.start import Share, start_ranks
from megatron_llama.plan import Plan
from megatron_llama.tools.pipeline.timeline import RankRecord, Timeline, as_measured

STEPS = 6
"""The first one warms up."""


def measured(plan: Plan) -> Timeline | int:
    """The step of the median length among those after the first, of the first data- and tensor-parallel ranks.

    An exit status other than 0 if a rank failed. Raises ConfigError as ``start_ranks``.
    """
    with tempfile.TemporaryDirectory() as folder:
        entry, share = partial(_record_one_rank, Path(folder)), Share(plan.world_size, output_dir=Path(folder))
        if status := start_ranks(plan, entry, share):
            return status
        stages = plan.grid.ranks(0, "pp")
        records = [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in stages]
    steps = sorted((as_measured(step) for step in list(zip(*records, strict=True))[1:]), key=lambda step: step.seconds)
    return steps[(len(steps) - 1) // 2]


def _record_one_rank(folder: Path, plan: Plan) -> None:
    from megatron_llama.data.batches import build_data
    from megatron_llama.devices import get_device
    from megatron_llama.optim import build_optimizer
    from megatron_llama.parallel import build_model, process_groups
    from megatron_llama.tools.pipeline.recorder import Recorder
    from megatron_llama.tools.steps import steps_of

    rank = int(os.environ["RANK"])
    topology, device = plan.topology(rank), get_device(plan.config.device.name)
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    found: list[RankRecord] = []
    with process_groups(plan, topology, device, torch_device):
        model = build_model(plan, topology, device, torch_device)
        optimizer = build_optimizer(plan, model)
        data = build_data(plan, topology, torch_device)
        recorder = Recorder(model.chunks, device.synchronize)
        with steps_of(plan, topology, model, optimizer, data) as steps, recorder.recording():
            for step in range(1, STEPS + 1):
                recorder.new_step()
                steps.run(step)
                found.append(recorder.record)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
