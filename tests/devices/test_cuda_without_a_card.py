"""What a CUDA build of torch can check without a driver: no tensor of a step is on the wrong device.

Fake tensors know their device, and an operator between two devices raises. The model is built on cuda:0, and runs its
forward pass, loss, norms and the optimizer's arithmetic. The backward pass is out of reach: autograd asks the driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist

from megatron_llama.devices import get_device
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, parallelize, process_groups
from megatron_llama.parallel.pipeline import MicroBatch
from megatron_llama.tools.rehearse.fake_world import FakeTensors, fake_world
from megatron_llama.topology import build_topology
from tests.oracle import make_plan
from tests.ranks import run_ranks

REASON = "needs a CUDA build of torch on a machine without a driver"
pytestmark = pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason=REASON)
CUDA = torch.device("cuda", 0)
LAYOUTS = {
    "one rank": (1, []),
    "tp2+sp": (2, ["trainer.tp=2"]),
    "dp2, zero 3, bf16": (2, ["trainer.zero=3", "trainer.precision=bf16"]),
    "bf16_sr": (1, ["trainer.precision=bf16_sr"]),
}


@contextmanager
def no_driver() -> Iterator[None]:
    """Streams, events and questions about the current device do nothing."""
    with ExitStack() as inside:
        for name in ("Stream", "Event", "current_stream", "default_stream", "stream", "synchronize", "set_device"):
            inside.enter_context(patch.object(torch.cuda, name, MagicMock()))
        inside.enter_context(patch.object(torch.cuda, "current_device", lambda: 0))
        inside.enter_context(patch.object(torch.cuda, "_lazy_init", lambda: None))
        yield


def _step(_: int, world: int, overrides: list[str], planted: str) -> list[str]:
    """The devices of weights, loss, norm and optimizer states. What ``planted`` names is on the CPU."""
    dist.destroy_process_group()
    plan = make_plan(world, "data.mock=true", *overrides)
    topology = build_topology(plan, 0)
    device = get_device("cpu")  # its code: no NCCL, no library
    with ExitStack() as inside:
        inside.enter_context(no_driver())
        inside.enter_context(fake_world(topology))
        inside.enter_context(patch.object(parallelize, "init_weights", lambda *_: None))  # there are no values
        inside.enter_context(process_groups(plan, topology, device, CUDA))
        inside.enter_context(FakeTensors())
        model = build_model(plan, topology, device, CUDA)
        optimizer = build_optimizer(plan, model)
        if planted == "weight":
            model.chunks[0].norm.weight = torch.nn.Parameter(torch.ones(plan.model.hidden_size, device="cpu"))
        ids = torch.zeros(1, plan.config.data.seq_length, dtype=torch.int64, device=CUDA)
        mask = torch.ones(1, plan.config.data.seq_length, device="cpu" if planted == "loss mask" else CUDA)
        loss = model.evaluate([MicroBatch(ids, ids, mask, torch.zeros(2, dtype=torch.int64, device=CUDA))])
        for shard in model.shards:
            shard.parameter.grad = torch.zeros_like(shard.parameter)
        norm = optimizer.gradient_norm()
        optimizer.step(norm)
        states = [value for state in optimizer.inner.state.values() for value in state.values() if value.dim()]
        if planted == "optimizer state":
            next(iter(optimizer.inner.state.values()))["exp_avg"] = torch.zeros_like(states[0], device="cpu")
            for shard in model.shards:
                shard.parameter.grad = torch.zeros_like(shard.parameter)
            optimizer.step(norm)
        return sorted({str(found.device) for found in (loss, norm, *(shard.local for shard in model.shards), *states)})


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_on_the_device(name: str) -> None:
    world, overrides = LAYOUTS[name]
    assert run_ranks(_step, 1, world, overrides, "")[0] == ["cuda:0"]


def _refusal(rank: int, planted: str) -> str:
    with pytest.raises((RuntimeError, AssertionError)) as refused:
        # Fake tensors do not look into the fused Adam's lists; the low-precision optimizer is made of plain operators.
        _step(rank, 1, ["trainer.precision=bf16_sr"], planted)
    return str(refused.value)


@pytest.mark.parametrize("planted", ["weight", "loss mask", "optimizer state"])
def test_a_tensor_on_the_cpu_is_refused(planted: str) -> None:
    message = run_ranks(_refusal, 1, planted)[0]
    assert "cpu" in message and "cuda" in message, message
