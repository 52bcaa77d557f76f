"""The order in which the ranks of a pipeline compute and send: megatron-core's schedule, run once for each of them.

One process plays each rank in turn, in a world of fake ranks where messages go nowhere and arrive at once. A schedule
knows the stages, their chunks and the number of micro batches, but not the model, so it runs a Llama of one tiny block
for each chunk, through ``forward_backward``, as training does.
"""

from __future__ import annotations

import torch

from megatron_llama import cli
from megatron_llama.data.batches import build_data
from megatron_llama.devices import HOST, get_device
from megatron_llama.launch.world import find_world
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan
from megatron_llama.tools.mock_run import MOCK_RUN
from megatron_llama.tools.pipeline.recorder import Recorder
from megatron_llama.tools.pipeline.timeline import RankRecord
from megatron_llama.tools.rehearse.fake_world import fake_world

_TINY = ("hidden_size=8", "num_attention_heads=1", "num_key_value_heads=1", "intermediate_size=8", "vocab_size=8")


def recorded_order(pp: int, vpp: int, microbatches: int) -> list[RankRecord]:
    """What each of ``pp`` ranks with ``vpp`` chunks does in a step. No process group may exist."""
    plan = tiny_plan(pp, vpp, microbatches)
    return [_rank(plan, rank) for rank in range(pp)]


def tiny_plan(pp: int, vpp: int, microbatches: int) -> Plan:
    """A Llama of one tiny block a chunk on ``pp`` ranks, on made-up data."""
    overrides = [
        *(f"model.{shape}" for shape in _TINY),
        f"model.num_hidden_layers={pp * vpp}",
        f"trainer.pp={pp}",
        f"trainer.vpp={vpp}",
        f"trainer.global_batch_size={microbatches}",
        "trainer.micro_batch_size=1",
        "trainer.zero=0",
        "data.seq_length=8",
        "data.name=pipeline",
        "device=cpu",
        "dry_run=true",
        *MOCK_RUN,
    ]
    return find_world(cli.parse_overrides(overrides), None).plan()


def _rank(plan: Plan, rank: int) -> RankRecord:
    topology, device, cpu = plan.topology(rank), get_device(HOST), torch.device(HOST)
    with fake_world(topology), process_groups(plan, topology, device, cpu):
        data = build_data(plan, topology, cpu)
        model = build_model(plan, topology, device, cpu)
        recorder = Recorder(model.chunks)
        with recorder.recording():
            model.forward_backward(data.train.at(0))
    return recorder.record
