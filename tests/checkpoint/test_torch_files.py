"""Checkpoints of Meta, litgpt and DeepSpeed, written here in their layouts from transformers' weights."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml

from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.foreign.describe import describe
from megatron_llama.checkpoint.foreign.detect import open_foreign
from megatron_llama.checkpoint.tensor_source import CorruptFile
from megatron_llama.config import ConfigError
from tests.checkpoint.runner import make_plan, rejection, run
from tests.checkpoint.source_settings import BATCH, BETAS, DECAY, EPS, LR
from tests.checkpoint.torch_sources import SETTINGS, llama, titan_name, titan_rows
from tests.golden import GoldenFiles
from tests.messages import raises_with_message

State = dict[str, torch.Tensor]
HEADS, KV, DIM, HEAD = 4, 2, 32, 8


def _weights(**changes: Any) -> State:
    pytest.importorskip("transformers", reason="transformers is a dev dependency: the model of these sources")
    return {name: tensor.detach().clone() for name, tensor in llama(**changes).state_dict().items()}


def write_meta(folder: Path, weights: State, ranks: int = 2, *, by_rows: bool = True, **params: Any) -> None:
    """Write params.json and consolidated.*.pth. The embedding is split by rows (Llama 3) or columns (before)."""
    files: list[State] = [{"rope.freqs": torch.ones(4)} for _ in range(ranks)]
    for name, tensor in weights.items():
        key, values = titan_name(name), titan_rows(name, tensor)  # torchtitan has Meta's names
        columns = key.endswith((".wo.weight", ".w2.weight")) or (key.startswith("tok_embeddings") and not by_rows)
        parts = [values] * ranks if values.dim() == 1 else values.chunk(ranks, 1 if columns else 0)
        for file, part in zip(files, parts, strict=True):
            file[key] = part.clone()
    content = {"dim": DIM, "n_layers": 4, "n_heads": HEADS, "n_kv_heads": KV, "vocab_size": 64, "multiple_of": 32}
    content |= {"norm_eps": 1e-5, "rope_theta": 10000.0, **params}
    folder.mkdir(parents=True)
    (folder / "params.json").write_text(json.dumps(content))
    for rank, file in enumerate(files):
        torch.save(file, folder / f"consolidated.{rank:02d}.pth")


def write_litgpt(folder: Path, weights: State, *, interleaved: bool = False, **config: Any) -> None:
    """Write lit_model.pth and model_config.yaml. Until 2024 q, k and v were interleaved by groups."""
    names = {"self_attn.o_proj": "attn.proj", "mlp.gate_proj": "mlp.fc_1", "mlp.up_proj": "mlp.fc_2"}
    names |= {"mlp.down_proj": "mlp.proj", "input_layernorm": "norm_1", "post_attention_layernorm": "norm_2"}
    state = {"transformer.wte.weight": torch.cat([weights["model.embed_tokens.weight"], torch.zeros(8, DIM)])}
    state |= {"lm_head.weight": torch.cat([weights["lm_head.weight"], torch.zeros(8, DIM)])}
    state |= {"transformer.ln_f.weight": weights["model.norm.weight"]}
    for number in range(4):
        base = f"model.layers.{number}."
        for theirs, ours in names.items():
            state[f"transformer.h.{number}.{ours}.weight"] = weights[f"{base}{theirs}.weight"]
        q, k, v = (weights[f"{base}self_attn.{name}_proj.weight"] for name in "qkv")
        if interleaved:
            groups = [t.view(KV, -1, DIM) for t in (q, k, v)]
            state[f"transformer.h.{number}.attn.attn.weight"] = torch.cat(groups, 1).reshape(-1, DIM)
        else:
            state[f"transformer.h.{number}.attn.qkv.weight"] = torch.cat([q, k, v])
    content = {"name": "x", "n_layer": 4, "n_embd": DIM, "n_head": HEADS, "n_query_groups": KV, "head_size": HEAD}
    content |= {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "rotary_percentage": 1.0, "bias": False}
    content |= {"parallel_residual": False, "padded_vocab_size": 72, "padding_multiple": 72, "rope_base": 10000}
    content |= {"norm_eps": 1e-5, "intermediate_size": 64, "rope_condense_ratio": 1, "lm_head_bias": False, **config}
    folder.mkdir(parents=True)
    torch.save(state, folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(content))


class _LossScaler:
    """Stands for a class of DeepSpeed, which is not installed."""


def _moment(kind: str, weights: State) -> State:
    generator = torch.Generator().manual_seed(len(kind))
    return {name: torch.rand(tensor.shape, generator=generator) for name, tensor in weights.items()}


def write_deepspeed(folder: Path, weights: State, stage: int, ranks: int = 3, scaler: Any = _LossScaler) -> None:
    """Write the files of ZeRO's ranks: flat groups in stages 1 and 2, and partitions of each parameter in stage 3."""
    step = folder / "global_step3"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    groups = [[n for n, t in weights.items() if t.dim() == dims] for dims in (2, 1)]
    states = {"fp32": weights, **{kind: _moment(kind, weights) for kind in ("exp_avg", "exp_avg_sq")}}
    options = [{"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": decay, "params": [0]} for decay in (DECAY, 0.0)]
    shapes = [{name: weights[name].shape for name in group} for group in groups]
    model = {"module": {}, "param_shapes": shapes, "buffer_names": [], "shared_params": {}, "global_steps": 3}
    model["skipped_steps"] = 1
    model |= {"global_samples": 3 * BATCH, "ds_config": {"train_batch_size": BATCH, "gradient_clipping": "auto"}}
    for rank in range(ranks):
        flat = {kind: [_flat(state, group, stage, rank, ranks) for group in groups] for kind, state in states.items()}
        inner = [{kind: flat[kind][at] for kind in flat if kind != "fp32"} | {"step": 3} for at in range(2)]
        base: Any = {"state": dict(enumerate(inner)), "param_groups": options}
        optimizer = {"loss_scaler": scaler(), "partition_count": ranks, "zero_stage": stage}
        if stage == 3:
            for vector in flat["fp32"]:
                vector.ds_id = [0]  # type: ignore[attr-defined]  # as stage3.py does
            optimizer |= {"optimizer_state_dict": base, "fp32_flat_groups": flat["fp32"]}
        else:
            lean = [
                each[: _unpadded(weights, group, rank, ranks)] for each, group in zip(flat["fp32"], groups, strict=True)
            ]
            optimizer |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": lean}
        with pytest.MonkeyPatch.context() as patch:
            for module in ("deepspeed", "deepspeed.scaler"):
                patch.setitem(sys.modules, module, types.ModuleType(module))
            patch.setattr(sys.modules["deepspeed.scaler"], "_LossScaler", _LossScaler, raising=False)
            patch.setattr(_LossScaler, "__module__", "deepspeed.scaler")
            torch.save({"optimizer_state_dict": optimizer}, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        torch.save(model, step / f"{name}_model_states.pt")


def _unpadded(weights: State, group: list[str], rank: int, ranks: int) -> int:
    values = sum(weights[name].numel() for name in group)
    each = math.ceil(values / (2 * ranks)) * 2
    return max(0, min(each, values - rank * each))


def _flat(state: State, group: list[str], stage: int, rank: int, ranks: int) -> torch.Tensor:
    if stage == 3:
        return torch.cat([_part(state[name].flatten(), rank, ranks, 1) for name in group])
    return _part(torch.cat([state[name].flatten() for name in group]), rank, ranks, 2).clone()


def _part(values: torch.Tensor, rank: int, ranks: int, align: int) -> torch.Tensor:
    each = math.ceil(values.numel() / (align * ranks)) * align
    return torch.nn.functional.pad(values, (0, each * ranks - values.numel()))[rank * each : (rank + 1) * each]


def write_universal(folder: Path, weights: State) -> None:
    """Write DeepSpeed's universal layout: a folder for each tensor."""
    write_deepspeed(folder, weights, 1)
    step = folder / "global_step3"
    for path in step.glob("*optim_states.pt"):
        path.unlink()
    for kind, state in {"fp32": weights, **{k: _moment(k, weights) for k in ("exp_avg", "exp_avg_sq")}}.items():
        for name, tensor in state.items():
            (step / "zero" / name).mkdir(parents=True, exist_ok=True)
            torch.save({"param": tensor.clone(), "cat_dim": 0}, step / "zero" / name / f"{kind}.pt")


WRITERS: dict[str, Callable[[Path, State], None]] = {
    "meta": write_meta,
    "meta, one file": lambda folder, weights: write_meta(folder, weights, 1),
    "meta, columns": lambda folder, weights: write_meta(folder, weights, by_rows=False),
    "litgpt": write_litgpt,
    "litgpt, 2023": lambda folder, weights: write_litgpt(folder, weights, interleaved=True),
    "zero 2": lambda folder, weights: write_deepspeed(folder, weights, 2),
    "zero 3": lambda folder, weights: write_deepspeed(folder, weights, 3),
    "universal": write_universal,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_each_tensor_is_the_sources(kind: str, tmp_path: Path) -> None:
    """Weights, and DeepSpeed's moments, are bitwise equal to the source; inspect_checkpoint.py counts them."""
    weights = _weights()
    WRITERS[kind](tmp_path / "source", weights)
    foreign = open_foreign(tmp_path / "source", make_plan(1, tmp_path, *SETTINGS).model)
    expected = dict(weights)
    if foreign.format == "deepspeed":
        for name in ("exp_avg", "exp_avg_sq"):
            expected |= {f"optimizer/{name}.{key}": tensor for key, tensor in _moment(name, weights).items()}
    read = {name: foreign.tensors.rows(name) for name in foreign.tensors.tensors}
    assert len(read) == len(expected)
    for name, tensor in expected.items():
        match = next(key for key in read if key.endswith(name.replace("optimizer/", "")))
        assert torch.equal(read[match], tensor), name
    rows = dict(describe(tmp_path / "source").rows)
    assert f"{31 if kind.startswith('litgpt') else 39} tensors" in rows["weights"] and rows["layers"] == "4"
    assert ("optimizer" in rows) == (foreign.format == "deepspeed")
    with raises_with_message(ConfigError, "checkpoint.*convert it"):
        find_checkpoint(tmp_path / "source")


@pytest.mark.parametrize("kind", ["zero 2", pytest.param("zero 3", marks=pytest.mark.slow)])
def test_a_run_resumes_from_deepspeed(kind: str, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path / "source", _weights())
    ours = run(2, tmp_path / "run", *SETTINGS, "trainer.dp=2", f"checkpoint.resume={tmp_path / 'source'}", until=4)
    assert ours.started_at == 3 and ours.updates == 3  # one of DeepSpeed's steps was skipped
    optimizer = {"type": "Adam", "params": {"adam_w_mode": False}}
    _edit(tmp_path / "source", "*model_states*", lambda c: c["ds_config"].update(optimizer=optimizer))
    assert open_foreign(tmp_path / "source", make_plan(1, tmp_path, *SETTINGS).model).facts["optim.name"] == "adam"


@pytest.mark.parametrize("stage", range(4))
def test_weights_that_zero_does_not_shard(stage: int, tmp_path: Path) -> None:
    """Stage 0 has no partitions. A frozen embedding is whole in stages 1 and 2, and divided by ranks in stage 3."""
    weights, source, frozen = _weights(), tmp_path / "source", "model.embed_tokens.weight"
    write_deepspeed(source, {n: t for n, t in weights.items() if n != frozen or not stage}, stage, 11)
    for path in source.rglob("*model_states*"):
        content, rank = torch.load(path, weights_only=False), int(path.name.split("_")[3]) if stage == 3 else 0
        fragments = {frozen: _part(weights[frozen].flatten(), rank, 11, 1).clone()}
        content["module"] = {name: torch.empty(0) for name in weights} if stage == 3 else weights
        content |= {"frozen_param_shapes": {frozen: weights[frozen].shape}} if stage > 1 else {}
        content |= {"frozen_param_fragments": fragments} if stage == 3 else {}
        torch.save(content | ({} if stage else {"optimizer": {"state": {}}}), path)
    tensors = open_foreign(source, make_plan(1, tmp_path, *SETTINGS).model).tensors
    assert all(torch.equal(tensors.rows(name), tensor) for name, tensor in weights.items())


def test_settings_that_change_the_model(tmp_path: Path) -> None:
    page, model = "", make_plan(1, tmp_path, *SETTINGS).model
    for number, line in enumerate(GoldenFiles.commands("checkpoint/meta_and_litgpt.txt")):
        program, settings = line.split(maxsplit=1)
        writer = {"meta": write_meta, "litgpt": write_litgpt}[program]
        writer(tmp_path / str(number), _weights(), **json.loads(settings))
        page += f"$ {line}\n{rejection(tmp_path / str(number), model, resumes=False, reads=False)}\n"
    GoldenFiles.check("checkpoint/meta_and_litgpt.txt", page, {rf"{tmp_path}/\d": "FOLDER"})


def _save_dcp(folder: Path, weights: State) -> None:
    dcp.save(weights, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("writer", [write_meta, write_litgpt, _save_dcp])
def test_a_tied_model_has_one_head(writer: Callable[[Path, State], None], tmp_path: Path) -> None:
    """A head that equals the embedding is ignored; another one is rejected, as in a Hugging Face folder."""
    model, weights = make_plan(1, tmp_path, *SETTINGS, "model.tie_word_embeddings=true").model, _weights()
    writer(tmp_path / "tied", weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    assert len(open_foreign(tmp_path / "tied", model).tensors.tensors) == len(weights) - 1
    if path := next((tmp_path / "tied").glob("lit_model.pth"), None):  # saved as one storage, as litgpt ties it
        stored = torch.load(path)
        torch.save(stored | {"lm_head.weight": stored["transformer.wte.weight"]}, path)
        assert len(open_foreign(tmp_path / "tied", model).tensors.tensors) == len(weights) - 1
    writer(tmp_path / "source", weights)
    with pytest.raises(ConfigError, match=r"write model\.tie_word_embeddings=false"):
        open_foreign(tmp_path / "source", model)


def _edit(folder: Path, pattern: str, change: Callable[[Any], Any]) -> None:
    path = min(folder.rglob(pattern))
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


ODD: tuple[Any, ...] = (3, -1, 1.5, "x", None, [], {}, [None], {"a": 3}, torch.ones(2), torch.ones(2, 2))


@pytest.mark.parametrize("kind", ["meta", "litgpt", "zero 2", "zero 3", "universal"])
def test_odd_values_end_with_a_message(kind: str, tmp_path: Path) -> None:
    """Each value in the outer two levels of a file is replaced, for DeepSpeed also inside the optimizer's state."""
    source = tmp_path / "source"
    if kind.startswith("zero"):
        write_deepspeed(source, _weights(), int(kind[-1]), ranks=1, scaler=dict)
    else:
        WRITERS[kind](source, _weights())
    model, files = make_plan(1, tmp_path, *SETTINGS).model, sorted(source.rglob("*.pt*"))[:3]
    paths = [*files, *source.glob("params.json"), *source.glob("*.yaml")]
    for number, path in enumerate(paths):
        before, is_text = path.read_bytes(), path.suffix in (".json", ".yaml")
        content = yaml.safe_load(before) if is_text else torch.load(path, weights_only=False)
        for keys in _keys(content):
            where = content
            for key in keys[:-1]:
                where = where[key]
            value, odd = where[keys[-1]], ODD[(number + len(str(keys))) % len(ODD)]
            where[keys[-1]] = None if is_text and isinstance(odd, torch.Tensor) else odd
            path.write_text(json.dumps(content)) if is_text else torch.save(content, path)
            where[keys[-1]] = value
            for read in (describe, lambda folder: open_foreign(folder, model, resumes=True)):
                with contextlib.suppress(CorruptFile, ConfigError):
                    read(source)
        path.write_bytes(before)


def _keys(content: Any, depth: int = 4) -> Iterator[tuple[Any, ...]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in [*items][:12]:
        yield (key,)
        yield from ((key, *inner) for inner in (_keys(value, depth - 1) if depth else ()))


def _changed(pattern: str, values: dict[str, Any]) -> Callable[[Path], None]:
    return lambda folder: _edit(folder, pattern, lambda content: content.update(values))


def _changed_groups(change: Callable[[list[torch.Tensor]], None]) -> Callable[[Path], None]:
    return lambda f: _edit(f, "*_0_*optim*", lambda c: change(c["optimizer_state_dict"]["fp32_flat_groups"]))


LONG = {"frozen_param_shapes": {"a": (3,)}, "frozen_param_fragments": {"a": torch.ones(5)}}
DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "meta, a file is missing": ("meta", lambda f: (f / "consolidated.00.pth").unlink(), "are missing"),
    "meta, other shapes": ("meta", _changed("*00.pth", {"norm.weight": torch.ones(3)}), "shape"),
    "zero, a rank is missing": ("zero 2", lambda f: min(f.rglob("*optim*")).unlink(), "2 of"),
    "zero, a short partition": ("zero 3", _changed_groups(lambda g: g.__setitem__(0, torch.ones(5))), "values"),
    "zero, no partition": ("zero 3", _changed_groups(lambda g: g.clear()), "is no list of flat partitions"),
    "zero, code": ("zero 2", _changed("*optim*", {"x": print}), "can execute code"),
    "zero, no shapes": ("zero 2", _changed("*model_states*", {"param_shapes": [{"a": "b"}]}), ""),
    "zero, huge": ("zero 2", _changed("*model_states*", {"param_shapes": [{"a": (10**12,)}]}), ""),
    "zero, attributes": ("zero 3", _changed_groups(lambda g: setattr(g[0], "data_ptr_", 5)), "unknown attributes"),
    "zero, a long fragment": ("zero 3", _changed("*_0_*model*", LONG), "a of 3 values has fragments of [5]"),
    "universal, no tensor": ("universal", lambda f: torch.save([1], min(f.rglob("fp32.pt"))), "contains no tensor"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_ends_with_a_message(name: str, tmp_path: Path) -> None:
    kind, damage, words = DAMAGE[name]
    if kind.startswith("zero"):
        write_deepspeed(tmp_path / "source", _weights(), int(kind[-1]), scaler=dict)
    else:
        WRITERS[kind](tmp_path / "source", _weights())
    damage(tmp_path / "source")
    message = rejection(tmp_path / "source", make_plan(1, tmp_path, *SETTINGS).model, resumes=False, reads=False)
    assert message and words in message
