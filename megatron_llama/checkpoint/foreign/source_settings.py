"""Settings in other programs' checkpoints: each key is compared, required to have one value, or has no effect here.

Tensors show the shape of a model only. The rotation, the epsilon of its norms and the form of its activation are in
Megatron-LM's ``args``, in Megatron-Bridge's ``run_config.yaml``, in NeMo 2's ``context/model.yaml``, or in Hugging
Face's ``config.json``. A key that is in no table below may change the model, so a value other than "off" is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_llama.arch.parameters import head_dim, kv_heads
from megatron_llama.checkpoint.foreign.tensors import Foreign
from megatron_llama.checkpoint.tensor_source import CorruptFile
from megatron_llama.config import ConfigError, ModelConfig, Problem
from megatron_llama.config.hf_config import CONFIG, read_hf_config, shape_from_hf, unsupported_architecture
from megatron_llama.config.problems import format_value, shorten, show_value
from megatron_llama.config.rope import EXTENSIONS, LLAMA3_CONTEXT, equal_values, is_number, original_context, same_rope
from megatron_llama.system.files import check_yaml, read_whole

MODEL = "model."
TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("settings.yaml").read_text(encoding="utf-8"))
_COMPARED: dict[str, str] = TABLES["compared"]
_CONVERTED = TABLES["converted"].split()
_REQUIRED = {name: (allowed, rule) for names, allowed, rule in TABLES["required"] for name in names.split()}
_TRAINING: dict[str, Any] = TABLES["training"] | dict.fromkeys(TABLES["training_off"].split())
_NO_EFFECT = TABLES["no_effect"].split()
_RUN_CONFIG = "run_config.yaml"
_SECTIONS: dict[str, dict[str, str]] = {
    "model": {},
    "optimizer": {},
    "train": {},
    "scheduler": {},
    "dataset": {"random_seed": "seed", "sequence_length": "seq_length"},
}
"""Sections of run_config.yaml that are read, with keys that Megatron-LM names differently."""
_READ = {*_COMPARED, *_TRAINING, *_CONVERTED, "train_samples", "consumed_train_samples", "lr_decay_style"}
"""Keys that are read from all of these sections; every key of ``model`` is read."""
_GROUP_ONLY = {"amsgrad": False, "maximize": False, "bias_correction": True, "adam_w_mode": True}
"""Keys of a parameter group, with their value here."""
_GROUP_NO_EFFECT = (
    "params param_names lr initial_lr max_lr min_lr betas eps weight_decay decoupled_weight_decay step foreach fused "
    "capturable differentiable *_mult is_* default_config start_wd end_wd swap* master_weights"
).split()


def read_arguments(result: Foreign, arguments: Mapping[str, Any], *, is_megatron: bool = True) -> None:
    """Set the facts of Megatron's settings, or of settings under Megatron's names; these have no keys without effect.

    Settings of another model than a Llama become ``problems``.
    """
    problems = []
    arguments = {str(name): _plain(value) for name, value in arguments.items()}
    result.has_settings = result.has_settings or bool(arguments)
    for name, value in arguments.items():
        if name in _REQUIRED:
            allowed, rule = _REQUIRED[name]
            given = _function_name(value) if name == "activation_func" else value
            if not (
                given is None or any(equal_values(given, item) for item in allowed) or (not allowed and _is_off(given))
            ):
                problems.append(f"{name} is {show_value(given)}, and {rule}")
        elif name in _TRAINING:
            if not equal_values(value, _TRAINING[name]) and not _is_off(value):
                result.changes.append((name, value, _TRAINING[name]))
        elif (
            name not in _COMPARED
            and name not in _CONVERTED
            and not _is_off(value)
            and not (is_megatron and any(fnmatchcase(name, pattern) for pattern in _NO_EFFECT))
        ):
            problems.append(f"the setting {name}={show_value(value)} is unknown here and may change the model")
    if problems:
        instead = "name a Llama's checkpoint, or convert it to the Hugging Face format by its program"
        rule = f"the source's model is not supported: {'; '.join(problems[:5])}"
        rule += f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        result.problems.append(Problem("model", str(result.folder), rule, instead))
    for name, setting in _COMPARED.items():
        value = arguments.get(name)
        if isinstance(value, int | float | str):
            result.facts[setting] = value
    if arguments.get("lr_decay_style") == "constant":
        result.facts.pop("optim.min_lr", None)  # unused
    _model_facts(result, arguments)
    _training_facts(result, arguments)


def _is_off(value: Any) -> bool:
    """Return whether a value means that a feature is unused."""
    return isinstance(value, None | bool | int | float | str | list | tuple | dict) and not value


def _plain(value: Any) -> Any:
    """Return a number, text or container; a tensor of one value as a number, and other objects as text."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    return value if isinstance(value, None | bool | int | float | str | list | tuple | dict) else show_value(value)


def _function_name(value: Any) -> Any:
    """Return the last part of a function's name: ``{_target_: torch.nn.functional.silu}`` is silu."""
    target = value.get("_target_") if isinstance(value, dict) else value
    return target.rpartition(".")[2] if isinstance(target, str) else value


def _model_facts(result: Foreign, arguments: Mapping[str, Any]) -> None:
    facts, get = result.facts, arguments.get
    if isinstance(untied := get("untie_embeddings_and_output_weights"), bool):
        facts["model.tie_word_embeddings"] = not untied
    groups = get("num_query_groups") if get("group_query_attention", True) else None
    heads = get("num_attention_heads")
    if isinstance(groups, int) or (groups is None and isinstance(heads, int) and "num_query_groups" in arguments):
        facts["model.num_key_value_heads"] = heads if groups is None else groups
    if "window_size" in arguments:
        window = get("window_size")
        left: Any = window[0] if isinstance(window, list | tuple) and window else window
        facts["model.sliding_window"] = left + 1 if is_number(left) and left >= 0 else None
    if "qk_layernorm" in arguments and "add_qkv_bias" in arguments:
        facts["model.model_type"] = "qwen3" if get("qk_layernorm") else "qwen2" if get("add_qkv_bias") else "llama"
    scaling: dict[str, Any] | None = None
    stretch = get("rotary_seq_len_interpolation_factor") or get("seq_len_interpolation_factor")
    if get("use_rope_scaling") or get("rope_scaling") or get("scale_factor"):
        factor = get("scale_factor") or get("rope_scaling_factor") or 8.0
        low, high = get("low_freq_factor") or 1.0, get("high_freq_factor") or 4.0
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
        scaling["original_max_position_embeddings"] = get("old_context_len") or LLAMA3_CONTEXT
    elif stretch and stretch != 1:
        scaling = {"rope_type": "linear", "factor": stretch}
    if "rotary_base" in arguments or scaling:
        facts["model.rope_scaling"] = scaling


def _training_facts(result: Foreign, arguments: Mapping[str, Any]) -> None:
    facts = result.facts
    if facts.get("optim.clip") == 0:
        facts["optim.clip"] = None  # no clipping
    betas = [arguments.get(f"adam_beta{number}") for number in (1, 2)]
    if all(map(is_number, betas)):
        facts["optim.betas"] = betas
    resets = [arguments.get(name) for name in ("reset_position_ids", "reset_attention_mask")]
    if resets in ([True, True], [False, False]):
        facts["data.document_mask"] = resets[0]
    elif any(resets):
        result.changes.append(("reset_position_ids", resets[0], False))
        result.changes.append(("reset_attention_mask", resets[1], False))


def read_group(result: Foreign, group: Mapping[str, Any]) -> None:
    """Set the learning rate, and the facts that the arguments lack, from a parameter group of Adam."""
    facts = result.facts
    group = {str(name): _plain(value) for name, value in group.items()}
    if result.lr is None and is_number(group.get("lr")):
        result.lr = float(group["lr"])
    betas = group.get("betas")
    if isinstance(betas, list | tuple) and len(betas) == 2 and all(map(is_number, betas)):
        facts.setdefault("optim.betas", list(betas))
    for name in ("eps", "weight_decay"):
        if is_number(group.get(name)):
            facts.setdefault(f"optim.{name}", group[name])
    if isinstance(decoupled := group.get("decoupled_weight_decay"), bool) and facts.get("optim.weight_decay"):
        facts["optim.name"] = "adamw" if decoupled else "adam"
    for name, value in group.items():
        known = name in _GROUP_ONLY or any(fnmatchcase(name, pattern) for pattern in _GROUP_NO_EFFECT)
        if (not known and not _is_off(value)) or (
            name in _GROUP_ONLY and value is not None and value != _GROUP_ONLY[name]
        ):
            result.unresumable.append(f"its optimizer has {name}={show_value(value)}")


def read_config_json(result: Foreign, folder: Path) -> None:
    """Set the model's facts from Hugging Face's config.json in ``folder``, if there is one.

    Raises:
        CorruptFile: The file cannot be read.
    """
    if not (folder / CONFIG).exists():
        return
    try:
        content = read_hf_config(str(folder))
        clauses = unsupported_architecture(content)
    except ValueError as error:
        raise CorruptFile(str(error)) from error
    if clauses:
        rule = f"is not supported: {'; '.join(clauses)}"
        result.problems.append(Problem("model", str(folder), rule, "name a Llama's"))
        return
    shape = shape_from_hf(content)
    for name in ("name", "max_position_embeddings", "initializer_range"):
        shape.pop(name, None)
    for name in ("head_dim", "num_key_value_heads"):
        if shape.get(name) is None:
            del shape[name]
    result.facts |= {f"{MODEL}{name}": value for name, value in shape.items()}
    result.has_settings = True


def read_run_config(folder: Path) -> dict[str, Any]:
    """Return Megatron-Bridge's run_config.yaml or NeMo 2's context/model.yaml, by Megatron-LM's names; {}: neither.

    Raises:
        CorruptFile: The file cannot be read.
    """
    if (folder / _RUN_CONFIG).exists():
        content, sections = read_yaml(folder / _RUN_CONFIG), _SECTIONS
        arguments = {"peft": content.get("peft")}
    elif (path := folder.parent / "context" / "model.yaml").exists():
        content, sections, arguments = read_yaml(path), {"config": {}}, {}
    else:
        return {}
    for section, renamed in sections.items():
        values = content.get(section)
        for name, value in values.items() if isinstance(values, dict) else ():
            name = renamed.get(str(name), str(name))
            if section in ("model", "config") or name in _READ:
                arguments.setdefault(name, value)
    return arguments


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; {} for other values. Raises CorruptFile."""
    try:
        check_yaml(path)
        content = yaml.safe_load(read_whole(path).decode())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise CorruptFile(f"{path}: cannot be read: {str(error)[:200]}") from error
    return content if isinstance(content, dict) else {}


def check_model(folder: Path, model: ModelConfig, facts: Mapping[str, Any], *, resumes: bool) -> None:
    """Raise ConfigError for each setting of the model that differs from the source's.

    Args:
        resumes: Whether the run continues. A new run may extend the context by ``model.rope_scaling``.
    """
    ours = {**asdict(model), "num_key_value_heads": kv_heads(model), "head_dim": head_dim(model)}
    if (scaling := ours["rope_scaling"]) and scaling["original_max_position_embeddings"] is None:
        scaling["original_max_position_embeddings"] = original_context(model)
    problems = []
    for setting, theirs in facts.items():
        if not setting.startswith(MODEL):
            continue
        name = setting.removeprefix(MODEL)
        if name == "rope_scaling":
            extends = not resumes and not theirs and scaling and scaling["rope_type"] in EXTENSIONS
            same = extends or same_rope(scaling, theirs)
        else:
            same = equal_values(ours[name], theirs)
        if not same:
            written = shorten(format_value(theirs), 300)
            override = f"'{setting}={written}'" if " " in written else f"{setting}={written}"
            rule = f"the checkpoint {folder} was trained with {written}"
            problems.append(Problem(setting, ours[name], rule, f"write {override}"))
    if problems:
        raise ConfigError(problems)
