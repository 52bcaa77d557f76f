"""Reads a config of NeMo, neuronx-nemo-megatron or NxDT as flat keys, with the overrides of its command line."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_llama.config.load_config import check_interpolations
from megatron_llama.config.problems import ConfigError, Problem
from megatron_llama.system.files import check_yaml
from megatron_llama.tools.import_nemo import nemo_keys as keys


def _multiply(one: Any, other: Any) -> int:
    """NeMo's resolver, of whole numbers only; two texts must not become a long one."""
    return int(one) * int(other)


def load(path: Path, overrides: Sequence[str]) -> DictConfig:
    """The file with the overrides in it."""
    problems: list[Problem] = []
    config = OmegaConf.create({})  # where the file is of no use, the overrides are still checked
    try:
        check_yaml(path)
        content = OmegaConf.load(path)
        if isinstance(content, DictConfig) and isinstance(content.get("model"), DictConfig):
            config = content
        else:
            rule = "has no model section, as NeMo's, neuronx-nemo-megatron's and NxDT's configs have"
            instead = "name the YAML that their training script is started with"
            problems.append(Problem("file", str(path), rule, instead))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        reason = str(error.strerror) if isinstance(error, OSError) else " ".join(str(error).split())
        problems.append(Problem("file", str(path), f"can't be read as YAML: {reason}", "name a YAML file"))
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
            if not override.key_or_group or override.is_sweep_override():
                raise ValueError("an override is one name and one value")
            if override.is_delete():
                _delete(config, override.key_or_group)
            else:
                OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            rule = f"is not an override: {str(error).splitlines()[0]}"
            problems.append(Problem("override", text, rule, "write it as on their command line: model.num_layers=32"))
    problems += check_interpolations(config, functions=True)
    if problems:
        raise ConfigError(problems)
    return config


def _delete(config: DictConfig, name: str) -> None:
    above, _, key = name.rpartition(".")
    section = OmegaConf.select(config, above) if above else config
    if not isinstance(section, DictConfig) or key not in section.keys():  # noqa: SIM118 - a key can have no value yet
        raise ValueError(f"the file has no {name} that could be deleted")
    del section[key]


def flat(config: DictConfig) -> dict[str, Any]:
    """{key: value} of all leaves, interpolations resolved where they can be, NeMo's multiply too; ??? becomes None.

    NeMo's data section gets the name that NxDT's has, so that both are read alike: data.X, not model.data.X.
    """
    OmegaConf.register_new_resolver("multiply", _multiply, replace=True)
    return {key.removeprefix("model.") if key.startswith("model.data.") else key: v for key, v in _leaves(config, "")}


def _leaves(config: DictConfig, prefix: str) -> Iterator[tuple[str, Any]]:
    for name in config:
        key = prefix + str(name)
        if OmegaConf.is_missing(config, name):
            yield key, None
            continue
        try:
            value = config[name]
            plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, ValueError):
            # A resolver of their program (${multiply:...}), or a key of another file (the launcher's ${data_dir}).
            plain = OmegaConf.to_container(config, resolve=False)[name]  # type: ignore[call-overload, index]
            value = config._get_node(name)
        if isinstance(value, DictConfig) and value and not key.endswith("data_prefix"):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, plain


def open_reference(value: Any) -> str:
    """The first text in a value that refers to what its file does not have; empty where none does."""
    if isinstance(value, list | Mapping):
        inner = value.values() if isinstance(value, Mapping) else value
        return next(filter(None, map(open_reference, inner)), "")
    return value if isinstance(value, str) and "${" in value else ""


# What becomes of the keys of a NeMo, neuronx-nemo-megatron or NxDT file: the record of a conversion.


TAKEN, RENAMED, MEANINGLESS = "taken", "renamed", "without meaning here"
SAME = "not supported: the training is the same"
UNSUPPORTED = "not supported: the training will differ"
KINDS = (TAKEN, RENAMED, MEANINGLESS, SAME, UNSUPPORTED)


@dataclass(frozen=True)
class Found:
    """One key of the source and what becomes of it."""

    key: str
    value: Any
    kind: str
    ours: str = ""
    """The setting it was converted to, as on a command line."""
    why: str = ""


@dataclass
class Converted:
    """What a file means here."""

    name: str
    """The file's own name for the run."""
    settings: dict[str, Any] = field(default_factory=dict)
    """{setting: value} in our names."""
    schedule: str = "cosine"
    """Which file of conf/optim/ has the schedule."""
    found: list[Found] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    """What the file leaves open, and the value that was assumed."""
    world_size: int | None = None
    """Devices that the file names, or None."""

    @property
    def unsupported(self) -> list[Found]:
        """The keys whose neglect changes the result."""
        return [one for one in self.found if one.kind == UNSUPPORTED]


def unread(key: str, value: Any) -> Found:
    """A key that no subject has read: supported with some values only, without meaning here, or unknown."""
    if key in keys.ONLY:
        allowed, why = keys.ONLY[key]
        if value is None or value in allowed:
            return Found(key, value, MEANINGLESS, why="off" if value in (None, False) else "as it always is here")
        return Found(key, value, UNSUPPORTED, why=why)
    section = next((one for one in keys.ONLY if key.startswith(f"{one}.")), None)
    if section is not None:
        return Found(key, value, UNSUPPORTED if value else MEANINGLESS, why=keys.ONLY[section][1])
    for patterns, why in keys.WITHOUT_MEANING:
        if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
            return Found(key, value, MEANINGLESS, why=why)
    if value in (None, False, [], {}):
        return Found(key, value, MEANINGLESS, why="off")
    return Found(key, value, UNSUPPORTED, why="an unknown key, so what it changes is unknown too")
