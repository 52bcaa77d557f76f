"""A model's shape from Hugging Face's config.json, and back; adapters' configs; names of the hub in the local cache."""
from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megatron_llama.config.fields import KINDS, settings_by_name
from megatron_llama.config.problems import Problem, format_value
from megatron_llama.config.settings import ModelConfig, RopeScaling
from megatron_llama.system.files import read_json

FROM_HF = "from_hf"
CONFIG = "config.json"
MOST_BYTES = 16 << 20
"""Of a config.json."""
FOLDER_HINT = "write the folder that holds config.json and the .safetensors files"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What config.json may leave out, and what transformers' LlamaConfig takes then.
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL = ("num_key_value_heads", "head_dim")
# Keys that config.json and our model section share. A wrong rms_norm_eps would be hard to notice otherwise.
_SHAPE = (*NEEDED, *OPTIONAL, "rope_theta", "rms_norm_eps", "tie_word_embeddings")
MISTRAL = "mistral"
_MODEL_TYPES = ("llama", MISTRAL)
_MISTRAL_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
"""What transformers' MistralConfig takes where it differs from LlamaConfig. A null is a value: no window."""
NO_HF_BLOCKS = "no Hugging Face model has such blocks, so what it exports to would attend to all tokens"
_ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Keys of config.json that change the architecture, and the only value that is supported.
_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}

# PEFT's names of what an adapter fixes, and ours.
_LORA_SETTINGS = {
    "r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "target_modules": "lora_target_modules",
    "modules_to_save": "modules_to_save",
}
# Legal values of adapter_config.json's other keys, besides null, false and empty. A key that is not listed must be one
# of these three, so that what a later PEFT adds is refused, not ignored. Some initialisations (pissa, olora, corda,
# loftq) change the base's weights too, which the base's folder does not have.
_PLAIN_LORA: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),
}
# Keys that do not change what the adapter's tensors mean. layers_pattern needs layers_to_transform, which is refused.
_IRRELEVANT = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "layers_pattern", "megatron_core", "qalora_group_size", "runtime_config"),
)


def read_hf_config(folder: str, name: str = CONFIG) -> dict[str, Any]:
    """The folder's config.json or ADAPTER_CONFIG.

    Raises ValueError where it can't be read or is no JSON object, and for values of config.json that are none of a
    model, all at once: texts instead of numbers, negative sizes.
    """
    path = os.path.join(folder, name)
    try:
        content = read_json(Path(path), MOST_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    if name == CONFIG and (wrong := list(_malformed(content))):
        raise ValueError(f"{path}: {'; '.join(wrong)}")
    return content


def _malformed(content: dict[str, Any]) -> Iterator[str]:
    """A clause for each value that can be no model's, by the types and limits of our settings."""
    ropes = {name: content[name] for name in ("rope_scaling", "rope_parameters") if content.get(name)}
    for name, rope in ropes.items():
        if not isinstance(rope, dict):
            yield f"{name} is {format_value(rope)}, not a mapping"
    scalings = [rope for rope in ropes.values() if isinstance(rope, dict)]
    known = [(name, content.get(name), f"model.{name}") for name in dict.fromkeys((*_SHAPE, *_DEFAULTS))]
    known += [("rope_theta", rope.get("rope_theta"), "model.rope_theta") for rope in scalings]
    if content.get("model_type") == MISTRAL:
        known.append(("sliding_window", content.get("sliding_window"), "model.sliding_window"))
    known += [(n, rope.get(n), f"model.rope_scaling.{n}") for rope in scalings for n in _ROPE_NUMBERS]
    for name, value, ours in known:
        if value is None:
            continue
        setting = settings_by_name()[ours]
        if not setting.has_type(value):
            yield f"{name} is {value!r}, not {KINDS[setting.kind]}"
        elif problem := setting.problem(value):
            yield f"{name} is {value!r}, which {problem.rule}"


def compare_shapes(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Where a config.json and a ModelConfig, as a dict with every derived value, differ: {name: (ours, theirs)}."""
    flat = {**theirs, **rope_from_hf(theirs)}

    def same(one: Any, other: Any) -> bool:
        # Equal, or one number before and after a format that has fp32 only: GGUF turns 1e-05 into 9.99999974e-06.
        both_floats = isinstance(one, float) and isinstance(other, float)
        return math.isclose(one, other, rel_tol=2**-24) if both_floats else bool(one == other)

    given = {name: flat[name] for name in _SHAPE if flat.get(name) is not None}
    different = {name: (ours[name], value) for name, value in given.items() if not same(ours[name], value)}
    if theirs.get("model_type") == MISTRAL and window_from_hf(theirs) != ours["sliding_window"]:
        different["sliding_window"] = (ours["sliding_window"], window_from_hf(theirs))
    if flat["rope_scaling"] != ours["rope_scaling"]:
        different["rope_scaling"] = (ours["rope_scaling"], flat["rope_scaling"])
    return different


def unsupported_architecture(content: dict[str, Any]) -> list[str]:
    """Clauses on each key of a config.json that asks for an architecture that is not supported."""
    found = [
        f"{name} is {content[name]!r}, and only {only!r} is supported"
        for name, only in _ONLY.items()
        if name in content and content[name] != only and content[name] is not None
    ]
    if content.get("model_type", "llama") not in _MODEL_TYPES:
        found.insert(0, f"model_type is {content['model_type']!r}, and only 'llama' and 'mistral' are supported")
    kind = _rope(content).get("rope_type", "default")
    if kind not in ("default", "llama3"):
        found.append(f"rope_type is {kind!r}, and only 'default' and 'llama3' are supported")
    return found


def shape_from_hf(content: dict[str, Any]) -> dict[str, Any]:
    """ModelConfig's values from a config.json; both the spelling of transformers 5 (rope_parameters) and the older
    one."""
    shape = {name: content[name] for name in NEEDED if content.get(name) is not None}
    shape |= {name: content.get(name) for name in OPTIONAL}
    for name, default in _DEFAULTS.items():
        shape[name] = default if content.get(name) is None else content[name]
    shape["sliding_window"] = window_from_hf(content)
    if content.get("model_type") == MISTRAL:
        shape |= {name: value for name, value in _MISTRAL_DEFAULTS.items() if name not in content}
    rope = rope_from_hf(content)
    return {**shape, **rope, "rope_theta": 10000.0 if rope["rope_theta"] is None else rope["rope_theta"]}


def window_from_hf(content: dict[str, Any]) -> int | None:
    """ModelConfig's ``sliding_window`` from a config.json. A Llama's is not read, as transformers does not read it."""
    if content.get("model_type") != MISTRAL:
        return None
    window: int | None = content.get("sliding_window", _MISTRAL_DEFAULTS["sliding_window"])
    return window


def rope_from_hf(content: dict[str, Any]) -> dict[str, Any]:
    """ModelConfig's ``rope_theta``, None where it is not given, and ``rope_scaling`` from a config.json."""
    rope = _rope(content)
    names = [field.name for field in fields(RopeScaling)]
    scaled = rope.get("rope_type", "default") != "default"
    scaling = {name: rope[name] for name in names if name in rope} if scaled else None
    return {"rope_theta": rope.get("rope_theta"), "rope_scaling": scaling}


def fill_from_folders(
    config: Any, given: set[str], assign: Callable[[str, Any], None], problems: list[Problem]
) -> None:
    """Assign the model's shape from the folder in ``init_from``, and LoRA's settings from the adapter's folder.

    Names of the hub become folders of the local cache, where that holds them.

    Args:
        config: The config before it is typed; ``assign`` sets its values.
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
    """Assigns every ``model.`` setting that is not ``given`` on the command line from the folder's config.json."""
    if folder is None:
        rule, instead = "takes the shape from the folder in init_from, which is not given", "write init_from=FOLDER"
        problems.append(Problem("model", FROM_HF, rule, instead))
        return
    try:
        content = read_hf_config(folder)
    except ValueError as error:
        problems.append(Problem("init_from", folder, str(error), FOLDER_HINT + download_hint(folder)))
        return
    shape = shape_from_hf(content)
    for name in NEEDED:
        if name not in shape:
            problems.append(Problem("init_from", folder, f"its config.json has no {name}", f"write model.{name}=..."))
    shape["name"] = short_name(folder)
    for name, value in shape.items():
        if f"model.{name}" not in given:
            assign(f"model.{name}", value)


def hf_config(model: ModelConfig, dtype: str, token_ids: dict[str, int]) -> dict[str, Any]:
    """config.json of a model that was trained here, readable by transformers 4 and 5 and by everything that reads
    Llamas. With a sliding window it is a Mistral, which is a Llama with one; without, a Llama."""
    windowed = model.sliding_window is not None
    scaling = None if model.rope_scaling is None else asdict(model.rope_scaling)
    return {
        "architectures": ["MistralForCausalLM" if windowed else "LlamaForCausalLM"],
        "model_type": MISTRAL if windowed else "llama",
        **({"sliding_window": model.sliding_window} if windowed else {}),
        **{name: getattr(model, name) for name in (*NEEDED, *OPTIONAL)},
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": model.initializer_range,
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
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
    """Assigns rank, alpha and modules from a PEFT adapter's adapter_config.json. Giving them again is a problem."""
    try:
        content = read_hf_config(folder, ADAPTER_CONFIG)
        if not os.path.exists(os.path.join(folder, ADAPTER_WEIGHTS)):
            raise ValueError(f"there is no {ADAPTER_WEIGHTS} in it")
    except ValueError as error:
        instead = f"write the folder that holds {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
        problems.append(Problem("finetune.adapter", folder, str(error), instead))
        return
    wrong = unsupported_lora(content)
    problems += [Problem("finetune.adapter", folder, clause, "name an adapter of plain LoRA") for clause in wrong]
    for theirs, ours in _LORA_SETTINGS.items() if not wrong else ():
        name, value = f"finetune.{ours}", content.get(theirs) or []
        if name in given:
            rule = f"is set by the adapter in {folder}: {format_value(value)}"
            problems.append(Problem(name, None, rule, f"leave {name} out"))
        else:
            assign(name, sorted(value) if isinstance(value, list) else value)


def unsupported_lora(content: dict[str, Any]) -> list[str]:
    """Clauses on each key of an adapter_config.json that asks for something other than plain LoRA."""
    found = []
    for name, value in content.items():
        may = _PLAIN_LORA.get(name, ())
        if value and value not in may and name not in (*_LORA_SETTINGS, *_IRRELEVANT):
            rule = f"only {' or '.join(map(repr, may))} is supported" if may else "that is more than plain LoRA"
            found.append(f"its {name} is {value!r}, and {rule}")
    for name in ("target_modules", "modules_to_save"):
        value = content.get(name)
        optional = value is None and name == "modules_to_save"
        if not optional and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            found.append(f"its {name} are no list of names")
    return found


def _rope(content: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings in the spelling of transformers 5, from any of their spellings. Where both are given rope_scaling
    counts, as in transformers' RotaryEmbeddingConfigMixin."""
    rope = dict(content.get("rope_scaling") or content.get("rope_parameters") or {})
    if "rope_type" not in rope and "type" in rope:
        rope["rope_type"] = rope["type"]
    if content.get("rope_theta") is not None:
        rope.setdefault("rope_theta", content["rope_theta"])
    return rope


# Folders of names of the Hugging Face hub, such as meta-llama/Llama-2-7b-hf, in huggingface_hub's local cache:
# models--org--name/snapshots/COMMIT, and refs/main with the newest commit. Nothing is downloaded: a start on a thousand
# ranks is no moment for 140 GB, and nodes often have no way out. The message has the command that fetches a model.

MODEL, DATASET = "model", "dataset"
_NAME = re.compile(r"(?!models/|datasets/)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(name: str) -> bool:
    """Whether it could be a name of the hub; a relative path of two parts could be, too. Nobody there is called models
    or datasets, as folders often are."""
    return bool(_NAME.fullmatch(name)) and ".." not in name and "--" not in name


def resolve_hub_name(name: str, kind: str = MODEL) -> str:
    """The folder that a name means: itself where it is a path that exists or no name of the hub, else what the cache
    holds. A name that is neither comes back as it is, for the check of the path to refuse with ``download_hint``."""
    if os.path.exists(name) or not is_hub_name(name):
        return name
    repository = cache_folder() / f"{kind}s--{name.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text(encoding="ascii").strip()
        commits = [commit]
    except (OSError, UnicodeDecodeError):
        commits = [path.name for path in repository.glob("snapshots/*")]  # fetched by a commit's number alone
    found = [repository / "snapshots" / commit for commit in commits]
    return str(found[0]) if len(found) == 1 and found[0].is_dir() else name


def cache_folder() -> Path:
    """Where huggingface_hub keeps what it downloads, by the variables that it reads."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(home, "huggingface")
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(named)))


def download_hint(name: str, kind: str = MODEL) -> str:
    """The end of a message on a path that is not there, where it could be a name of the hub's, or on a snapshot of the
    cache that lacks files; else nothing."""
    whole = _repository(name)
    if whole:
        return f", or fetch the files that the cache lacks: {_command(whole, kind)}"
    if not is_hub_name(name) or os.path.exists(name):
        return ""
    return f", or fetch the {kind}, which is not in the Hugging Face cache {cache_folder()}: {_command(name, kind)}"


def short_name(folder: str) -> str:
    """What to call a folder: its own name, or that of the hub's repository whose snapshot it is."""
    return _repository(folder).rpartition("/")[2] or os.path.basename(os.path.abspath(folder))


def _repository(folder: str) -> str:
    """The hub's name of the repository whose snapshot a folder is; nothing for other folders."""
    path = Path(os.path.abspath(folder))
    _, _, name = path.parent.parent.name.partition("s--")
    return name.replace("--", "/") if path.parent.name == "snapshots" else ""


def _command(name: str, kind: str) -> str:
    return f"hf download {name}" + (" --repo-type dataset" if kind == DATASET else "")
