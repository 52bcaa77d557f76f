"""Types of rotary scaling under Hugging Face's names: what config.json and the command line may say about them.

Sources: transformers' ``modeling_rope_utils``; linear: kaiokendev 2023; dynamic: NTK-aware, bloc97 and emozilla 2023;
yarn: Peng et al. 2023, arXiv:2309.00071; longrope: Ding et al. 2024, arXiv:2402.13753; llama3: Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from megatron_llama.config.problems import Problem, show_value
from megatron_llama.config.settings import ROPE_TYPES, ModelConfig, RopeScaling

LLAMA3_CONTEXT = 8192
"""Context of Llama 3 before Llama 3.1's scaling, tokens."""
_CONTEXT = "original_max_position_embeddings"
KEYS: dict[str, tuple[str, ...]] = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _CONTEXT),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", _CONTEXT, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", _CONTEXT, "attention_factor", "short_factor", "long_factor"),
}
"""Keys of config.json for each type, in addition to ``rope_type`` and ``rope_theta``."""
EXTENSIONS = ("linear", "dynamic", "yarn", "longrope")
"""Types that may be set for a checkpoint that was trained without them."""


def longest_sequence(model: ModelConfig) -> int:
    """Return the longest sequence that a model supports, in tokens.

    For ``linear`` and ``dynamic``, ``max_position_embeddings`` is the context before the scaling, as transformers
    documents.
    """
    scaling = model.rope_scaling
    if scaling is not None and scaling.rope_type in ("linear", "dynamic"):
        return int(model.max_position_embeddings * scaling.factor)
    return model.max_position_embeddings


def original_context(model: ModelConfig) -> int:
    """Return the context before the scaling, in tokens, derived if not set."""
    scaling = model.rope_scaling
    assert scaling is not None
    if scaling.original_max_position_embeddings is not None:
        return scaling.original_max_position_embeddings
    return LLAMA3_CONTEXT if scaling.rope_type == "llama3" else model.max_position_embeddings


def rope_of_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a config.json under transformers 5's names.

    If both are present, rope_scaling takes precedence, as in transformers' RotaryEmbeddingConfigMixin.
    """
    rope = dict(content.get("rope_scaling") or content.get("rope_parameters") or {})
    if "rope_type" not in rope and "type" in rope:
        rope["rope_type"] = rope["type"]
    if content.get("rope_theta") is not None:
        rope.setdefault("rope_theta", content["rope_theta"])
    return rope


def rope_from_hf(content: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Return ModelConfig's ``rope_theta`` (None if missing) and ``rope_scaling`` from a config.json.

    Missing values of the scaling are derived as transformers 5 does: the context before the scaling is ``longest``,
    the model's ``max_position_embeddings``, and the factor of yarn and longrope is the ratio of the two.
    """
    rope = rope_of_config(content)
    kind = rope.get("rope_type", "default")
    scaling = None
    if kind != "default":
        scaling = {"rope_type": kind} | {key: rope[key] for key in KEYS.get(kind, ()) if rope.get(key) is not None}
        if _CONTEXT in KEYS.get(kind, ()):
            if content.get(_CONTEXT) is not None:  # Phi 3's place
                scaling[_CONTEXT] = content[_CONTEXT]
            scaling.setdefault(_CONTEXT, longest)
            if "factor" not in scaling and scaling[_CONTEXT]:
                scaling["factor"] = longest / scaling[_CONTEXT]
    return {"rope_theta": rope.get("rope_theta"), "rope_scaling": scaling}


def rope_to_hf(model: ModelConfig) -> dict[str, Any] | None:
    """Return config.json's ``rope_scaling``: the keys of the type that have a value."""
    scaling = model.rope_scaling
    if scaling is None:
        return None
    values = {key: getattr(scaling, key) for key in KEYS[scaling.rope_type]}
    if _CONTEXT in values:
        values[_CONTEXT] = original_context(model)
    return {"rope_type": scaling.rope_type} | {key: value for key, value in values.items() if value is not None}


def same_rope(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> bool:
    """Return whether two scalings have equal values. Missing keys have the defaults of ``RopeScaling``."""
    if not ours or not theirs:
        return not ours and not theirs
    defaults = asdict(RopeScaling())
    keys = ("rope_type", *KEYS.get(str(ours.get("rope_type")), ()))
    return all(equal_values(ours.get(key, defaults[key]), theirs.get(key, defaults[key])) for key in keys)


def is_number(value: Any) -> bool:
    """Return whether a value is a number within the range of 64-bit integers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


def equal_values(ours: Any, theirs: Any) -> bool:
    """Return whether two settings are equal; numbers up to fp32 rounding, which GGUF and tensors apply."""
    if isinstance(ours, Sequence) and isinstance(theirs, Sequence) and not isinstance(ours, str):
        return len(ours) == len(theirs) and all(map(equal_values, ours, theirs))
    if is_number(ours) and is_number(theirs):
        return math.isclose(ours, theirs, rel_tol=2**-24)
    return type(ours) is type(theirs) and bool(ours == theirs)


def unsupported_rope(content: Mapping[str, Any]) -> list[str]:
    """Return a clause for a type of rotary scaling that is not supported, or that lacks a value."""
    rope = rope_of_config(content)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", *ROPE_TYPES):
        supported = ", ".join(map(repr, ("default", *ROPE_TYPES)))
        return [f"rope_type is {show_value(kind)}, and only {supported} are supported"]
    if (part := rope.get("partial_rotary_factor")) not in (None, 1):
        return [f"partial_rotary_factor is {show_value(part)}, and only 1.0 is supported"]
    needed = {
        "linear": ["factor"],
        "dynamic": ["factor"],
        "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
        "longrope": ["short_factor", "long_factor"],
    }.get(kind, [])
    if kind == "yarn" and rope.get(_CONTEXT) is None:
        needed = ["factor"]
    return [f"its {kind} scaling has no {key}" for key in needed if rope.get(key) is None]


def settle_context(model: Any, given: set[str], assign: Callable[[str, Any], None]) -> None:
    """Derive the context before the scaling, and with yarn and longrope the context after it.

    A scaling without ``original_max_position_embeddings`` extends the model's context: ``max_position_embeddings``
    becomes the old value times ``factor``. If ``given``, the settings of the command line, have
    ``max_position_embeddings``, that is the context after the scaling.

    Args:
        model: The config's section ``model`` before it is typed; ``assign`` sets its values.
    """
    scaling, longest = model.rope_scaling, model.max_position_embeddings
    if not scaling or scaling[_CONTEXT] is not None or not isinstance(longest, int):
        return
    if scaling.rope_type == "llama3":
        assign(f"model.rope_scaling.{_CONTEXT}", LLAMA3_CONTEXT)
    elif scaling.rope_type in ("yarn", "longrope") and isinstance(scaling.factor, (int, float)) and scaling.factor >= 1:
        after = "model.max_position_embeddings" in given
        assign(f"model.rope_scaling.{_CONTEXT}", max(1, round(longest / scaling.factor)) if after else longest)
        assign("model.max_position_embeddings", longest if after else round(longest * scaling.factor))


def check_rope_scaling(model: ModelConfig, dim: int) -> Iterator[Problem]:
    """Yield the problems of a scaling whose values do not fit its type or ``dim``, the head dimension."""
    scaling = model.rope_scaling
    if scaling is None:
        return
    kind, section = scaling.rope_type, "model.rope_scaling"
    for key in [field.name for field in fields(RopeScaling) if field.default is None]:
        value = getattr(scaling, key)
        if value is not None and key not in KEYS[kind]:
            users = " and ".join(name for name in ROPE_TYPES if key in KEYS[name])
            yield Problem(f"{section}.{key}", value, f"is only for {users}, not {kind}", f"write {section}.{key}=null")
    if kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        rule = f"must be above {section}.low_freq_factor={scaling.low_freq_factor:g}"
        advice = f"write {section}.high_freq_factor={scaling.low_freq_factor * 4:g}"
        yield Problem(f"{section}.high_freq_factor", scaling.high_freq_factor, rule, advice)
    if kind == "yarn":
        fast, slow = scaling.beta_fast or 32, scaling.beta_slow or 1
        if fast <= slow:
            advice = f"write {section}.beta_fast={slow * 32:g}"
            yield Problem(f"{section}.beta_fast", fast, f"must be above {section}.beta_slow={slow:g}", advice)
        if model.rope_theta == 1:
            rule = "must not be 1 for yarn scaling, which divides by its logarithm"
            yield Problem("model.rope_theta", model.rope_theta, rule, "write model.rope_theta=10000")
    if kind == "longrope" and scaling.attention_factor is None and scaling.factor > 1 and original_context(model) == 1:
        rule = "must be above 1 for longrope scaling without an attention_factor, which divides by its logarithm"
        advice = f"write {section}.{_CONTEXT}=N, the context before the scaling, or {section}.attention_factor=1"
        yield Problem(f"{section}.{_CONTEXT}", 1, rule, advice)
    if kind == "dynamic" and dim <= 2:
        yield Problem("model.head_dim", dim, "must be above 2 for dynamic scaling", "write model.head_dim=4")
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        factors = getattr(scaling, key)
        if (count := len(factors or ())) != dim // 2:
            rule = f"must have {dim // 2} numbers, one per pair of the head's dimensions, not {count}"
            advice = f"copy the list {key} from the config.json of the model that has this scaling"
            yield Problem(f"{section}.{key}", factors, rule, advice)
