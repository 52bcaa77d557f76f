"""Configs for tests, made by naming only what differs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from megatron_llama.config import Config, ConfigError, Problem, RopeScaling, load_config
from megatron_llama.config.settings import RandomLTD, SparseAttention
from megatron_llama.plan import Machine, resolve
from tests.paths import CONF

SECTIONS = {"rope_scaling": RopeScaling, "sparse_attention": SparseAttention, "random_ltd": RandomLTD}
"""Sections that are null by default."""


def make(**changes: Any) -> Config:
    """Return a config of mock data, valid for any world size, with changes: ``make(**{"trainer.tp": 2})``."""
    config = Config()
    config.data.mock = True
    for name, value in changes.items():
        put(config, name, value)
    return config


def put(config: Config, name: str, value: Any) -> None:
    """Sets one setting by its full name."""
    *sections, key = name.split(".")
    owner: Any = config
    for section in sections:
        if getattr(owner, section) is None:
            setattr(owner, section, SECTIONS[section]())
        owner = getattr(owner, section)
    assert hasattr(owner, key), f"there is no {name}; the test would prove nothing"
    setattr(owner, key, value)


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings of a YAML file by full name."""
    by_name: dict[str, Any] = {}
    for name, value in tree.items():
        by_name |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return by_name


def problems_of(config: Config, world: int = 1, machine: Machine | None = None, **options: Any) -> list[Problem]:
    """The problems that ``resolve`` finds in a config; none where it works."""
    try:
        resolve(config, world, machine, **options)
    except ConfigError as error:
        return list(error.problems)
    return []


def refused(*overrides: str, conf: Path = CONF) -> list[Problem]:
    """The problems that load_config raises; it must raise."""
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, conf)
    return list(caught.value.problems)


def as_typed(advice: str) -> tuple[str, Any]:
    """``name=value`` from a message, as a shell and then Hydra's grammar read it."""
    (word,) = shlex.split(advice)
    override = OverridesParser.create().parse_override(word)
    assert not override.is_sweep_override(), f"{advice} would be refused"
    return override.key_or_group, override.value()


def everything_exists(path: str) -> bool:
    """Stands in for os.path.exists, for plans of other machines."""
    return True
