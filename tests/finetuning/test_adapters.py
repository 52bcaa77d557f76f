"""Adapters are exchanged with PEFT in both directions; merging gives W + B A; unsupported adapters are rejected."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.config import ConfigError
from megatron_llama.config.data_settings import NewTokens
from megatron_llama.config.hf_config import ADAPTER_WEIGHTS
from scripts import export_hf
from tests.finetuning import runner
from tests.finetuning.runner import (
    BIASES,
    BY_ROWS,
    GROWN,
    IN_FULL,
    LAYER_1,
    LORA,
    OLD,
    PATTERNS,
    ROWS,
    TIED,
    TOKENS,
    World,
    assert_exchanged,
    make_bases,
    make_plan,
    our_logits,
    their_logits,
    tune,
)
from tests.golden import GoldenFiles
from tests.messages import raises_with_message
from tests.oracle import Tensors, distance
from tests.ranks import RankFailed, run_ranks

EVERY = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(scope="module")
def trained(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run of a few steps under tp2."""
    folder = tmp_path_factory.mktemp("trained")
    tune(2, folder, *world.lora, "trainer.tp=2", steps=3)
    return folder


def _adapter_start(adapter: Path, base: Path) -> list[str]:
    return ["finetune=lora", f"finetune.adapter={adapter}", f"init_from={base}"]


KINDS = {"dora": (*LORA, "finetune.use_dora=true"), "patterns": PATTERNS, "one layer": LAYER_1, "all biases": BIASES}


@pytest.mark.parametrize("kind", ["lora", *KINDS])
def test_peft_reads_and_merges_our_adapter(kind: str, world: World, trained: Path, tmp_path: Path) -> None:
    """peft, a new run and the merged weights have the logits of the run."""
    start, base = world.lora, world.base
    if kind == "all biases":
        base = tmp_path / "base"
        run_ranks(runner.save_base, 1, make_plan(1, tmp_path, *BIASES), base)
    if kind in KINDS:
        trained, start = tmp_path / "run", [*KINDS[kind], f"init_from={base}"]
        tune(2, trained, *start, "trainer.tp=2", steps=3)
    restart = [*(one for one in start if one.startswith("model.")), f"init_from={base}"]
    made, merged, logits = assert_exchanged(trained, tmp_path, start, world.plan, base, restart)
    (of_merged, _) = run_ranks(their_logits, 1, world.plan, merged, None)[0]
    assert distance(logits, of_merged) <= 1e-5
    magnitudes = [name for name in load_file(made.folder / ADAPTER_WEIGHTS) if name.endswith(".lora_magnitude_vector")]
    assert len(magnitudes) == (14 if kind == "dora" else 0)


def test_exported_files(world: World, trained: Path, tmp_path: Path) -> None:
    companions = [world.base / name for name in ("chat_template.jinja", "tokenizer_config.json")]
    for file in companions:
        file.write_text("{}")
    made = export(find_checkpoint(trained), tmp_path / "adapter")
    for file in companions:
        file.unlink()
    names = {path.name for path in made.folder.iterdir()}
    of_peft = {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert names == of_peft | {"generation_config.json", *(file.name for file in companions)} and made.tokenizer
    theirs, ours = load_file(world.adapter / ADAPTER_WEIGHTS), load_file(made.folder / ADAPTER_WEIGHTS)
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    assert made.bytes == sum(tensor.nbytes for tensor in ours.values()) and made.dtype == "float32"
    trained_here = sum(tensor.numel() for tensor in ours.values())
    assert f"| Parameters of the adapter | {trained_here:,} (" in (made.folder / "README.md").read_text()


def test_merges_that_are_refused(world: World, trained: Path, tmp_path: Path) -> None:
    checkpoint = find_checkpoint(trained)
    moved = tmp_path / "moved"
    moved.symlink_to(world.base)
    first = export(checkpoint, tmp_path / "first", merge=True).folder
    second = export(checkpoint, tmp_path / "second", merge=True, base=moved).folder
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    tune(1, tmp_path / "full", "finetune=full", f"init_from={first}", steps=0)
    full, third = find_checkpoint(tmp_path / "full"), tmp_path / "third"
    for source, target, base, message in (
        (checkpoint, first, None, "the folder exists and is not empty"),
        (checkpoint, third, first, "has other weights than the base model"),  # the merged model is another base
        (checkpoint, third, tmp_path, "neither model.safetensors nor"),
        (full, third, None, "no LoRA adapter to merge"),
    ):
        with raises_with_message(ConfigError, message):
            export(source, target, merge=True, base=base)
    with raises_with_message(ConfigError, "only used with --merge"):
        export(checkpoint, third, base=world.base)
    with raises_with_message(ConfigError, "the mean of adapters is not the adapter of the mean"):
        export(checkpoint, third, average=2)
    assert not third.exists()


def test_the_script(world: World, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def status(*arguments: object) -> int:
        monkeypatch.setattr("sys.argv", ["export_hf.py", *map(str, arguments)])
        return export_hf.main()

    assert status(trained, tmp_path / "merged", "--merge", "--base", world.base, "--dtype", "bfloat16") == 0
    expected = load_file(export(find_checkpoint(trained), tmp_path / "wide", merge=True).folder / "model.safetensors")
    for name, tensor in load_file(tmp_path / "merged/model.safetensors").items():
        assert torch.equal(tensor, expected[name].bfloat16())  # summed in fp32, rounded once
    assert status(trained, tmp_path / "refused", "--merge", "--base", tmp_path) == 2
    for wrong in (["--max-shard-gb", "nan"], ["--max-shard-gb", "0"], ["--average-decay", "0.5"]):
        with pytest.raises(SystemExit, match="2"):
            status(trained, tmp_path / "refused", *wrong)
    assert status(trained, tmp_path / "refused", "--adapter", world.adapter) == 2


def merge_adapters(
    monkeypatch: pytest.MonkeyPatch, base: Path, folder: Path, out: str, *adapters: object
) -> tuple[int, Tensors]:
    """Return the status and the weights of ``export_hf.py BASE OUT --adapter ...``."""
    arguments = [text for adapter in adapters for text in ("--adapter", str(adapter))]
    monkeypatch.setattr("sys.argv", ["export_hf.py", str(base), str(folder / out), *arguments])
    status, file = export_hf.main(), folder / out / "model.safetensors"
    return status, load_file(file) if file.exists() else {}


def test_a_weighted_sum_of_adapters(
    world: World, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """peft's merge of its weighted sum; a run with DoRA, norms and another weight adds its change of the base."""
    merge = partial(merge_adapters, monkeypatch, world.base, tmp_path)
    other = tmp_path / "patterns"
    run_ranks(runner.save_adapter, 1, make_plan(1, tmp_path, *PATTERNS), world.base, other)
    weights = {world.adapter: 0.7, other: -0.4}
    (theirs,) = run_ranks(_weighted_sum, 1, world.base, weights)
    status, ours = merge("sum", *(f"{path}={weight}" for path, weight in weights.items()))
    assert status == 0 and all(distance(tensor, theirs[name]) <= 1e-6 for name, tensor in ours.items())
    card = (tmp_path / "sum/README.md").read_text()
    assert "| Adapters | 0.7 · adapter, -0.4 · patterns |" in card and "# base, with adapters" in card
    base = load_file(world.base / "model.safetensors")
    assert (
        ours.keys() == base.keys()
        and distance(ours["model.layers.0.mlp.down_proj.weight"], base["model.layers.0.mlp.down_proj.weight"]) > 1e-3
    )

    run = tmp_path / "dora"
    tune(1, run, *world.fresh, "finetune.use_dora=true", "finetune.modules_to_save=[norm]", steps=2)
    alone = [merge("run", run)[1], merge("plain", trained)[1]]
    assert all(torch.equal(tensor, alone[1][name]) for name, tensor in _merged(trained, tmp_path / "merged").items())
    _, ours = merge("both", f"{run}=0.5", f"{trained}=2")
    for name, tensor in ours.items():
        changes = [one[name].double() - base[name] for one in alone]
        assert distance(tensor, base[name] + 0.5 * changes[0] + 2 * changes[1]) <= 1e-6

    full = tmp_path / "full"
    tune(1, full, "finetune=full", f"init_from={world.base}", steps=0)
    changed = tmp_path / "changed"
    tune(1, changed, *world.fresh, "model.sliding_window=4", steps=0)
    missing = "name a LoRA run or a PEFT folder"
    for adapter, message in ((full, "has no LoRA adapter"), (changed, "sliding_window"), (tmp_path / "x", missing)):
        assert merge("refused", adapter) == (2, {}) and message in capsys.readouterr().err
    for adapters in ((f"{other}=half",), (f"{other}=1e300",), (other, other, "--merge")):
        with pytest.raises(SystemExit, match="2"):
            merge("refused", *adapters)


@pytest.mark.parametrize("tied", [False, True])
def test_a_weighted_sum_with_new_tokens(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The base grows; the sum is of peft's merges. peft itself does not add adapters with modules_to_save."""
    base, grown = make_bases(tmp_path, tied)
    kinds = {"old": (base, []), "rows": (grown, BY_ROWS[tied]), "full": (grown, IN_FULL[tied])}
    for name, (start, kind) in kinds.items():
        size = [f"model.vocab_size={OLD if start == base else ROWS}", *([TIED] if tied else [])]
        run_ranks(runner.save_adapter, 1, plan := make_plan(1, tmp_path, *LORA, *kind, *size), start, tmp_path / name)
    merge = partial(merge_adapters, monkeypatch, base, tmp_path)
    assert merge("no", tmp_path / "full") == (2, {}) and "copy its tokenizer.json" in capsys.readouterr().err
    shutil.copytree(tmp_path / "full", tmp_path / "others")
    for name, tokens in (("full", TOKENS), ("rows", TOKENS), ("others", ["a", "b", "c"])):
        (tmp_path / name / "tokenizer.json").write_bytes(NewTokens(tuple(tokens)).grow(base / "tokenizer.json"))
    assert merge("no", tmp_path / "full", tmp_path / "others") == (2, {})
    assert "has other new tokens than the adapter in" in " ".join(capsys.readouterr().err.split())
    tune(1, tmp_path / "run", "finetune=lora", f"init_from={base}", *GROWN, *kind, *size[1:], steps=0)
    assert merge("no", tmp_path / "run") == (2, {}) and "is a run with new tokens" in capsys.readouterr().err
    weights = {"full": 0.5, "old": 2, "rows": -1}
    status, ours = merge("sum", *(f"{tmp_path / name}={weight}" for name, weight in weights.items()))
    old = load_file(grown / "model.safetensors")
    assert status == 0 and ours.keys() == old.keys()
    theirs = {name: run_ranks(their_logits, 1, plan, grown, tmp_path / name)[0][1] for name in weights}
    for name, tensor in ours.items():
        change = sum(weight * (theirs[of][name].double() - old[name]) for of, weight in weights.items())
        assert distance(tensor, old[name] + change) <= 1e-6, name
    assert (tmp_path / "sum/tokenizer.json").read_bytes() == (tmp_path / "rows/tokenizer.json").read_bytes()


def _merged(run: Path, out: Path) -> Tensors:
    return load_file(export(find_checkpoint(run), out, merge=True).folder / "model.safetensors")


def _weighted_sum(rank: int, base: Path, weights: dict[Path, float]) -> Tensors:
    """Return the weights that peft merges from its concatenated adapters."""
    import peft

    first, *others = weights
    model = peft.PeftModel.from_pretrained(runner.their_base(base), first, adapter_name=str(first.name))
    for other in others:
        model.load_adapter(other, adapter_name=other.name)
    model.add_weighted_adapter([path.name for path in weights], list(weights.values()), "sum", combination_type="cat")
    model.set_adapter("sum")
    return dict(model.merge_and_unload(adapter_names=["sum"]).state_dict())


def _with(adapter: Path, folder: Path, **settings: Any) -> Path:
    folder.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    (folder / ADAPTER_WEIGHTS).write_bytes((adapter / ADAPTER_WEIGHTS).read_bytes())
    return folder


def test_adapter_configs(world: World, tmp_path: Path) -> None:
    page = ""
    for number, settings in enumerate(GoldenFiles.commands("finetuning/adapters.txt")):
        folder = _with(world.adapter, tmp_path / str(number), **json.loads(settings))
        try:
            make_plan(1, tmp_path, *_adapter_start(folder, world.base))
            answer = "accepted"
        except ConfigError as error:
            answer = "\n".join(f"{one.rule}\n    {one.instead}" for one in error.problems)
        page += f"$ {settings}\n{answer}\n"
    GoldenFiles.check("finetuning/adapters.txt", page, {rf"{tmp_path}/\d+": "ADAPTER", str(world.base): "BASE"})


def test_full_module_names_are_projections(world: World, tmp_path: Path) -> None:
    """peft writes full names for all-linear in models of one or two layers."""
    config = json.loads((world.adapter / "adapter_config.json").read_text())
    parts = {name: "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn" for name in EVERY}
    full = [f"model.layers.{layer}.{part}.{name}" for name, part in parts.items() for layer in (0, 1)]
    assert sorted(config["target_modules"]) == sorted(EVERY)
    folder = _with(world.adapter, tmp_path / "full", target_modules=full)
    chosen = ["finetune=lora", f"finetune.adapter={folder}", f"init_from={world.base}"]
    assert make_plan(1, tmp_path, *chosen).config.finetune.lora_target_modules == sorted(EVERY)
    (tmp_path / "some").mkdir()
    folder = _with(world.adapter, tmp_path / "some" / "adapter", target_modules=full[1:])
    chosen = ["finetune=lora", f"finetune.adapter={folder}", f"init_from={world.base}"]
    assert make_plan(1, tmp_path, *chosen).config.finetune.lora_target_modules == sorted(full[1:])


@pytest.mark.parametrize(
    "change", ["model.rope_scaling={rope_type: linear, factor: 4}", "model.sliding_window=4"], ids=["rope", "window"]
)
def test_an_adapter_of_a_changed_base_is_not_exported(change: str, world: World, tmp_path: Path) -> None:
    """The adapter would be another model on its base; the merged model has the change in its config.json."""
    changed = make_plan(1, tmp_path / "run", *world.fresh, change)
    tune(1, tmp_path / "run", *world.fresh, change, steps=1)
    with raises_with_message(ConfigError, f"was trained with {change.partition('=')[0]}=.*add --merge"):
        export(find_checkpoint(tmp_path / "run"), tmp_path / "adapter")
    export(find_checkpoint(tmp_path / "run"), tmp_path / "merged", merge=True)
    (ours,) = run_ranks(our_logits, 1, changed)
    (theirs, _) = run_ranks(their_logits, 1, world.plan, tmp_path / "merged", None)[0]
    assert distance(ours, theirs) <= 1e-5


def test_an_adapter_sets_rank_and_modules_of_its_model(world: World, tmp_path: Path) -> None:
    finetune = make_plan(1, tmp_path, *world.lora).config.finetune
    assert (finetune.lora_rank, finetune.lora_alpha, len(finetune.lora_target_modules)) == (4, 12.5, 7)
    with raises_with_message(ConfigError, r"is set by the adapter in \S+: 4"):
        make_plan(1, tmp_path, *world.lora, "finetune.lora_rank=8")
    with raises_with_message(ConfigError, "No such file"):
        make_plan(1, tmp_path, *_adapter_start(tmp_path, world.base))
    folder = _with(world.adapter, tmp_path / "other")
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    name = next(iter(tensors))
    save_file(tensors | {name: torch.zeros(4, 5)}, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    with raises_with_message(RankFailed, "ConfigError.*has shape .4, 5.; this run expects"):
        tune(1, tmp_path, *_adapter_start(folder, world.base), steps=0)
