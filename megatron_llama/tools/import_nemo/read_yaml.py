"""Read a config of NeMo, neuronx-nemo-megatron or NxDT with command-line overrides as flat keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
