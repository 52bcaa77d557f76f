"""Config changes with which a run fits into memory, found by planning each combination of up to three settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_llama.config.problems import ConfigError, format_value
from megatron_llama.config.settings import OFFLOADED, RECOMPUTE, Config
from megatron_llama.config.settings_table import get
from megatron_llama.plan.forecast_job import job_of_plan
from megatron_llama.plan.plan import Plan
from megatron_llama.plan.resolve import change_settings
from megatron_llama.plan.stage_split import split_evenly
from megatron_llama.system.tables import gib
from megatron_llama.tools.forecast.hardware import HardwareSpec, devices
from megatron_llama.tools.forecast.step_time import load_constants, step_time

Match = tuple[dict[str, Any], Plan]
"""Changed settings, and the plan with them."""
MOST_CHANGES = 3
SUGGESTED = 3
LARGEST_TP = 8
MOST_DEVICES = 16_384
PRICED_ON = "h100"
"""Device whose forecast step times rank the changes. Only their order is used."""


@dataclass(frozen=True)
class Change:
    """Settings with which a run fits, and their cost."""

    settings: Mapping[str, Any]
    world_size: int
    plan: Plan
    slower: float
    """Device-seconds of a step with the settings, divided by the device-seconds without them."""

    def describe(self, needed: int, on_host: int) -> str:
        """Format the change for a message: settings, bytes on the device and on its host, and cost."""
        written = " ".join(f"{name}={format_value(value)}" for name, value in self.settings.items())
        grown = self.plan.world_size != self.world_size
        unit = "device time" if grown else "time"
        cost = f", {self.slower - 1:+.0%} {unit}" if abs(self.slower - 1) >= 0.005 else ""
        host = f" and {gib(on_host)} of its host" if on_host else ""
        where = f" on a multiple of {self.plan.world_size} devices" if grown else ""
        return f"{written}{where} ({gib(needed)}{host}{cost})"


def fitting_changes(
    plan: Plan,
    fits: Callable[[Plan], bool],
    replan: Callable[[Config, int], Plan] | None,
    *,
    more_devices: bool,
    has_host: bool,
) -> list[Change]:
    """Return the three cheapest sets of settings with which ``plan`` fits, by forecast device-seconds per step.

    Single settings are tried first, then pairs, then triples. A setting that suffices alone is not combined further.
    More devices, and weights without fp32 master copies, are suggested only if nothing else fits on the present devices
    without offloading.

    Args:
        replan: returns the plan of a config on a number of ranks; raises ConfigError.
        more_devices: whether larger grids are tried.
        has_host: whether the host's memory is separate from the device's, so that offloading helps.
    """
    if replan is None:
        return []
    trials = _Trials(plan, fits, replan)
    device = devices()[PRICED_ON]
    before = _price(plan, device)
    matches: list[Match] = []
    values = _on_these_devices(plan, has_host)
    for count in range(1, MOST_CHANGES + 1 if trials.can_fit(values) else 1):
        sufficient = [settings for settings, _ in matches]
        fitting = trials.fitting_sets(values, count)
        matches += [each for each in fitting if not any(_includes(each[0], settings) for settings in sufficient)]
        if len(matches) >= SUGGESTED or (matches and count > 1):  # there are hundreds of sets of three settings
            break

    def cheapest(matches: Iterable[Match]) -> list[Change]:
        changes = [
            Change(_overrides(plan, settings, other), plan.world_size, other, _price(other, device) / before)
            for settings, other in matches
        ]
        return sorted(changes, key=lambda change: (change.slower, len(change.settings)))[:SUGGESTED]

    if any("trainer.offload" not in settings for settings, _ in matches):
        return cheapest(matches)
    # Without master weights a step takes no longer than offloaded, but the results differ.
    here = [*cheapest(trials.without_master_weights()), *cheapest(matches)]
    if not more_devices:
        return here[:SUGGESTED]
    # Offloading may cost more than additional devices: suggest both.
    return [*here[: SUGGESTED - 1], *cheapest(trials.larger_grids())][:SUGGESTED]


def _includes(settings: Mapping[str, Any], sufficient: Mapping[str, Any]) -> bool:
    """Whether ``settings`` only add to a ``sufficient`` set; other values of trainer.offload do not."""
    same_offload = sufficient.get("trainer.offload") in (None, settings.get("trainer.offload"))
    return sufficient.keys() <= settings.keys() and same_offload


def _overrides(plan: Plan, settings: Mapping[str, Any], other: Plan) -> dict[str, Any]:
    """Return the overrides that lead from ``plan`` to ``other``; settings that are invalid on its grid are reset."""
    requested, overrides = plan.requested.trainer, dict(settings)
    if requested.dp not in (None, other.dp):
        overrides["trainer.dp"] = other.dp
    for name in ("pipeline_layers", "shard_group"):
        if getattr(requested, name) is not None and getattr(other.requested.trainer, name) is None:
            overrides[f"trainer.{name}"] = None
    return overrides


def _price(plan: Plan, device: HardwareSpec) -> float:
    """Return the forecast device-seconds of a step."""
    return step_time(job_of_plan(plan), device, load_constants()).total * plan.world_size


def _on_these_devices(plan: Plan, has_host: bool) -> dict[str, list[Any]]:
    """Return for each setting the values that need less memory, smallest change first."""
    trainer, optim = plan.config.trainer, plan.config.optim
    current = RECOMPUTE.index(trainer.recompute)
    recompute = [more for more in ("elementwise", "full") if RECOMPUTE.index(more) > current]
    even, split = split_evenly(plan.model.num_hidden_layers, trainer.pp), plan.requested.trainer.pipeline_layers
    size = trainer.micro_batch_size
    powers = [2**power for power in range(1, size.bit_length())]
    values: dict[str, list[Any]] = {
        "trainer.pipeline_layers": [even] if split is None and trainer.pipeline_layers != even else [],
        "trainer.zero": list(range(trainer.zero + 1, 4)) if plan.data_ranks > 1 else [],
        "trainer.recompute": recompute,
        "trainer.micro_batch_size": [size // times for times in powers if size % times == 0],
        "trainer.precision": ["bf16"] if plan.precision.compute_format == "fp32" else [],
        "trainer.tp": [trainer.tp * times for times in (2, 4, 8) if trainer.tp * times <= LARGEST_TP],
        "trainer.pp": [trainer.pp * times for times in (2, 4, 8, 16) if trainer.pp * times <= plan.world_size],
        "optim.state_bits": [8] if optim.state_bits is None and "optim.state_bits" not in optim.row.refuses else [],
        "trainer.offload": _offloaded(plan) if has_host else [],
    }
    return {name: options for name, options in values.items() if options}


def _offloaded(plan: Plan) -> list[list[str]]:
    """Return larger values of trainer.offload: each addition alone, then all."""
    current, step_on_device = plan.config.trainer.offload, "trainer.offload" in plan.config.optim.row.refuses
    more = [kind for kind in OFFLOADED if kind not in current and not (kind == "optimizer" and step_on_device)]
    additions = [*([kind] for kind in more), *([more] if len(more) > 1 else [])]
    return [[kind for kind in OFFLOADED if kind in current or kind in added] for added in additions]


class _Trials:
    """Plans with changed settings that fit."""

    def __init__(self, plan: Plan, fits: Callable[[Plan], bool], replan: Callable[[Config, int], Plan]) -> None:
        """Arguments as ``fitting_changes``."""
        self._plan, self._fits, self._replan = plan, fits, replan

    def _fitting(self, settings: Mapping[str, Any], world_size: int | None = None) -> Plan | None:
        """Return the plan with changed settings; None if they break a rule or do not fit."""
        requested, optim = self._plan.requested, self._plan.config.optim
        try:
            plan = self._replan(change_settings(requested, settings, optim), world_size or self._plan.world_size)
        except ConfigError:
            return None
        return plan if self._fits(plan) else None

    def can_fit(self, values: Mapping[str, list[Any]]) -> bool:
        """Whether the settings of least memory fit: the last ``values``, for each grid, with and without 8-bit states.

        Some grids cut the blocks of 8-bit states, which a rule forbids.
        """
        most = {name: options[-1] for name, options in values.items() if name != "trainer.pipeline_layers"}
        among = ("trainer.tp", "trainer.pp", "optim.state_bits")
        options = ([get(self._plan.config, name), *values.get(name, [])] for name in among)
        grids = (dict(zip(among, chosen, strict=True)) for chosen in itertools.product(*options))
        return any(self._fitting({**most, **grid}) is not None for grid in grids)

    def fitting_sets(self, values: Mapping[str, list[Any]], count: int) -> Iterator[Match]:
        """Yield sets of ``count`` settings that fit, each with the smallest sufficient change of its last setting."""
        for names in itertools.combinations(values, count):
            *others, last = names
            for chosen in itertools.product(*(values[name] for name in others)):
                for value in values[last]:
                    settings = {**dict(zip(others, chosen, strict=True)), last: value}
                    if (plan := self._fitting(settings)) is not None:
                        yield settings, plan
                        break

    def without_master_weights(self) -> list[Match]:
        """Return bf16 weights with stochastic rounding, alone or with full recomputation, if they fit here."""
        if self._plan.precision.param_dtype != "float32":
            return []
        full = {"trainer.recompute": "full"} if self._plan.config.trainer.recompute != "full" else {}
        for more in ({}, full):
            settings = {"trainer.precision": "bf16_sr", **more}
            if (plan := self._fitting(settings)) is not None:
                return [(settings, plan)]
        return []

    def larger_grids(self) -> list[Match]:
        """Return the grids that fit on the smallest sufficient number of devices, with and without recomputation.

        A grid either holds one copy of the model (tp x pp) or combines tensor parallelism with ZeRO 3.
        """
        trainer, world, matches = self._plan.config.trainer, self._plan.world_size, list[Match]()
        while not matches and world <= MOST_DEVICES:
            grids = [(tp, max(1, world // tp), trainer.zero) for tp in (8, 4, 2, 1)]
            grids += [(tp, 1, 3) for tp in (8, 4, 2, 1) if tp < world]
            for tp, pp, zero in grids:
                for recompute in dict.fromkeys((trainer.recompute, "full")):
                    settings: dict[str, Any] = {"trainer.tp": tp, "trainer.pp": pp, "trainer.zero": zero}
                    settings |= {"trainer.recompute": recompute}
                    settings |= {"trainer.micro_batch_size": 1} if trainer.micro_batch_size > 1 else {}
                    if (plan := self._fitting(settings, world)) is not None:
                        config = self._plan.config
                        changed = {name: value for name, value in settings.items() if value != get(config, name)}
                        matches.append((changed, plan))
                        break
            world *= 2
        return matches
