"""A resumed run equals an uninterrupted one, bit-identical in other layouts; another precision converts states."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.manifest import NAME, _checksum, read_manifest
from tests.checkpoint.runner import Run, Tensors, assert_same, run
from tests.ranks import RankFailed, run_ranks
from tests.rows import read_layouts, rows

ONE_BIT = ["optim.name=onebit_adam", "trainer.zero=0", "optim.freeze_step=2"]
ADAM = ["optim.lr=0.01", "optim.warmup_steps=2", "trainer.steps=8"]
SR, FP32, NO_SAVE = "trainer.precision=bf16_sr", "trainer.precision=fp32", "checkpoint.save_last=false"


def _seed(checkpointer: Checkpointer) -> None:
    torch.manual_seed(77 + checkpointer.topology.rank)


LAYOUTS, QUICK = read_layouts(__file__, "resume")
STORED_LAYOUTS, _ = read_layouts(__file__, "stored")


@pytest.fixture(params=["disk", pytest.param("store", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest) -> str:
    """URL of an object store for checkpoint.dir; empty for the run folder."""
    return "" if request.param == "disk" else request.getfixturevalue("store").url("run")


def checkpoint_dir(url: str) -> list[str]:
    return [f"checkpoint.dir={url}"] if url else []


@pytest.mark.parametrize(("ranks", "layout"), rows(LAYOUTS.items(), QUICK))
def test_losses_after_a_resume_are_the_uninterrupted_runs(
    ranks: int, layout: list[str], url: str, tmp_path: Path
) -> None:
    remote = checkpoint_dir(url)
    whole = run(ranks, tmp_path / "whole", *ADAM, *layout, until=5, tamper=_seed)
    first = run(ranks, tmp_path / "halves", *ADAM, *layout, *remote, until=3, tamper=_seed)
    second = run(ranks, tmp_path / ("other" if remote else "halves"), *ADAM, *layout, *remote, until=5)
    assert second.started_at == 3 and list(second.losses) == [4, 5]
    assert first.losses | second.losses == whole.losses  # floats, all bits
    assert_same(second.tensors, whole.tensors)
    assert (second.lr, second.updates, second.random) == (whole.lr, whole.updates, whole.random)


def test_errors_of_signs_begin_at_zero_in_another_layout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(2, tmp_path / "run", *ADAM, *ONE_BIT, until=3)
    assert "errors" not in capfd.readouterr().err
    assert run(2, tmp_path / "run", *ADAM, *ONE_BIT, "trainer.tp=2", until=4).started_at == 3
    message = "the errors of 1-bit Adam's compression start at zero: the layout differs from the checkpoint"
    assert message in capfd.readouterr().err


def test_another_layout_resumes_within_the_layout_tolerance(tmp_path: Path) -> None:
    """test_data_stream.py has a run with Adam."""
    settings = [*ADAM, "optim.name=muon"]
    whole = run(1, tmp_path / "whole", *settings, until=4)
    run(1, tmp_path / "halves", *settings, until=2)
    second = run(4, tmp_path / "halves", *settings, "trainer.tp=2", "trainer.pp=2", until=4)
    assert second.started_at == 2
    for step, loss in second.losses.items():
        assert loss == pytest.approx(whole.losses[step], rel=1e-5)


def test_blocking_saves_are_the_same(tmp_path: Path) -> None:
    one = run(1, tmp_path / "async", "checkpoint.every_steps=1", until=2)
    other = run(1, tmp_path / "sync", "checkpoint.every_steps=1", "checkpoint.asynchronous=false", until=2)
    assert_same(one.tensors, other.tensors)
    step = Path("checkpoints/step_00000001/rank_00000.safetensors")
    assert (tmp_path / "async" / step).read_bytes() == (tmp_path / "sync" / step).read_bytes()


NEWER = {
    "model": ["model_type"],
    "data": ["schedule"],
    "trainer": ["cp", "cp_comm", "float8", "z_loss", "batch_schedule"],
    "checkpoint": ["allow"],
    "optim": ["momentum", "matrix_lr", "adjust_lr", "split_heads", "qk_clip"],
    "finetune": ["use_rslora", "use_dora"],
}
"""Settings that checkpoints of older versions lack."""


def test_a_checkpoint_without_newer_settings_is_read(tmp_path: Path) -> None:
    whole = run(1, tmp_path / "whole", *ADAM, until=4)
    run(1, tmp_path / "old", *ADAM, until=2)
    folder = find_checkpoint(tmp_path / "old")
    body = json.loads((folder / NAME).read_text())
    del body["checksum"], body["state"]["lr"], body["state"]["consumed_tokens"]
    for section, names in NEWER.items():
        for name in names:
            del body["state"]["settings"][section][name]
    (folder / NAME).write_text(json.dumps({**body, "checksum": _checksum(body)}))
    export(folder, tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "llama"
    second = run(1, tmp_path / "old", *ADAM, until=4)
    assert second.started_at == 2 and second.losses == {step: whole.losses[step] for step in (3, 4)}


def assert_same_weights(ours: Tensors, theirs: Tensors) -> None:
    """Check that the weights are bit-identical; optimizer states are ignored."""
    assert_same({name: t for name, t in ours.items() if "/" not in name}, theirs)


def test_bf16_is_stored_and_exported_as_bf16(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is a dev dependency")
    before = run(2, tmp_path / "run", SR, "trainer.tp=2", until=2)
    stored = read_manifest(find_checkpoint(tmp_path / "run")).stored
    saved = {name: tensor.dtype for name, tensor in stored.tensors.items() if not name.startswith("random.")}
    assert set(saved.values()) == {torch.bfloat16} and any(name.startswith("optimizer.exp_avg_sq.") for name in saved)
    # All layouts read equal values.
    step = f"checkpoint.resume={tmp_path}/run/checkpoints/step_00000002"
    assert_same(run(2, tmp_path / "other", SR, "trainer.pp=2", step, NO_SAVE).tensors, before.tensors)
    assert export(find_checkpoint(tmp_path / "run"), tmp_path / "hf").dtype == "bfloat16"
    (dtypes,) = run_ranks(_dtypes, 1, transformers, tmp_path / "hf")
    assert dtypes == {torch.bfloat16}
    start = ["model=from_hf", f"init_from={tmp_path}/hf", "trainer.steps=0", NO_SAVE]
    weights = {name: stored.rows(name).float() for name in saved if not name.startswith("optimizer.")}
    assert_same_weights(run(1, tmp_path / "hf_run", SR, *start).tensors, weights)


def _dtypes(rank: int, transformers: Any, folder: Path) -> set[torch.dtype]:
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert torch.isfinite(model(torch.zeros(1, 4, dtype=torch.long)).logits).all()
    return {weight.dtype for weight in model.parameters()}


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
    weights = run(1, tmp_path / "wide", FP32, "trainer.steps=0").tensors
    export(find_checkpoint(tmp_path / "wide"), tmp_path / "hf")
    start = ["model=from_hf", f"init_from={tmp_path}/hf", "trainer.steps=0", NO_SAVE]
    rounded = run(1, tmp_path / "narrow", SR, *start).tensors
    assert_same_weights(rounded, {name: t.bfloat16().float() for name, t in weights.items() if "/" not in name})


MODELS = {"odd vocabulary": ["model.vocab_size=61"], "tied": ["model.tie_word_embeddings=true"]}
NAMES = list(STORED_LAYOUTS)
# The stored content does not depend on the layout: it is enough that each layout writes and each layout reads.
STEPS_BETWEEN = {"odd vocabulary": 5, "tied": 4}
PAIRS = {
    f"{model}: {saved} to {other}": (model, saved, other)
    for model, between in STEPS_BETWEEN.items()
    for index, saved in enumerate(NAMES)
    for other in [NAMES[(index + between) % len(NAMES)]]
    if model != "tied" or index % 3 == 1
}


Saved = Callable[..., tuple[str, Run]]
"""Checkpoint folder and result of a run by the names of model and layout, and the URL of a store."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Two steps of training in a layout, saved; made once each."""

    @cache
    def make(model: str, layout: str, url: str = "") -> tuple[str, Run]:
        folder = tmp_path_factory.mktemp("run")
        ranks, overrides = STORED_LAYOUTS[layout]
        result = run(ranks, folder, *overrides, *MODELS[model], *checkpoint_dir(url), until=2)
        return url or f"{folder}/checkpoints", result

    return make


@pytest.mark.parametrize(("model", "layout", "other"), rows(PAIRS.items(), list(PAIRS)[1::3]))
def test_any_layout_loads_into_any(saved: Saved, tmp_path: Path, url: str, model: str, layout: str, other: str) -> None:
    folder, before = saved(model, layout, url)
    ranks, overrides = STORED_LAYOUTS[other]
    checkpoint = f"checkpoint.resume={folder}/step_00000002"
    after = run(ranks, tmp_path, *overrides, *MODELS[model], checkpoint, "checkpoint.save_last=false")
    assert after.started_at == 2 and after.updates == 2
    assert after.lr == before.lr
    assert_same(after.tensors, before.tensors)


def test_files_have_hugging_face_names_and_each_value_once(saved: Saved) -> None:
    folder, before = saved("odd vocabulary", "tp4, kv heads < tp")
    stored = read_manifest(Path(folder) / "step_00000002").stored
    assert stored.tensors["lm_head.weight"].shape == (61, 32)  # without the rows that pad it
    for name, tensor in before.tensors.items():
        kind, _, bare = name.rpartition("/")
        assert torch.equal(stored.rows(f"optimizer.{kind}.{bare}" if kind else name), tensor)
    for layout in ("dp2, zero 0", "tp4, kv heads < tp", "dp4, hybrid"):
        folder, before = saved("odd vocabulary", layout)
        manifest = read_manifest(Path(folder) / "step_00000002")
        values = sum(tensor.numel() for tensor in before.tensors.values())
        random = sum(t.shape[0] for name, t in manifest.stored.tensors.items() if name.startswith("random."))
        heads = sum(int.from_bytes((manifest.stored.folder / f).read_bytes()[:8], "little") + 8 for f in manifest.files)
        assert sum(manifest.files.values()) - heads - random == 4 * values


def _count_everything(checkpointer: Checkpointer) -> None:
    for shard in checkpointer.model.shards:
        shard.is_primary_replica = True


def test_a_value_written_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="has values of .* at .* twice"):
        run(2, tmp_path, "trainer.zero=0", "checkpoint.save_timeout_seconds=0", until=1, tamper=_count_everything)
    assert list((tmp_path / "checkpoints").iterdir()) == []
