"""A model's shape from Hugging Face's config.json, and back; adapters' configs; checks of model folders."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megatron_llama.config.hub import INDEX, SINGLE, download_hint, resolve_hub_name, short_name
from megatron_llama.config.problems import MOST_SHOWN, Problem, format_value, shorten, show_value
from megatron_llama.config.rope import EXTENSIONS, equal_values, rope_from_hf, rope_to_hf, same_rope, unsupported_rope
from megatron_llama.config.settings import MODEL_TYPES, ModelConfig, RopeScaling
from megatron_llama.config.settings_table import settings_by_name
from megatron_llama.system.files import read_json
from megatron_llama.system.object_store import is_url

FROM_HF = "from_hf"
CONFIG = "config.json"
MOST_BYTES = 16 << 20
"""Size limit of a config.json."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Optional keys of config.json, with the defaults of transformers' LlamaConfig.
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL = ("num_key_value_heads", "head_dim")
# Keys that config.json and the model section share; a wrong rms_norm_eps is hard to notice otherwise.
_SHAPE = (*NEEDED, *OPTIONAL, "rope_theta", "rms_norm_eps", "tie_word_embeddings")
LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2 = "llama", "mistral", "qwen2", "qwen3", "olmo2"
ARCHITECTURES = {kind: f"{kind.capitalize()}ForCausalLM" for kind in (LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2)}
"""Hugging Face's class of each model_type."""
BIASES = {"attention_bias": (LLAMA, QWEN3, OLMO2), "mlp_bias": (LLAMA,)}
"""Keys of biases, and the model types whose class in transformers reads them."""
WINDOWS = (MISTRAL, QWEN2, QWEN3)
"""Model types that have windows."""
_WINDOW = 4096  # default of all model types that have windows
_DEFAULTS_OF_TYPE: dict[str, dict[str, Any]] = {
    MISTRAL: {"max_position_embeddings": 131072, "num_key_value_heads": 8},
    QWEN2: {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    QWEN3: {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    OLMO2: {"rms_norm_eps": 1e-5},
}
"""Defaults of transformers' configs that differ from LlamaConfig. A null is a value."""
_MAX_WINDOW_LAYERS = 28
"""Default of Qwen's max_window_layers: the layers before the first one with a window."""
FULL, SLIDING = "full_attention", "sliding_attention"
# JSON types of the keys that no setting has.
_TYPES: dict[str, tuple[type, str]] = {
    "model_type": (str, "text"),
    "use_sliding_window": (bool, "true or false"),
    "layer_types": (list, "a list"),
    "max_window_layers": (int, "a whole number"),
}
NO_HF_BLOCKS = "Hugging Face's Llama has no block-sparse attention: an exported model would attend to all tokens"
_ROPE_VALUES = tuple(field.name for field in fields(RopeScaling) if field.name != "rope_type")
# Keys of config.json that change the architecture, and the only value that is supported.
_ONLY: dict[str, Any] = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "quantization_config": None}

TYING = "ensure_weight_tying"
"""PEFT's switch that trains tied embeddings as one weight."""
TOKEN_INDICES = "trainable_token_indices"
# PEFT's names of an adapter's settings, and the names here.
_LORA_SWITCHES = ("use_rslora", "use_dora")
LORA_SETTINGS = {"r": "lora_rank", "target_modules": "lora_target_modules"}
LORA_SETTINGS |= {name: name for name in ("lora_alpha", "modules_to_save", "bias", *_LORA_SWITCHES)}
LORA_SETTINGS |= {name: name for name in ("exclude_modules", "layers_to_transform", "rank_pattern", "alpha_pattern")}
LORA_SETTINGS |= {TOKEN_INDICES: TOKEN_INDICES}
_LORA_DEFAULTS: dict[str, Any] = {"bias": "none", "rank_pattern": {}, "alpha_pattern": {}}
_LORA_DEFAULTS |= dict.fromkeys(_LORA_SWITCHES, False)
# Valid values of adapter_config.json's other keys, in addition to null, false and empty. Unlisted keys must have one of
# these three values, so that features of later PEFT versions are rejected, not ignored. Some initializations (pissa,
# olora, corda, loftq) also change the base weights, which the base model's folder does not contain.
_PLAIN_LORA: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", "all", "lora_only"),
    "layers_pattern": ("layers", ["layers"]),
    "init_lora_weights": (True, False, "gaussian"),
    TYING: (True,),
}
# Keys that do not change the meaning of the tensors.
_IRRELEVANT = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "megatron_core", "qalora_group_size", "runtime_config"),
)


def read_hf_config(folder: str, name: str = CONFIG) -> dict[str, Any]:
    """Return the content of the folder's config.json or ADAPTER_CONFIG.

    Raises:
        ValueError: The file cannot be read or is not a JSON object, or config.json has invalid values (text instead of
            numbers, negative sizes). The message lists all of them.
    """
    path = os.path.join(folder, name)
    try:
        content = read_json(Path(path), MOST_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    if name == CONFIG and (wrong := list(_malformed(content))):
        raise ValueError(f"{path}: {'; '.join(wrong)}")
    return content


def _malformed(content: dict[str, Any]) -> Iterator[str]:
    """Yield a clause for each value that violates the type or limit of the matching setting."""
    for name, (kind, words) in _TYPES.items():
        if not isinstance(content.get(name), (kind, type(None))):
            yield f"{name} is {show_value(content[name])}, not {words}"
    ropes = {name: content[name] for name in ("rope_scaling", "rope_parameters") if content.get(name)}
    for name, rope in ropes.items():
        if not isinstance(rope, dict):
            yield f"{name} is {show_value(rope)}, not a mapping"
    scalings = [rope for rope in ropes.values() if isinstance(rope, dict)]
    for rope in scalings:
        for key in ("rope_type", "type"):
            if not isinstance(rope.get(key), (str, type(None))):
                yield f"{key} is {show_value(rope[key])}, not text"
    known = [(name, content.get(name), f"model.{name}") for name in dict.fromkeys((*_SHAPE, *_DEFAULTS, *BIASES))]
    known += [("rope_theta", rope.get("rope_theta"), "model.rope_theta") for rope in scalings]
    if content.get("model_type", LLAMA) != LLAMA:
        known.append(("sliding_window", content.get("sliding_window"), "model.sliding_window"))
    known += [(n, rope.get(n), f"model.rope_scaling.{n}") for rope in scalings for n in _ROPE_VALUES]
    for name, value, ours in known:
        if value is None:
            continue
        setting = settings_by_name()[ours]
        if not setting.has_type(value):
            yield f"{name} is {show_value(value)}, not {setting.type_name}"
        elif problem := setting.problem(value):
            yield f"{name} is {show_value(value)}, which {problem.rule}"


def compare_shapes(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Compare a ModelConfig, as a dict with derived values, with a config.json: {name: (ours, theirs)} that differ."""
    flat = {**theirs, **rope_from_hf(theirs, shape_from_hf(theirs)["max_position_embeddings"])}

    given = {name: flat[name] for name in _SHAPE if flat.get(name) is not None}
    different = {name: (ours[name], value) for name, value in given.items() if not equal_values(ours[name], value)}
    if ours["tie_word_embeddings"] is False:
        different.pop("tie_word_embeddings", None)  # the folder's tensors decide: transformers keeps an lm_head too
    if (kind := _type_from_hf(theirs)) != ours["model_type"]:
        different["model_type"] = (ours["model_type"], kind)
    different |= {name: (ours[name], value) for name, value in biases_from_hf(theirs).items() if value != ours[name]}
    if theirs.get("model_type", LLAMA) != LLAMA and window_from_hf(theirs) != ours["sliding_window"]:
        different["sliding_window"] = (ours["sliding_window"], window_from_hf(theirs))
    extends = (ours["rope_scaling"] or {}).get("rope_type") in EXTENSIONS
    if not extends and not same_rope(ours["rope_scaling"], flat["rope_scaling"]):
        different["rope_scaling"] = (ours["rope_scaling"], flat["rope_scaling"])
    return different


def changes_of_base(model: ModelConfig, content: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, beyond its weights, that a fine-tuning run may change in the base model of this config.json,
    and their values if they differ."""
    base, ours = shape_from_hf(content), asdict(model)
    changed = {} if same_rope(ours["rope_scaling"], base["rope_scaling"]) else {"rope_scaling": rope_to_hf(model)}
    if ours["sliding_window"] != base["sliding_window"]:
        changed["sliding_window"] = ours["sliding_window"]
    return changed


def unsupported_architecture(content: dict[str, Any]) -> list[str]:
    """Return a clause for each key of a config.json whose value is not supported."""
    clauses = [
        f"{name} is {show_value(content[name])}, and only {only!r} is supported"
        for name, only in _ONLY.items()
        if name in content and content[name] != only and content[name] is not None
    ]
    if (kind := content.get("model_type", LLAMA)) not in ARCHITECTURES:
        clauses.insert(0, f"model_type is {show_value(kind)}, and only {', '.join(ARCHITECTURES)} are supported")
    elif kind in (QWEN2, QWEN3) and len(kinds := _layer_types(content)) > 1:
        both = shorten(" and ".join(sorted(kinds)), MOST_SHOWN)
        clauses.append(f"its layers have {both}, and only one kind for all layers is supported")
    return clauses + unsupported_rope(content)


def shape_from_hf(content: dict[str, Any]) -> dict[str, Any]:
    """Return ModelConfig's values from a config.json of transformers 4 or 5 (rope_parameters)."""
    shape = {name: content[name] for name in NEEDED if content.get(name) is not None}
    shape |= {name: content.get(name) for name in OPTIONAL}
    for name, default in _DEFAULTS.items():
        shape[name] = default if content.get(name) is None else content[name]
    defaults = _DEFAULTS_OF_TYPE.get(content.get("model_type", LLAMA), {})
    shape |= {name: value for name, value in defaults.items() if name not in content}
    shape |= {"sliding_window": window_from_hf(content), "model_type": _type_from_hf(content)}
    shape |= biases_from_hf(content)
    rope = rope_from_hf(content, shape["max_position_embeddings"])
    return {**shape, **rope, "rope_theta": 10000.0 if rope["rope_theta"] is None else rope["rope_theta"]}


def window_from_hf(content: dict[str, Any]) -> int | None:
    """Return ModelConfig's ``sliding_window`` from a config.json. transformers ignores the key in a Llama."""
    kind = content.get("model_type")
    if kind == MISTRAL or (kind in (QWEN2, QWEN3) and _layer_types(content) == {SLIDING}):
        window: int | None = content.get("sliding_window", _WINDOW)
        return window
    return None


def biases_from_hf(content: dict[str, Any]) -> dict[str, bool]:
    """Return ModelConfig's biases from a config.json. transformers ignores the keys in other model types."""
    kind = content.get("model_type", LLAMA)
    return {name: bool(content.get(name)) and kind in kinds for name, kinds in BIASES.items()}


def _layer_types(content: dict[str, Any]) -> set[str]:
    """Return the kinds of attention of a Qwen's layers, as transformers derives them."""
    if not content.get("use_sliding_window") or content.get("sliding_window", _WINDOW) is None:
        return {FULL}
    if content.get("layer_types") is not None:
        return set(map(str, content["layer_types"]))
    first = content.get("max_window_layers")
    first, layers = _MAX_WINDOW_LAYERS if first is None else first, content.get("num_hidden_layers") or 0
    return {SLIDING if layer >= first else FULL for layer in range(layers)}


def _type_from_hf(content: dict[str, Any]) -> str:
    """Return ModelConfig's ``model_type`` from a config.json. A Mistral is a Llama with a window."""
    kind = content.get("model_type", LLAMA)
    return kind if kind in MODEL_TYPES else LLAMA


def fill_from_folders(
    config: Any, given: set[str], assign: Callable[[str, Any], None], problems: list[Problem]
) -> None:
    """Assign the model's shape from the folder in ``init_from``, and LoRA's settings from the adapter's folder.

    Hub names become folders of the local cache (``config/hub.py``).

    Args:
        config: Config before it is typed; ``assign`` sets its values.
        given: Settings that the command line sets.
    """
    for section, name in ((config, "init_from"), (config.finetune, "adapter")):
        if section[name] is not None:
            section[name] = resolve_hub_name(section[name])
    if config.model.name == FROM_HF:
        _fill_from_hf(config.init_from, given, assign, problems)
    if config.finetune.adapter is not None:
        fill_from_adapter(config.finetune.adapter, given, assign, problems)


def _fill_from_hf(
    folder: str | None, given: set[str], assign: Callable[[str, Any], None], problems: list[Problem]
) -> None:
    """Assign each ``model.`` setting that is not ``given`` on the command line from the folder's config.json."""
    if folder is None:
        rule, instead = "needs init_from, the folder with the model's shape", "write init_from=FOLDER"
        problems.append(Problem("model", FROM_HF, rule, instead))
        return
    steps = sorted(Path(folder).glob(f"checkpoint-*/{CONFIG}"), key=lambda file: (len(str(file)), file))  # a Trainer's
    try:
        content = read_hf_config(folder if (Path(folder) / CONFIG).exists() or not steps else str(steps[-1].parent))
    except ValueError as error:
        hint = folder_hint(folder, ", or model=NAME if another program wrote it")
        problem = Problem("init_from", folder, str(error), hint + download_hint(folder))
        problems.append(problem if os.path.exists(folder) else missing_folder(folder))
        return
    shape = shape_from_hf(content)
    for name in NEEDED:
        if name not in shape:
            problems.append(Problem("init_from", folder, f"its config.json has no {name}", f"write model.{name}=..."))
    shape["name"] = short_name(folder)
    if unsupported_architecture(content):
        del shape["rope_scaling"]  # the check of the folder reports its type; a second message would be wrong
    for name, value in shape.items():
        if f"model.{name}" in given:
            continue
        if isinstance(value, dict):  # rope_scaling: the command line may set some of its values
            value = {key: item for key, item in value.items() if f"model.{name}.{key}" not in given}
        elif value is None and any(key.startswith(f"model.{name}.") for key in given):
            continue
        assign(f"model.{name}", value)


def hf_type(model: ModelConfig) -> str:
    """Return Hugging Face's model_type. A Llama with a window is a Mistral."""
    return MISTRAL if model.model_type == LLAMA and model.sliding_window is not None else model.model_type


def hf_config(model: ModelConfig, dtype: str, token_ids: dict[str, int]) -> dict[str, Any]:
    """Return the config.json of a trained model, for transformers 4 and 5."""
    kind, window = hf_type(model), {}
    if model.sliding_window is not None:
        window = {"sliding_window": model.sliding_window}
    if kind in (QWEN2, QWEN3):
        window |= {"use_sliding_window": bool(window), "max_window_layers": 0 if window else model.num_hidden_layers}
    scaling = rope_to_hf(model)
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **window,
        **{name: getattr(model, name) for name in (*NEEDED, *OPTIONAL, *_DEFAULTS)},
        "hidden_act": "silu",
        **{name: getattr(model, name) for name in BIASES if kind in (*BIASES[name], MISTRAL)},
        "attention_dropout": 0.0,
        "use_cache": True,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": model.rope_theta, **(scaling or {"rope_type": "default"})},
        "torch_dtype": dtype,
        "dtype": dtype,
        **token_ids,
    }


def fill_from_adapter(
    folder: str, given: set[str], assign: Callable[[str, Any], None], problems: list[Problem]
) -> None:
    """Assign the LORA_SETTINGS of a PEFT adapter's config. Settings in ``given`` are a problem."""
    try:
        content = read_hf_config(folder, ADAPTER_CONFIG)
        if not os.path.exists(os.path.join(folder, ADAPTER_WEIGHTS)):
            raise ValueError(f"has no {ADAPTER_WEIGHTS}")
    except ValueError as error:
        instead = f"write the folder that holds {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}{download_hint(folder)}"
        problems.append(Problem("finetune.adapter", folder, str(error), instead))
        return
    expressions = [name for name in ("target_modules", "exclude_modules") if isinstance(content.get(name), str)]
    if expressions:  # the tensors name the modules
        from safetensors import SafetensorError, safe_open

        content |= {"target_modules": [], "exclude_modules": None, "layers_to_transform": None}
        with suppress(SafetensorError), safe_open(os.path.join(folder, ADAPTER_WEIGHTS), framework="np") as file:
            names = {name.partition(".lora_")[0] for name in file.keys() if ".lora_" in name}  # noqa: SIM118
            content["target_modules"] = sorted(names)
    tokens = content.get(TOKEN_INDICES)
    if isinstance(tokens, dict) and tokens.keys() == {"embed_tokens"}:
        content[TOKEN_INDICES] = tokens["embed_tokens"]
    if isinstance(layer := content.get("layers_to_transform"), int):
        content["layers_to_transform"] = [layer]
    values = {name: content.get(name) or _LORA_DEFAULTS.get(name, []) for name in LORA_SETTINGS}
    settings = {theirs: settings_by_name()[f"finetune.{ours}"] for theirs, ours in LORA_SETTINGS.items()}
    wrong = [*_unsupported_lora(content)]
    wrong += [
        f"its {name} is {show_value(values[name])}, not {setting.type_name}"
        for name, setting in settings.items()
        if not setting.has_type(values[name])
    ]
    problems += [Problem("finetune.adapter", folder, clause, "write a plain LoRA adapter") for clause in wrong]
    for theirs, value in values.items() if not wrong else ():
        name = settings[theirs].name
        if name in given:
            rule = f"is set by the adapter in {folder}: {format_value(value)}"
            problems.append(Problem(name, None, rule, f"omit {name}"))
        else:
            value = _module_names(value) if theirs == "target_modules" else value
            if theirs == "modules_to_save":  # PEFT adds model.embed_tokens to a tied embed_tokens
                value = {name.removeprefix("model.") for name in value}
            is_sorted = isinstance(value, (list, set)) and theirs != TOKEN_INDICES  # in the order of the rows
            assign(name, sorted(value) if is_sorted else value)


_MODULE = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)|(?:.*\.)?(embed_tokens|lm_head)")


def _module_names(names: list[str]) -> list[str]:
    """Return the projections that full module names stand for, which PEFT writes for ``all-linear`` in small models.

    Names that adapt only some layers are returned unchanged.
    """
    layers: dict[str, set[int]] = {}
    for name in names:
        if (match := _MODULE.fullmatch(name)) is None:
            return names
        layers.setdefault(match[2] or match[3], set()).update([int(match[1])] if match[1] else [])
    numbers = {frozenset(chosen) for chosen in layers.values() if chosen}
    whole = all(chosen == set(range(len(chosen))) for chosen in numbers) and len(numbers) <= 1
    return list(layers) if whole else names


def _unsupported_lora(content: dict[str, Any]) -> Iterator[str]:
    """Yield a clause for each key of an adapter_config.json that differs from plain LoRA."""
    for name, value in content.items():
        may = _PLAIN_LORA.get(name, ())
        if value and value not in may and (name not in (*LORA_SETTINGS, *_IRRELEVANT) or may):
            rule = f"only {' or '.join(map(repr, may))} is supported" if may else "only plain LoRA is supported"
            yield f"its {name} is {show_value(value)}, and {rule}"


def folder_hint(folder: str, other: str = "") -> str:
    """Return what to write in place of a folder without a model; ``other`` is added for all but adapters."""
    if os.path.exists(os.path.join(folder, ADAPTER_CONFIG)):
        return f"write init_from=BASE, the adapter's base model, with finetune.adapter={shlex.quote(folder)}"
    return f"write the folder that holds config.json and the .safetensors files{other}"


def missing_folder(folder: str) -> Problem:
    """Return the problem of an ``init_from`` that does not exist."""
    if is_url(folder):
        return Problem("init_from", folder, "cannot be read", f"write another URL{download_hint(folder)}")
    rule = f"there is no such folder (seen from {os.getcwd()})"
    download = f"download the model into it (hf download OWNER/NAME --local-dir {shlex.quote(folder)})"
    return Problem("init_from", folder, rule, f"{download}, or {folder_hint(folder)}{download_hint(folder)}")


def has_weights(folder: Path) -> bool:
    """Return whether a folder has the safetensors files of a model."""
    return (folder / INDEX).exists() or (folder / SINGLE).exists()


def missing_weights(folder: Path) -> Problem:
    """Return the problem of an ``init_from`` without ``has_weights``."""
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin")) if folder.is_dir() else []
    rule = f"has neither {SINGLE} nor {INDEX}"
    instead = "write a folder with config.json and .safetensors files" + download_hint(str(folder))
    if pickles:
        rule += f", only {pickles[0]}, a pickle: loading it can execute code"
        name = json.dumps(str(folder))
        code = f"model = AutoModelForCausalLM.from_pretrained({name}); model.save_pretrained({name})"
        instead = f"if you trust its source, convert it in Python with transformers: {code}"
    return Problem("init_from", str(folder), rule, instead)
