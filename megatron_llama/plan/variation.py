"""Configs that differ from one in a few settings: to plan what else could be run."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from megatron_llama.config.fields import get
from megatron_llama.config.settings import Config, OptimConfig
from megatron_llama.topology import AXES


def varied(config: Config, settings: Mapping[str, Any], optim: OptimConfig | None = None) -> Config:
    """A copy of ``config``, as it was asked for, with other ``settings`` by their full names.

    Data are made up, and no memory is stated, so that nothing is refused for what is tried by itself. With another tp
    or pp, what follows from them is derived again unless it is among the settings. ``optim`` is the derived one, where
    it is known: to resolve the schedule again takes most of the time of a plan.
    """
    config = deepcopy(config)
    if optim is not None:
        config.optim = deepcopy(optim)
    config.data.mock, config.data.prefixes, config.device.memory_gib = True, [], None
    if any(f"trainer.{axis.name}" in settings for axis in AXES if not axis.is_derived):
        config.trainer.dp = None  # what the others leave
        config.trainer.shard_group = None
    if "trainer.pp" in settings:
        config.trainer.pipeline_layers = None
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        setattr(get(config, section), key, value)
    return config
