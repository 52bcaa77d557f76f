"""Flat table of the settings, read from the dataclasses: ``trainer.tp`` -> type, default and limit.

Unknown names get suggestions.
"""

from __future__ import annotations

import copy
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from megatron_llama.config.limits import FREE, Limit
from megatron_llama.config.problems import Problem, closest_match, quote_value
from megatron_llama.config.settings import DEVICE_ALIASES, Config

# Section with free keys: the arguments of the schedule class that it names.
FREE_DICT = "optim.schedule"
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
}
EXAMPLES = {int: "1", float: "0.1", bool: "true", str: "name", list: "[...]", dict: "{...}"}
TOO_LARGE = 1e18
"""Upper bound of every number: a larger value is a typo or infinity."""


@dataclass(frozen=True)
class Setting:
    """One setting."""

    name: str
    kind: type
    item_kind: type | None
    """Type of a list's items."""
    optional: bool
    default: Any
    limit: Limit | None
    on_change: str
    """Reaction of a resumed run to a change (``limits.py``)."""

    @property
    def type_name(self) -> str:
        """The type in words, such as "a whole number"."""
        of = f" of {KINDS[self.item_kind].split(' ', 1)[1]}s" if self.item_kind in (int, float) else ""
        return KINDS[self.kind] + of + (" (or null)" if self.optional else "")

    def suggest_value(self, value: Any) -> str:
        """Return the text to write instead of ``value``, which has the wrong type."""
        if self.kind is int and isinstance(value, float) and value.is_integer():
            return f"write {self.name}={int(value)}"
        whole = [str(value) if self.item_kind is str else value]
        if not isinstance(value, (list, dict)) and self.has_type(whole) and not self.problem(whole):
            return f"write {self.name}={quote_value([value])}"
        by_kind = self.limit.example if self.limit and self.kind in (float, list) else EXAMPLES[self.kind]
        example = by_kind if self.default in (None, [], {}) else quote_value(self.default)
        return f"write {self.type_name}, such as {self.name}={example}"

    def has_type(self, value: Any) -> bool:
        """Return whether ``value``, which is not null, has the setting's type. An int is a valid float."""
        if self.kind is list and self.item_kind in (int, float, str):
            kinds = (int, float) if self.item_kind is float else (self.item_kind,)
            return type(value) is list and all(type(item) in kinds for item in value)
        return type(value) is self.kind or (self.kind is float and type(value) is int)

    def problem(self, value: Any) -> Problem | None:
        """Return the problem of ``value``, which has the right type; None if it is within the limit."""
        if self.limit is None or (value is None and self.optional):
            return None
        too_large = self.kind in (int, float) and abs(value) >= TOO_LARGE
        if self.limit.holds(value) and not too_large:
            return None
        example = self.limit.example if self.default in (None, [], {}) else quote_value(self.default)
        example = closest_choice(self.name, str(value), self.limit.choices) or example
        rule = f"must be below {TOO_LARGE:.0g}" if too_large else self.limit.rule
        return Problem(self.name, value, rule, f"write {self.name}={example}")


@functools.cache
def settings_by_name() -> dict[str, Setting]:
    """Return all settings by full name."""
    return {part.name: part for part in _walk(Config, "") if not is_dataclass(part.kind)}


def settings_of(owner: type, section: str) -> dict[str, Setting]:
    """Return the settings of a dataclass that is not part of ``Config``, named below ``section``."""
    return {part.name: part for part in _walk(owner, f"{section}.") if not is_dataclass(part.kind)}


@functools.cache
def sections() -> dict[str, Setting]:
    """Return all sections (``trainer``, ``model.rope_scaling``) by full name; their kind is a dataclass."""
    return {part.name: part for part in _walk(Config, "") if is_dataclass(part.kind)}


def check_limits(config: Config) -> list[Problem]:
    """Return the problems of settings whose value violates its own limit."""
    problems = [
        setting.problem(get(config, name))
        for name, setting in settings_by_name().items()
        if get(config, name.rpartition(".")[0]) is not None  # a section that is null has no values
    ]
    return [problem for problem in problems if problem is not None]


def reset_to_defaults(config: Config, problems: Iterable[Problem]) -> Config:
    """Return a copy with default values for the settings that ``problems`` name."""
    config = copy.deepcopy(config)
    for problem in problems:
        put(config, problem.field, copy.deepcopy(settings_by_name()[problem.field].default))
    return config


def put(config: Config, name: str, value: Any) -> None:
    """Set a setting or section by full name."""
    section, _, key = name.rpartition(".")
    setattr(get(config, section), key, value)


def get(config: Config, name: str) -> Any:
    """Return the value of a setting or section by full name, the whole config for ""; None in a null section."""
    value: Any = config
    for key in name.split(".") if name else ():
        value = getattr(value, key) if value is not None else None
    return value


def _walk(owner: type, prefix: str) -> Iterator[Setting]:
    """Yield the settings and sections of a dataclass."""
    hints = typing.get_type_hints(owner, include_extras=True)
    for field in fields(owner):
        name = prefix + field.name
        hint, marks, optional = hints[field.name], [], False
        if typing.get_origin(hint) is typing.Annotated:
            hint, *marks = typing.get_args(hint)
        limit = next((mark for mark in marks if isinstance(mark, Limit)), None)
        on_change = next((mark for mark in marks if isinstance(mark, str)), FREE)
        if isinstance(hint, types.UnionType):
            (hint,) = [member for member in typing.get_args(hint) if member is not type(None)]
            optional = True
        kind: type = typing.get_origin(hint) or hint
        (item_kind, *_) = typing.get_args(hint) if kind is list else (None,)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield Setting(name, kind, item_kind, optional, default, limit, on_change)
        if is_dataclass(kind):
            yield from _walk(kind, f"{name}.")


# Suggestions for unknown settings.

# Names in Megatron, NeMo, transformers and PEFT, and the names here.
_FOREIGN = {
    "trainer.tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel",
    "trainer.pp": "pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel",
    "trainer.vpp": "virtual_pipeline_model_parallel_size",
    "trainer.cp": "context_parallel_size context_parallel",
    "trainer.cp_comm": "cp_comm_type",
    "trainer.dp": "data_parallel_size data_parallel",
    "trainer.sp": "sequence_parallel",
    "trainer.zero": "zero_stage",
    "trainer.steps": "max_steps train_iters",
    "trainer.epochs": "num_train_epochs",
    "data.seq_length": "max_seq_length encoder_seq_length",
    "data.prefixes": "data_prefix",
    "data.pack": "packing",
    "model.num_hidden_layers": "num_layers",
    "model.num_key_value_heads": "num_query_groups",
    "model.intermediate_size": "ffn_hidden_size",
    "optim.lr": "learning_rate",
    "optim.clip": "gradient_clip_val",
    "finetune.lora_rank": "lora_r",
    "finetune.lora_target_modules": "target_modules",
}
FOREIGN_NAMES = {name: ours for ours, names in _FOREIGN.items() for name in names.split()}
# Settings of those programs, or of scripts here, that a run does not have.
SUGGESTIONS = {
    "cluster": "omit it: cluster.* belongs to scripts/plan.py and scripts/tune.py",
    "tune": "omit it: tune.* belongs to scripts/tune.py, which writes an experiment for train.py",
    "objective": "omit it: objective belongs to scripts/tune.py, which writes an experiment for train.py",
    "bf16": "write trainer.precision=bf16",
    "fp16": "write trainer.precision=bf16; fp16 is not supported (it needs loss scaling)",
    "gradient_accumulation": "write trainer.global_batch_size, which is micro_batch_size x dp x accumulation",
    "gradient_accumulation_steps": "write trainer.global_batch_size, which is micro_batch_size x dp x accumulation",
    "rampup_batch_size": "write trainer.batch_schedule=[[samples,size],...]: the size from that consumed sample on",
}

# Values of other programs, in lower case, and the text to write instead, by setting or group.
ALIASES = {
    "device": DEVICE_ALIASES,
    "device.name": DEVICE_ALIASES,
    "finetune": {"qlora": "lora finetune.frozen_dtype=nf4", "sft": "full", "peft": "lora"},
    "trainer.recompute": {"true": "full", "false": "none", "uniform": "full", "block": "full"},
}


def closest_choice(name: str, value: str, choices: Iterable[str]) -> str | None:
    """Return the choice to suggest instead of ``value``: another program's name for it, else the most similar one."""
    lower = value.lower()
    bare = re.sub(r"[\d:.]+$", "", lower)  # the number of a device or a generation
    aliases = ALIASES.get(name, {})
    known = list(choices)
    return aliases.get(lower) or aliases.get(bare) or (bare if bare in known else closest_match(value, known))


def unknown_setting_problem(name: str, value: Any) -> Problem:
    """Return the problem of an unknown setting, with the most similar known one."""
    instead = SUGGESTIONS.get(name.rpartition(".")[2].lower()) or SUGGESTIONS.get(name.partition(".")[0])
    if instead is None and (guess := suggest(name)):
        instead = f"write {guess}={quote_value(value)}"
    if instead is None:
        section = name.rpartition(".")[0]
        known_names = (_settings_in(section) if section else []) or [f"{known}.*" for known in sections()]
        instead = f"write one of {', '.join(known_names)}; docs/reference/config.md lists all"
    return Problem(name, value, "there is no setting of this name", instead)


def suggest(name: str) -> str | None:
    """Return the known setting that is most similar to ``name``; None if none is."""
    section, _, leaf = name.rpartition(".")
    if leaf in FOREIGN_NAMES:
        return FOREIGN_NAMES[leaf]
    known = settings_by_name()
    same_leaf = [other for other in known if other.rpartition(".")[2] == leaf]
    if same_leaf:
        return max(same_leaf, key=lambda other: difflib.SequenceMatcher(None, name, other).ratio())
    # Misspelled: search the given section first, then all settings, then sections and groups.
    for others, cutoff in ((_settings_in(section), 0.6), (known, 0.8), ([*sections(), "experiment", "scaled"], 0.7)):
        by_leaf = {other.rpartition(".")[2]: other for other in others}
        guess = closest_match(leaf, by_leaf, cutoff)
        if guess:
            return by_leaf[guess]
    return None


def _settings_in(section: str) -> list[str]:
    return [name for name in settings_by_name() if name.rpartition(".")[0] == section]
