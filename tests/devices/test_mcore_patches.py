"""megatron-core's CUDA calls reach the run's device; its import loads no compiler."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from megatron_llama.devices.mcore_patches import PATCHED_MODULES, patch_mcore
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
    """A new call upstream fails in tests/layouts, which run with the route."""
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
