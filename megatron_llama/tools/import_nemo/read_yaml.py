"""Read a config of NeMo, neuronx-nemo-megatron or NxDT with command-line overrides as flat keys."""

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
from omegaconf.resolvers import oc

from megatron_llama.config.problems import ConfigError, Problem
from megatron_llama.config.text_checks import check_interpolations, names_secret
from megatron_llama.system.files import check_yaml
from megatron_llama.tools.import_nemo import nemo_keys as keys


def _multiply(item: Any, other: Any) -> int:
    """Resolve NeMo's ``multiply`` for integers only, to prevent long repeated strings."""
    return int(item) * int(other)


def load(path: Path, overrides: Sequence[str]) -> DictConfig:
    """Load the file and apply the overrides."""
    problems: list[Problem] = []
    config = OmegaConf.create({})  # overrides are checked even if the file is unusable
    try:
        check_yaml(path)
        content = OmegaConf.load(path)
        if isinstance(content, DictConfig) and isinstance(content.get("model"), DictConfig):
            config = content
        else:
            rule = "has no model section; it is not a config of NeMo, neuronx-nemo-megatron or NxDT"
            instead = "write the YAML of the training script"
            problems.append(Problem("file", str(path), rule, instead))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        reason = str(error.strerror) if isinstance(error, OSError) else " ".join(str(error).split())
        problems.append(
            Problem("file", str(path), f"cannot be read as YAML: {reason}", "write the path of a YAML file")
        )
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
            problems.append(Problem("override", text, rule, "write it as in model.num_layers=32"))
    problems += check_interpolations(config, functions=True)
    if problems:
        raise ConfigError(problems)
    return config


def _delete(config: DictConfig, name: str) -> None:
    above, _, key = name.rpartition(".")
    section = OmegaConf.select(config, above) if above else config
    if not isinstance(section, DictConfig) or key not in section.keys():  # noqa: SIM118 - a key may have no value
        raise ValueError(f"the file has no key {name} to delete")
    del section[key]


def flat(config: DictConfig) -> dict[str, Any]:
    """Return {key: value} of all leaves, with interpolations resolved if possible; ??? becomes None.

    NeMo's model.data.X becomes data.X, as in NxDT.
    """
    OmegaConf.register_new_resolver("multiply", _multiply, replace=True)
    OmegaConf.register_new_resolver("oc.env", _environment, replace=True)
    return {key.removeprefix("model.") if key.startswith("model.data.") else key: v for key, v in _leaves(config, "")}


def _environment(variable: str, *default: str) -> str | None:
    """Resolve ``${oc.env:...}`` as omegaconf does. Secrets stay unresolved, or the recipe would contain them."""
    if names_secret(variable):
        raise ValueError(f"{variable} is the name of a secret")
    return oc.env(variable, *default)


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
            # A resolver of the original program, or a key of another file (${data_dir} of the launcher).
            plain = OmegaConf.to_container(config, resolve=False)[name]  # type: ignore[call-overload, index]
            value = config._get_node(name)
        if isinstance(value, DictConfig) and value and not key.endswith("data_prefix"):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, plain


def find_open_reference(value: Any) -> str:
    """Return the first unresolved interpolation in a value, or an empty string."""
    if isinstance(value, list | Mapping):
        inner = value.values() if isinstance(value, Mapping) else value
        return next(filter(None, map(find_open_reference, inner)), "")
    return value if isinstance(value, str) and "${" in value else ""


# Record of a conversion.


TAKEN, RENAMED, MEANINGLESS = "taken", "renamed", "without meaning here"
SAME_TRAINING = "not supported: the training is the same"
UNSUPPORTED = "not supported: the training will differ"
KINDS = (TAKEN, RENAMED, MEANINGLESS, SAME_TRAINING, UNSUPPORTED)


@dataclass(frozen=True)
class KeyConversion:
    """Conversion of one key."""

    key: str
    value: Any
    kind: str
    setting: str = ""
    """Resulting setting, in command-line syntax."""
    why: str = ""


@dataclass
class ConvertedConfig:
    """Result of the conversion of a file."""

    name: str
    """Name of the run in the file."""
    settings: dict[str, Any] = field(default_factory=dict)
    """{setting: value} of this project."""
    schedule: str = "cosine"
    """File of conf/optim/ with the schedule."""
    conversions: list[KeyConversion] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    """Assumed values that the file does not define."""
    world_size: int | None = None
    """Number of devices in the file, or None."""

    @property
    def unsupported(self) -> list[KeyConversion]:
        """Keys that are not supported and change the result."""
        return [item for item in self.conversions if item.kind == UNSUPPORTED]


def convert_unread(key: str, value: Any) -> KeyConversion:
    """Convert a key that no subject has read: by supported values, without effect here, or unknown."""
    if key in keys.SUPPORTED_VALUES:
        allowed, why = keys.SUPPORTED_VALUES[key]
        if value is None or value in allowed:
            return KeyConversion(key, value, MEANINGLESS, why="off" if value in (None, False) else "always so here")
        return KeyConversion(key, value, UNSUPPORTED, why=why)
    section = next((item for item in keys.SUPPORTED_VALUES if key.startswith(f"{item}.")), None)
    if section is not None:
        return KeyConversion(key, value, UNSUPPORTED if value else MEANINGLESS, why=keys.SUPPORTED_VALUES[section][1])
    for patterns, why in keys.IGNORED_KEYS:
        if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
            return KeyConversion(key, value, MEANINGLESS, why=why)
    if value in (None, False, [], {}):
        return KeyConversion(key, value, MEANINGLESS, why="off")
    return KeyConversion(key, value, UNSUPPORTED, why="unknown key")
