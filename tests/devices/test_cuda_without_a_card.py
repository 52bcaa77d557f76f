"""The forward pass of a block with trainer.async_tp, compiled for an absent H100 with a CUDA build of torch.

The model consists of fake tensors on cuda:0, and Inductor finds an H100. The training graph is not covered, because
tracing it runs autograd, which needs a driver. tests/cuda compiles and runs whole steps without async_tp.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist

from megatron_llama.devices import get_device
from megatron_llama.devices.cuda import device as cuda
from megatron_llama.model.inputs import MicroBatch
from megatron_llama.model.llama import ColumnLinear, RowLinear
from megatron_llama.parallel import ParallelModel, build_model, parallelize, process_groups
from megatron_llama.parallel.async_tp import Overlap, enable_async_overlap
from megatron_llama.parallel.compiling import traceable_matmul
from megatron_llama.plan import Plan
from megatron_llama.tools.rehearse.rehearsal import FakeTensors, fake_world
from tests.oracle import make_plan
from tests.ranks import run_ranks

REASON = "needs a CUDA build of torch on a machine without a driver"
pytestmark = pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason=REASON)
CUDA = torch.device("cuda", 0)
CURRENT_DEVICE = torch.cuda.current_device


@contextmanager
def no_driver() -> Iterator[None]:
    """Streams, events and questions about the current device do nothing."""
    with ExitStack() as inside:
        for name in ("Stream", "Event", "current_stream", "default_stream", "stream", "synchronize", "set_device"):
            inside.enter_context(patch.object(torch.cuda, name, MagicMock()))
        inside.enter_context(patch.object(torch.cuda, "current_device", lambda: 0))
        inside.enter_context(patch.object(torch.cuda, "_lazy_init", lambda: None))
        yield


def _built(inside: ExitStack, world: int, overrides: list[str]) -> ParallelModel:
    """Rank 0's model of fake tensors on cuda:0, for as long as ``inside`` is open."""
    dist.destroy_process_group()
    plan = make_plan(world, "data.mock=true", *overrides)
    topology = plan.topology(0)
    device = get_device("cpu")  # its code: no NCCL, no library
    inside.enter_context(no_driver())
    inside.enter_context(fake_world(topology, "cuda"))
    inside.enter_context(patch.object(parallelize, "init_weights", lambda *_: None))  # there are no values
    inside.enter_context(process_groups(plan, topology, device, CUDA))
    inside.enter_context(FakeTensors())
    return build_model(plan, topology, device, CUDA)


def _micro_batch(plan: Plan) -> MicroBatch:
    length = plan.config.data.seq_length
    assert length is not None
    ids = torch.zeros(1, length, dtype=torch.int64, device=CUDA)
    return MicroBatch(ids, ids, torch.ones_like(ids, dtype=torch.float32), torch.zeros_like(ids[0, :2]))


H100 = SimpleNamespace(
    **{"name": "H100", "major": 9, "minor": 0, "warp_size": 32, "multi_processor_count": 132},
    **{"regs_per_multiprocessor": 1 << 16, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024},
    **{"total_memory": 80 << 30, "shared_memory_per_block": 48 << 10, "shared_memory_per_block_optin": 227 << 10},
)


@contextmanager
def compiling_for_an_h100() -> Iterator[None]:
    """Let Inductor generate code for an absent GPU."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    answers: dict[Any, dict[str, Any]] = {
        torch.cuda: {"get_device_properties": H100, "get_device_capability": (9, 0), "device_count": 1},
        CudaInterface: {"is_available": True, "is_bf16_supported": True, "get_compute_capability": 90},
        CudaInterface.Worker: {"get_device_properties": H100},
        triton_helpers: {"set_driver_to_gpu": None},
    }
    with ExitStack() as inside:
        for place, names in answers.items():
            for name, answer in names.items():
                inside.enter_context(patch.object(place, name, MagicMock(return_value=answer)))
        inside.enter_context(patch.object(CudaInterface, "get_device_properties", MagicMock(return_value=H100)))
        inside.enter_context(patch.object(AsyncCompile, "triton", MagicMock()))
        # Folding constants would compute with them on the card.
        inside.enter_context(config.patch(force_disable_caches=True, joint_graph_constant_folding=False))
        driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
        yield


def _overlapped(_: int) -> tuple[Overlap, str]:
    """Return the fused and separate collectives of a tensor-parallel block, and Inductor's code."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering
    from torch.distributed import _symmetric_memory as symmetric

    written: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compile_fx(graph, inputs)
        return graph.forward

    with ExitStack() as inside:
        model = _built(inside, 2, ["trainer.tp=2", "trainer.precision=bf16"])
        inside.enter_context(compiling_for_an_h100())
        inside.enter_context(patch.object(GraphLowering, "save_output_code", written.append))
        # Dynamo knows the real function, whose answer is a constant of the graph.
        inside.enter_context(patch.object(torch.cuda, "current_device", CURRENT_DEVICE))
        inside.enter_context(patch.object(torch._C, "_cuda_getDevice", lambda: 0))
        inside.enter_context(patch.object(cuda, "_peer_access_problem", lambda group: None))
        inside.enter_context(patch.object(symmetric, "empty", lambda *size, dtype, device: None))
        inside.enter_context(patch.object(symmetric, "rendezvous", lambda memory, group: None))
        count = enable_async_overlap(cuda.DEVICE)
        block = model.chunks[0].layers["0"]
        for layer in block.modules():
            if isinstance(layer, ColumnLinear | RowLinear):
                layer.matmul = traceable_matmul
        block.forward = torch.compile(block.forward, backend=backend, dynamic=False, fullgraph=True)
        model.evaluate([_micro_batch(model.plan)])
        return count.take(), "".join(written)


def test_async_tp_puts_collectives_into_products() -> None:
    actual, code = run_ranks(_overlapped, 1)[0]
    assert actual == (4, 0)
    assert code.count("symm_mem.fused_all_gather_matmul.default(") == 2
    assert code.count("symm_mem.fused_matmul_reduce_scatter.default(") == 2
