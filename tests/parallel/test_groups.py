"""A rank's process groups, against the grid that its plan describes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_llama.devices import get_device
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.parallel.groups import axis_of, current_groups
from megatron_llama.plan import Plan, resolve
from megatron_llama.topology import AXES
from tests.config.helpers import make
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def _groups(rank: int, plan: Plan) -> tuple[dict[str, list[int]], dict[str, str | None]]:
    """The ranks of each axis' group, and the axis of each kind of group."""
    topology, device = plan.topology(rank), get_device("cpu")
    with process_groups(plan, topology, device, CPU) as groups:
        assert groups is current_groups()
        model = build_model(plan, topology, device, CPU)
        ranks = {axis.name: dist.get_process_group_ranks(groups[axis.name]) for axis in AXES}
        kinds = {axis.name: axis_of(groups[axis.name]) for axis in AXES}
        kinds["embedding"] = "pp" if groups.embedding is None else axis_of(groups.embedding)
        assert model.replicated.kv_group is not None
        kinds["kv heads"] = axis_of(model.replicated.kv_group)
        for name in ("replicate", "shard"):
            mesh = model.shards[0].parameter.device_mesh  # type: ignore[attr-defined]
            kinds[name] = axis_of(mesh.get_group(name))
        assert dist.group.WORLD is not None
        kinds["world"] = axis_of(dist.group.WORLD)
        kinds["unknown"] = axis_of(dist.new_group(range(8)))
    return ranks, kinds


def test_groups_are_the_grids_and_each_has_its_axis() -> None:
    settings = {
        "model.num_key_value_heads": 1,
        "model.tie_word_embeddings": True,
        "trainer.tp": 2,
        "trainer.dp": 4,
        "trainer.shard_group": 2,
        "trainer.global_batch_size": 8,
    }
    plan = resolve(make(**settings), 8)
    expected = {
        **{axis.name: axis.name for axis in AXES},
        "embedding": "pp",
        "kv heads": "tp",
        "replicate": "dp",
        "shard": "dp",
        "world": "world",
        "unknown": None,
    }
    for rank, (ranks, kinds) in enumerate(run_ranks(_groups, 8, plan)):
        assert ranks == {axis.name: plan.grid.ranks(rank, axis.name) for axis in AXES}
        assert kinds == expected
