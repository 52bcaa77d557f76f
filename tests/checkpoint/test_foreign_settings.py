"""Settings in other programs' checkpoints: each key is converted, compared, without effect here, or rejected."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from megatron.core.transformer import TransformerConfig
from safetensors.torch import save_file

from megatron_llama.arch.foreign_tensor_layouts import megatron_names, torchtitan_names
from megatron_llama.arch.hf_tp_mapping import hf_shapes
from megatron_llama.checkpoint.foreign.detect import open_foreign, resumed_state
from megatron_llama.checkpoint.foreign.source_settings import read_arguments
from megatron_llama.checkpoint.foreign.tensors import Foreign
from megatron_llama.checkpoint.foreign.torch_folders import naming
from megatron_llama.config import ConfigError
from tests.checkpoint.runner import make_plan, rejection, run
from tests.checkpoint.source_settings import BETAS, DECAY, EPS, LR, SETTINGS, UNTIED, our_model
from tests.golden import GoldenFiles
from tests.messages import unwrap

LLAMA3 = "model.rope_scaling={rope_type: llama3, factor: 8.0}"
LINEAR = "model.rope_scaling={rope_type: linear, factor: 4.0}"
PLAIN = {"rotary_base": 10000, "norm_epsilon": 1e-5, "swiglu": True, "normalization": "RMSNorm", "num_layers": 4}
"""Arguments of the model of ``make_plan``."""


def megatron_folder(folder: Path, settings: tuple[str, ...], arguments: Mapping[str, Any] | None) -> Path:
    """Write a torch_dist folder of random weights."""
    shapes = megatron_names(our_model(*settings), stacked=True).shapes
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    args = {} if arguments is None else {"args": argparse.Namespace(**arguments)}
    torch.save({"iteration": 3, **args}, folder / "common.pt")
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return megatron_folder(tmp_path_factory.mktemp("source") / "weights", (), None)


def _write(folder: Path, form: str, arguments: Mapping[str, Any]) -> None:
    """Write Megatron's arguments as Megatron-LM, Megatron-Bridge or NeMo 2."""
    for path in (folder / "run_config.yaml", folder.parent / "context/model.yaml"):
        path.unlink(missing_ok=True)
    content = {"iteration": 3, **({"args": argparse.Namespace(**arguments)} if form == "args" else {})}
    torch.save(content, folder / "common.pt")
    if form == "bridge":
        (folder / "run_config.yaml").write_text(yaml.safe_dump({"model": dict(arguments)}))
    elif form == "nemo":
        (folder.parent / "context").mkdir(exist_ok=True)
        (folder.parent / "context/model.yaml").write_text(yaml.safe_dump({"config": dict(arguments)}))


TABLE = Path(__file__).with_name("settings.txt")


def test_settings_that_change_the_model(plain: Path) -> None:
    """Each line of the table as Megatron-LM, Megatron-Bridge and NeMo 2 write it: accepted, or one message."""
    page = ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("#"):
            page += f"{line}\n"
            continue
        text, _, setting = line.partition(" | ")
        changes = yaml.safe_load(text)
        model = our_model(*filter(None, [{"LLAMA3": LLAMA3, "LINEAR": LINEAR}.get(setting, setting)]))
        answers = {}
        for form in ("args", "bridge", "nemo"):
            typed = {key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()}
            _write(plain, form, PLAIN | (typed if form == "args" else changes))
            answers[rejection(plain, model, resumes=False, reads=False).replace(str(plain), "FOLDER")] = form
        page += "".join([f"{line}\n", *(f"    {answer or 'accepted'}\n" for answer in answers)])
    GoldenFiles.check("checkpoint/settings.txt", page)


def test_a_context_may_be_extended_by_a_new_run_only(plain: Path) -> None:
    _write(plain, "args", PLAIN)
    assert not rejection(plain, our_model(LINEAR), resumes=False, reads=False)
    assert "model.rope_scaling" in rejection(plain, our_model(LINEAR), resumes=True, reads=False)


def test_each_key_of_megatron_core_is_listed() -> None:
    """Switches of other models are not listed: they are rejected when they are on."""
    unlisted = []
    for field in fields(TransformerConfig):
        read_arguments(source := Foreign("", Path()), {field.name: "on"})
        unlisted += [field.name for problem in source.problems if "is unknown here" in problem.rule]
    assert unlisted == ["is_hybrid_model"]


RESETS = "reset_position_ids", "reset_attention_mask"


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (dict.fromkeys(RESETS, True), {"data.document_mask": True}),
        (dict.fromkeys(RESETS, False), {"data.document_mask": False}),
        ({RESETS[0]: True, RESETS[1]: False}, {}),  # reported as a change
        ({"min_lr": 1e-5, "clip_grad": 0.0}, {"optim.min_lr": 1e-5, "optim.clip": None}),
        ({"min_lr": 1e-5, "lr_decay_style": "constant"}, {}),
    ],
)
def test_settings_of_the_training(arguments: dict[str, Any], facts: dict[str, Any]) -> None:
    read_arguments(source := Foreign("", Path()), arguments)
    assert source.facts == facts and len(source.changes) == 2 * (not facts and RESETS[0] in arguments)


def test_only_padding_is_omitted(tmp_path: Path) -> None:
    """A line has the rows of the embedding, the model's vocabulary, and further arguments of Megatron."""
    page = ""
    for number, line in enumerate(GoldenFiles.commands("checkpoint/padding.txt")):
        rows, size, arguments = line.split(maxsplit=2)
        source = tmp_path / str(number)
        megatron_folder(source, (f"model.vocab_size={rows}",), PLAIN | json.loads(arguments))
        answer = rejection(source, our_model(f"model.vocab_size={size}"), resumes=False, reads=False)
        page += f"$ {line}\n{answer.replace(str(source), 'FOLDER') or 'accepted'}\n"
    GoldenFiles.check("checkpoint/padding.txt", page)


@pytest.mark.parametrize("prefix", ["model.", "module.", "model.module."])
def test_moments_may_lack_the_prefix_of_weights(prefix: str) -> None:
    plain = [*hf_shapes(our_model())]
    _, shortest, _ = naming(Path(), {prefix + name for name in plain})
    source = Foreign("", Path(), states="optimizer.state.{name}.{kind}", prefix=shortest)
    names = [source.state_of("exp_avg", prefix + name) for name in plain]
    assert names == [f"optimizer.state.{name}.exp_avg" for name in plain]


def test_tensors_that_the_model_lacks_are_rejected(tmp_path: Path) -> None:
    folder = megatron_folder(tmp_path / "source", ("model.model_type=qwen2",), PLAIN)
    assert "linear_qkv.bias, which this model lacks" in rejection(folder, our_model(), resumes=False, reads=False)


def _torch_folder(kind: str, folder: Path, settings: tuple[str, ...] = (), **group: Any) -> Path:
    """Write torchtitan's or the Trainer's folder of random weights and moments of one."""
    model = our_model(*settings)
    shapes = torchtitan_names(model).shapes if kind == "torchtitan" else hf_shapes(model)
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    names = sorted(weights, key=lambda name: weights[name].dim() != 2)
    state: dict[str, Any] = {"step": torch.tensor(3.0), "exp_avg": 1.0, "exp_avg_sq": 1.0}
    states = {n: {k: torch.full_like(weights[n], v) if k != "step" else v for k, v in state.items()} for n in names}
    group = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "amsgrad": False, **group}
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "torchtitan":
        flat: dict[str, Any] = {f"state.{name}.{key}": v for name in names for key, v in states[name].items()}
        decays = {name: group["weight_decay"] if weights[name].dim() == 2 else 0.0 for name in names}
        flat |= {f"param_groups.{n}.{k}": v for n in names for k, v in (group | {"weight_decay": decays[n]}).items()}
        saved = {**weights, "optimizer": flat, "train_state": {"step": torch.tensor(3)}}
        dcp.save(saved, checkpoint_id=folder, no_dist=True)
        return folder
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    numbered = {number: states[name] for number, name in enumerate(names)}
    torch.save({"state": numbered, "param_groups": [{"params": [*numbered], **group}]}, folder / "optimizer.pt")
    return folder


@pytest.mark.parametrize("kind", ["torchtitan", "trainer"])
def test_config_json_is_compared(kind: str, tmp_path: Path) -> None:
    """checkpoint.resume compares it as init_from does."""
    folder, model, page = _torch_folder(kind, tmp_path / "source"), our_model(), ""
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads rms_norm_eps rope_theta"
    content = {name: getattr(model, name) for name in [*names.split(), "num_key_value_heads"]}
    for line in GoldenFiles.commands("checkpoint/config_json.txt"):
        (folder / "config.json").write_text(json.dumps(content | json.loads(line)))
        answer = rejection(folder, model, resumes=True, reads=False).replace(str(folder), "FOLDER")
        page += f"$ {line}\n{answer or 'accepted'}\n"
    GoldenFiles.check("checkpoint/config_json.txt", page)


@pytest.mark.parametrize("kind", ["torchtitan", "trainer"])
def test_hyperparameters_are_compared(kind: str, tmp_path: Path) -> None:
    """A line has the changed hyperparameters of the source's optimizer."""
    plan, page = make_plan(1, tmp_path / "run", UNTIED, *SETTINGS, f"optim.betas=[{BETAS[0]},{BETAS[1]}]"), ""
    for number, line in enumerate(GoldenFiles.commands("checkpoint/hyperparameters.txt")):
        source = _torch_folder(kind, tmp_path / str(number), **json.loads(line))
        foreign, answer = open_foreign(source, plan.model, resumes=True), "accepted"
        assert foreign.lr == pytest.approx(LR)
        try:
            resumed_state(plan, foreign, {"segments": []})
        except ConfigError as error:
            answer = unwrap(str(error)).replace(str(source), "FOLDER")
        page += f"$ {line}\n{answer}\n"
    GoldenFiles.check("checkpoint/hyperparameters.txt", page)


def test_another_learning_rate_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By the sentence that resumes of this program's checkpoints print."""
    folder = _torch_folder("torchtitan", tmp_path / "source", lr=0.001)
    run(1, tmp_path / "run", UNTIED, *SETTINGS, f"checkpoint.resume={folder}", until=4)
    assert f"the learning rate of step 4 is {LR}, not 0.001\n" in capfd.readouterr().err
