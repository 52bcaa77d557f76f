"""Adapters are exchanged with PEFT in both directions; merging gives W + B A; unsupported adapters are rejected."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.config import ConfigError
from megatron_llama.config.hf_config import ADAPTER_WEIGHTS
from megatron_llama.data.batches import build_data
from megatron_llama.devices import get_device
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan
from tests.finetuning import runner
from tests.finetuning.runner import CPU, World, make_plan, tune
from tests.messages import raises_with_message
from tests.model.llamas import whole_batch
from tests.oracle import distance
from tests.paths import ROOT
from tests.ranks import RankFailed, run_ranks


@pytest.fixture(scope="module")
def trained(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run of a few steps under tp2."""
    folder = tmp_path_factory.mktemp("trained")
    tune(2, folder, *world.lora, "trainer.tp=2", steps=4)
    return folder


def _our_logits(rank: int, plan: Plan) -> torch.Tensor:
    device, topology = get_device("cpu"), plan.topology(rank)
    with process_groups(plan, topology, device, CPU):
        model = build_model(plan, topology, device, CPU)
        Checkpointer(plan, topology, model, build_optimizer(plan, model), build_data(plan, topology, CPU)).resume()
        logits = model.logits(whole_batch(plan, 0)[0])
        assert logits is not None
        return logits.transpose(0, 1)


def _their_logits(rank: int, plan: Plan, base: Path, adapter: Path | None) -> tuple[torch.Tensor, Any]:
    """Logits, and the weights once peft has merged them."""
    import peft

    model = runner.their_base(base)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        logits = model(whole_batch(plan, 0)[0]).logits
    return logits, None if adapter is None else dict(model.merge_and_unload().state_dict())


def test_peft_reads_our_adapter_and_gives_our_logits(world: World, trained: Path, tmp_path: Path) -> None:
    made = export(find_checkpoint(trained), tmp_path / "adapter")
    names = sorted(path.name for path in made.folder.iterdir())
    assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    theirs = load_file(world.adapter / "adapter_model.safetensors")
    ours = load_file(made.folder / "adapter_model.safetensors")
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    assert made.bytes == sum(tensor.nbytes for tensor in ours.values()) and made.dtype == "float32"
    trained_here = sum(tensor.numel() for tensor in ours.values())
    assert f"| Parameters of the adapter | {trained_here:,} (" in (made.folder / "README.md").read_text()
    (logits,) = run_ranks(_our_logits, 1, make_plan(1, trained, *world.lora))
    (their_logits, _) = run_ranks(_their_logits, 1, world.plan, world.base, made.folder)[0]
    assert distance(logits, their_logits) <= 1e-6
    (plain, _) = run_ranks(_their_logits, 1, world.plan, world.base, None)[0]
    assert distance(logits, plain) > 1e-2  # the adapter changes the logits
    # A new run from the exported adapter starts with the same logits.
    chosen = [*world.lora[:1], f"finetune.adapter={made.folder}", *world.lora[2:]]
    (reloaded,) = run_ranks(_our_logits, 1, make_plan(1, tmp_path / "again", *chosen))
    assert torch.equal(reloaded, logits)


def test_merged_is_base_plus_product(world: World, trained: Path, tmp_path: Path) -> None:
    made = export(find_checkpoint(trained), tmp_path / "merged", merge=True)
    merged, base = load_file(made.folder / "model.safetensors"), load_file(world.base / "model.safetensors")
    adapter = load_file(export(find_checkpoint(trained), tmp_path / "adapter").folder / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in adapter:
            product = adapter[f"{stem}.lora_B.weight"].double() @ adapter[f"{stem}.lora_A.weight"].double()
            assert distance(merged[name], weight + 12 / 4 * product) <= 1e-6
            assert distance(merged[name], weight) > 1e-3
        else:
            assert torch.equal(merged[name], weight)
    (_, by_peft) = run_ranks(_their_logits, 1, world.plan, world.base, tmp_path / "adapter")[0]
    assert all(distance(merged[name], by_peft[name]) <= 1e-6 for name in merged)
    (logits,) = run_ranks(_our_logits, 1, make_plan(1, trained, *world.lora))
    (their_logits, _) = run_ranks(_their_logits, 1, world.plan, made.folder, None)[0]
    assert distance(logits, their_logits) <= 1e-6


def test_dora_is_pefts_after_export_and_merge(world: World, tmp_path: Path) -> None:
    """peft reads the exported adapter; a new run reads it too; peft merges the same weights."""
    run, dora = tmp_path / "run", "finetune.use_dora=true"
    tune(2, run, *world.fresh, dora, "trainer.tp=2", steps=4)
    made = export(find_checkpoint(run), tmp_path / "adapter")
    assert sum(name.endswith(".lora_magnitude_vector") for name in load_file(made.folder / ADAPTER_WEIGHTS)) == 14
    merged = load_file(export(find_checkpoint(run), tmp_path / "merged", merge=True).folder / "model.safetensors")
    (logits,) = run_ranks(_our_logits, 1, make_plan(1, run, *world.fresh, dora))
    (their_logits, by_peft) = run_ranks(_their_logits, 1, world.plan, world.base, made.folder)[0]
    assert distance(logits, their_logits) <= 1e-6
    assert all(distance(merged[name], by_peft[name]) <= 1e-6 for name in merged)
    chosen = ["finetune=lora", f"finetune.adapter={made.folder}", f"init_from={world.base}"]
    (reloaded,) = run_ranks(_our_logits, 1, make_plan(1, tmp_path / "again", *chosen))
    assert torch.equal(reloaded, logits)
    full = ["finetune=full", f"init_from={tmp_path / 'merged'}"]
    (from_merged,) = run_ranks(_our_logits, 1, make_plan(1, tmp_path / "full", *full))
    assert distance(from_merged, logits) <= 1e-5


def test_merging_twice(world: World, trained: Path, tmp_path: Path) -> None:
    checkpoint = find_checkpoint(trained)
    first, second = (export(checkpoint, tmp_path / name, merge=True).folder for name in ("first", "second"))
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    with raises_with_message(ConfigError, "the folder exists and is not empty"):
        export(checkpoint, first, merge=True)
    with raises_with_message(ConfigError, "has other weights than the base model"):
        export(checkpoint, tmp_path / "third", merge=True, base=first)  # what has been merged is another base
    tune(1, tmp_path / "full", "finetune=full", f"init_from={first}", steps=0)
    with raises_with_message(ConfigError, "no LoRA adapter to merge"):
        export(find_checkpoint(tmp_path / "full"), tmp_path / "fourth", merge=True)
    with raises_with_message(ConfigError, "only used with --merge"):
        export(checkpoint, tmp_path / "fourth", base=world.base)
    assert not (tmp_path / "third").exists() and not (tmp_path / "fourth").exists()


def test_the_base_may_move(world: World, trained: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.symlink_to(world.base)
    export(find_checkpoint(trained), tmp_path / "merged", merge=True, base=moved)
    with raises_with_message(ConfigError, "neither model.safetensors nor"):
        export(find_checkpoint(trained), tmp_path / "none", merge=True, base=tmp_path)


@pytest.mark.slow
def test_the_script(world: World, trained: Path, tmp_path: Path) -> None:
    def script(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, (ROOT / "scripts/export_hf.py", *arguments))]
        return subprocess.run(command, capture_output=True, text=True, timeout=150)

    answer = script(trained, tmp_path / "merged", "--merge", "--base", world.base, "--dtype", "bfloat16")
    assert answer.returncode == 0 and "bfloat16 in 1 file" in answer.stdout, answer.stderr
    expected = load_file(export(find_checkpoint(trained), tmp_path / "wide", merge=True).folder / "model.safetensors")
    for name, tensor in load_file(tmp_path / "merged/model.safetensors").items():
        assert torch.equal(tensor, expected[name].bfloat16())  # summed in fp32, rounded once
    answer = script(trained, tmp_path / "refused", "--merge", "--base", tmp_path)
    assert answer.returncode == 2 and "Traceback" not in answer.stderr


def _with(adapter: Path, folder: Path, **settings: Any) -> Path:
    folder.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    (folder / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"use_dora": "yes"}, "use_dora must be true or false"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"target_modules": ".*_proj"}, "target_modules must be a list of names"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
        ({"target_modules": ["q_proj", "c_attn"]}, "must be some of q_proj"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),  # it changes the base weights
        ({"init_lora_weights": "pissa_niter_16"}, "only True or False or 'gaussian'"),
        ({"loftq_config": {"loftq_bits": 4}}, "loftq_config is"),
        ({"of_a_later_peft": 3}, "of_a_later_peft is 3"),
    ],
)
def test_other_kinds_of_adapters_are_refused(
    settings: dict[str, Any], message: str, world: World, tmp_path: Path
) -> None:
    folder = _with(world.adapter, tmp_path / "other", **settings)
    with raises_with_message(ConfigError, message):
        make_plan(1, tmp_path, "finetune=lora", f"finetune.adapter={folder}", f"init_from={world.base}")


@pytest.mark.parametrize(
    "settings",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False, "lora_dropout": 0.1, "inference_mode": True, "revision": "main"},
        {"of_a_later_peft": None, "another": False, "one_more": {}},
    ],
)
def test_what_does_not_matter_is_let_through(settings: dict[str, Any], world: World, tmp_path: Path) -> None:
    folder = _with(world.adapter, tmp_path / "other", **settings)
    make_plan(1, tmp_path, "finetune=lora", f"finetune.adapter={folder}", f"init_from={world.base}")


def test_an_adapter_sets_rank_and_modules(world: World, tmp_path: Path) -> None:
    finetune = make_plan(1, tmp_path, *world.lora).config.finetune
    assert (finetune.lora_rank, finetune.lora_alpha, len(finetune.lora_target_modules)) == (4, 12, 7)
    with raises_with_message(ConfigError, r"is set by the adapter in \S+: 4"):
        make_plan(1, tmp_path, *world.lora, "finetune.lora_rank=8")
    with raises_with_message(ConfigError, "No such file"):
        make_plan(1, tmp_path, "finetune=lora", f"finetune.adapter={tmp_path}", f"init_from={world.base}")


def test_an_adapter_of_another_model_is_refused(world: World, tmp_path: Path) -> None:
    folder = _with(world.adapter, tmp_path / "other")
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file(tensors | {name: torch.zeros(4, 5)}, folder / "adapter_model.safetensors", {"format": "pt"})
    with raises_with_message(RankFailed, "ConfigError.*has shape .4, 5.; this run expects"):
        tune(1, tmp_path, "finetune=lora", f"finetune.adapter={folder}", f"init_from={world.base}", steps=0)
