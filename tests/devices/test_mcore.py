"""Every CUDA call in the parts of megatron-core that we use is accounted for; a new one upstream fails here."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_llama.devices.mcore import PATCHED_MODULES, patch_mcore
from megatron_llama.parallel import groups
from megatron_llama.parallel.parallelize import mcore_config
from megatron_llama.plan import resolve
from tests.config.helpers import make
from tests.oracle import run_layout
from tests.processes import run_command
from tests.ranks import RankFailed, run_ranks


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo ``patch_mcore`` of earlier tests in this process: ranks are forked from it."""
    for name in PATCHED_MODULES:
        monkeypatch.setattr(importlib.import_module(name), "torch", torch)


# Modules that our runs call, in addition to the modules that route() patches.
ENTERED = tuple(
    f"megatron.core.{name}"
    for name in (
        "model_parallel_config parallel_state pipeline_parallel.utils process_groups_config "
        "tensor_parallel.cross_entropy tensor_parallel.random transformer.transformer_config transformer.utils "
        "datasets.blended_dataset datasets.blended_megatron_dataset_builder datasets.blended_megatron_dataset_config "
        "datasets.gpt_dataset datasets.helpers datasets.indexed_dataset datasets.megatron_dataset datasets.utils"
    ).split()
)
# Names that route() replaces in the patched modules.
REPLACED = ("torch.cuda.current_device", "torch.cuda.synchronize", 'torch.zeros(device="cuda")')
DECORATOR = "marks a backward for autocast, which we don't use; needs no device"
RANDOM = "states of random generators for dropout, which Llama does not have"
TIMER = "measures stragglers; only when started"
OVERLAP = "two streams for overlapped expert parallelism; only where that schedule is chosen"
# (module, beginning of the function's name; none: outside all functions) of calls that do no harm elsewhere: why.
ACCOUNTED = {
    ("tensor_parallel.layers", ""): DECORATOR,
    ("tensor_parallel.random", ""): RANDOM,
    ("pipeline_parallel.schedules", "forward_step"): "autocast, only with enable_autocast",
    ("tensor_parallel.random", "_get_cuda_rng_state"): RANDOM,
    ("tensor_parallel.random", "_set_cuda_rng_state"): RANDOM,
    ("tensor_parallel.random", "CudaRNGStatesTracker."): RANDOM,
    ("tensor_parallel.random", "model_parallel_cuda_manual_seed"): RANDOM,
    ("utils", "GlobalSymmetricMemoryBuffer."): "NVLink buffers, only for inference",
    ("utils", "check_param_hashes_across_dp_replicas"): "parallel/compare_copies.py compares copies",
    ("utils", "local_multi_tensor_l2_norm"): "optim/norm.py has its own norm",
    ("utils", "StragglerDetector."): TIMER,
    ("utils", "get_batch_on_this_hybrid_cp_rank"): "context parallelism, which we don't have",
    ("utils", "get_batch_on_this_tp_rank"): "every rank reads its own samples (data/batches.py)",
    ("utils", "nvtx_range_"): "profiler marks, only when switched on",
    ("parallel_state", "update_pg_timeout"): "never called",
    ("parallel_state", "initialize_model_parallel"): "only with use_sharp, for InfiniBand switches",
    (
        "datasets.blended_megatron_dataset_builder",
        "BlendedMegatronDatasetBuilder._build_megatron_datasets_parallel",
    ): "data/megatron_order.py replaces this method",
    ("pipeline_parallel.utils", "ScheduleNode."): OVERLAP,
    ("pipeline_parallel.utils", "set_streams"): OVERLAP,
    ("pipeline_parallel.utils", "get_comp_stream"): OVERLAP,
    ("utils", "_validate_dsa_kernel_backend_dependencies"): "sparse attention of other models",
    ("transformer.utils", "get_default_causal_mask"): "scaled_dot_product_attention is causal without a mask",
    ("transformer.utils", "get_sliding_window_causal_mask"): "Llama has no sliding window",
    ("transformer.utils", "cat_with_oom_fallback"): "megatron-core's checkpoint format; this project uses checkpoint/",
}


@dataclass(frozen=True)
class Call:
    """A use of CUDA."""

    module: str
    """Without ``megatron.core.``."""
    function: str
    attribute: str

    def is_accounted(self) -> bool:
        if f"megatron.core.{self.module}" in PATCHED_MODULES and self.attribute in REPLACED:
            return True
        return any(
            module == self.module and (self.function.startswith(name) if name else not self.function)
            for module, name in ACCOUNTED
        )


class Finder(ast.NodeVisitor):
    """Collects ``torch.cuda.*``, names from torch.cuda, ``.cuda()`` and "cuda" as a device."""

    def __init__(self, module: str) -> None:
        self.module, self.inside, self.actual = module, [], set()  # type: ignore[var-annotated]

    def add(self, attribute: str) -> None:
        self.actual.add(Call(self.module, ".".join(self.inside), attribute))

    def enter(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.inside.append(node.name)
        self.generic_visit(node)
        self.inside.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = enter

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").startswith("torch.cuda") or any(name.name == "cuda" for name in node.names):
            self.add(ast.unparse(node))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        text = ast.unparse(node)
        if text.startswith("torch.cuda."):
            self.add(text)
        else:
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value.partition(":")[0] == "cuda":
            self.add(repr(node.value))

    def visit_Call(self, node: ast.Call) -> None:
        devices = [k.value for k in node.keywords if k.arg == "device"]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            self.add(".cuda()")
        if ast.unparse(node.func) == "torch.zeros" and [ast.unparse(d) for d in devices] == ["'cuda'"]:
            self.add('torch.zeros(device="cuda")')
            node.keywords = [k for k in node.keywords if k.arg != "device"]
        self.generic_visit(node)


def calls_in(source: str, module: str) -> set[Call]:
    finder = Finder(module)
    finder.visit(ast.parse(source))
    return finder.actual


def installed_calls() -> Iterator[Call]:
    for name in (*PATCHED_MODULES, *ENTERED):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, f"megatron-core has no {name} any more"
        yield from calls_in(Path(spec.origin).read_text(encoding="utf-8"), name.removeprefix("megatron.core."))


def test_every_cuda_call_is_accounted_for() -> None:
    calls = set(installed_calls())
    unknown = sorted({str(call) for call in calls if not call.is_accounted()})
    assert not unknown, "route them in devices/mcore.py, or say in ACCOUNTED why they never run:\n" + "\n".join(unknown)
    # The calls that are routed are there; else the finder would miss their new spelling.
    for module in ("tensor_parallel.mappings", "pipeline_parallel.p2p_communication", "utils"):
        assert any(c.module == module and c.attribute == "torch.cuda.current_device" for c in calls), module
    zeros = 'torch.zeros(device="cuda")'
    assert any(c.module == "pipeline_parallel.schedules" and c.attribute == zeros for c in calls)


def test_torch_itself_is_left_alone() -> None:
    run_ranks(_routed, 1)


def _routed(rank: int) -> None:
    before = dict(torch.cuda.__dict__), torch.zeros
    mappings, schedules = (importlib.import_module(PATCHED_MODULES[index]) for index in (1, 3))
    patch_mcore(torch.device("cuda"))
    assert mappings.torch is torch and schedules.torch is torch, "on CUDA there is nothing to route"
    patch_mcore(torch.device("cpu"))
    assert (dict(torch.cuda.__dict__), torch.zeros) == before
    for name in PATCHED_MODULES:
        routed = importlib.import_module(name).torch
        assert routed is not torch and routed.cuda.current_device() == torch.device("cpu")
        assert routed.zeros([], device="cuda").device.type == routed.zeros(2).device.type == "cpu"
        routed.cuda.synchronize()
        assert routed.nn is torch.nn and routed.Tensor is torch.Tensor


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA megatron-core's calls work")
@pytest.mark.parametrize(
    "layout",
    [["trainer.tp=2"], ["trainer.pp=2"], ["trainer.pp=2", "trainer.vpp=2"]],
    ids=["sequence parallel", "pipeline", "interleaved pipeline"],
)
def test_without_the_route_it_fails(layout: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/layouts shows that it works with the route."""
    monkeypatch.setattr(groups, "patch_mcore", lambda device: None)
    with pytest.raises(RankFailed, match="(?i)cuda|nvidia"):
        run_layout(2, *layout, steps=1)


def test_importing_the_training_loads_no_compiler_and_starts_no_threads_of_torch() -> None:
    """megatron-core's import would load Inductor, in each process, for functions that are not used here; 0.19 does by a
    ``torch.compile`` without a switch. Ranks are forked after the import, and with torch's threads started before would
    wait for them for ever."""
    loads = "@torch.compile" in _source("transformer/moe/router.py")
    code = """
import os, sys, torch
torch.set_num_threads(2)
import numpy, megatron_llama.train.run_rank
before = os.listdir("/proc/self/task")
torch.zeros(1 << 20).add_(1)
print('torch._inductor.compile_fx' in sys.modules, len(os.listdir("/proc/self/task")) - len(before))
"""
    done = run_command(sys.executable, "-c", code, OMP_NUM_THREADS="2")
    assert done.stdout == f"{loads} 1\n", done.stderr


def test_what_stands_in_for_the_jit_module_has_its_names() -> None:
    body = ast.parse(_source("jit.py")).body
    theirs = {node.name for node in body if isinstance(node, ast.FunctionDef)} | {"jit_fuser"}
    assert theirs == {name for name in vars(sys.modules["megatron.core.jit"]) if not name.startswith("__")}


def _source(path: str) -> str:
    """A file of megatron-core."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / path).read_text(encoding="utf-8")


def test_pipeline_transfers_do_not_wait_for_the_device() -> None:
    # Otherwise megatron-core calls torch.cuda.synchronize() after each transfer.
    for vpp in (1, 2):
        changes = {"trainer.pp": 2, "trainer.vpp": vpp, "model.num_hidden_layers": 4, "trainer.global_batch_size": 4}
        config = mcore_config(resolve(make(**changes), 2))
        assert not (config.batch_p2p_comm and config.batch_p2p_sync)
