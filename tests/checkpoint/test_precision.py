"""Checkpoints with bf16 weights and moments: bit-identical in the same precision, converted in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.manifest import read_manifest
from tests.checkpoint.runner import CPU, assert_same, run
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ADAM = ["optim.lr=0.01", "optim.warmup_steps=2", "trainer.steps=8"]
SR, FP32, NO_SAVE = "trainer.precision=bf16_sr", "trainer.precision=fp32", "checkpoint.save_last=false"


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, [SR], id="one"),
        pytest.param(2, [SR, "trainer.zero=3"], id="dp2zero3", marks=pytest.mark.slow),
        pytest.param(1, ["trainer.precision=fp32_OptStates"], id="fp32_OptStates"),
        pytest.param(1, [SR, "optim.name=sgd"], id="sgd"),
        pytest.param(1, ["trainer.precision=fp32_ZeroOptMaster"], id="fp32_ZeroOptMaster"),
    ],
)
def test_losses_after_a_resume_are_the_uninterrupted_runs(ranks: int, layout: list[str], tmp_path: Path) -> None:
    whole = run(ranks, tmp_path / "whole", *ADAM, *layout, until=6)
    first = run(ranks, tmp_path / "halves", *ADAM, *layout, until=3)
    second = run(ranks, tmp_path / "halves", *ADAM, *layout, until=6)
    assert first.losses | second.losses == whole.losses  # the noise of step 4 is that of step 4
    assert_same(second.tensors, whole.tensors)
    assert second.updates == whole.updates


def test_a_forgotten_count_would_be_seen(tmp_path: Path) -> None:
    def forget(checkpointer: Checkpointer) -> None:
        restore = checkpointer.optimizer.restore
        checkpointer.optimizer.restore = lambda updates, steps: restore(0, steps)  # type: ignore[method-assign]

    sgd = [*ADAM, SR, "optim.name=sgd"]  # whose count is for nothing but the noise
    whole = run(1, tmp_path / "whole", *sgd, until=6)
    run(1, tmp_path / "halves", *sgd, until=3)
    second = run(1, tmp_path / "halves", *sgd, until=6, tamper=forget)
    assert second.losses[4] == whole.losses[4] and second.losses[6] != whole.losses[6]


def test_what_is_bf16_is_stored_as_bf16(tmp_path: Path) -> None:
    before = run(2, tmp_path / "run", SR, "trainer.tp=2", until=2)
    stored = read_manifest(find_checkpoint(tmp_path / "run")).stored
    saved = {name: tensor.dtype for name, tensor in stored.tensors.items() if not name.startswith("random.")}
    assert set(saved.values()) == {torch.bfloat16} and any(name.startswith("optimizer.exp_avg_sq.") for name in saved)
    # All layouts read equal values.
    step = f"checkpoint.resume={tmp_path}/run/checkpoints/step_00000002"
    assert_same(run(2, tmp_path / "other", SR, "trainer.pp=2", step, NO_SAVE).tensors, before.tensors)
    made = export(find_checkpoint(tmp_path / "run"), tmp_path / "hf")
    assert made.dtype == "bfloat16"
    exported = {name: stored.rows(name) for name in stored.tensors if "." in name}
    start = ["model=from_hf", f"init_from={tmp_path}/hf", "trainer.steps=0", NO_SAVE]
    for name, tensor in run(1, tmp_path / "hf_run", SR, *start).tensors.items():
        if "/" not in name:
            assert torch.equal(tensor, exported[name].float()), name


def test_from_fp32_to_bf16_to_nearest_and_back_exactly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fp32_run = run(1, tmp_path / "wide", FP32, until=2)
    second = f"checkpoint.resume={tmp_path}/wide/checkpoints/step_00000002"
    bf16_run = run(1, tmp_path / "narrow", SR, second, NO_SAVE)
    assert bf16_run.updates == 2
    assert_same(bf16_run.tensors, {name: tensor.bfloat16().float() for name, tensor in fp32_run.tensors.items()})
    assert "trainer.precision: from fp32 to bf16_sr" in capfd.readouterr().err
    further = run(1, tmp_path / "narrow", SR, second, until=3)
    third = f"checkpoint.resume={tmp_path}/narrow/checkpoints/step_00000003"
    capfd.readouterr()
    assert_same(run(1, tmp_path / "narrow", SR, third, NO_SAVE).tensors, further.tensors)
    assert "trainer.precision" not in capfd.readouterr().err
    assert_same(run(1, tmp_path / "back", FP32, third, NO_SAVE).tensors, further.tensors)


def test_the_weights_of_a_folder_are_rounded_to_nearest(tmp_path: Path) -> None:
    run(1, tmp_path / "wide", FP32, "trainer.steps=0")
    export(find_checkpoint(tmp_path / "wide"), tmp_path / "hf")
    stored = read_manifest(find_checkpoint(tmp_path / "wide")).stored
    start = ["model=from_hf", f"init_from={tmp_path}/hf", "trainer.steps=0", NO_SAVE]
    for name, tensor in run(1, tmp_path / "narrow", SR, *start).tensors.items():
        if "/" not in name:
            assert torch.equal(tensor, stored.rows(name).bfloat16().float()), name


def test_transformers_reads_the_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is a dev dependency")
    run(1, tmp_path / "run", SR, until=1)
    export(find_checkpoint(tmp_path / "run"), tmp_path / "hf")
    (dtypes,) = run_ranks(_dtypes, 1, transformers, tmp_path / "hf")
    assert dtypes == {torch.bfloat16}


def _dtypes(rank: int, transformers: Any, folder: Path) -> set[torch.dtype]:
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert torch.isfinite(model(torch.zeros(1, 4, dtype=torch.long, device=CPU)).logits).all()
    return {weight.dtype for weight in model.parameters()}
