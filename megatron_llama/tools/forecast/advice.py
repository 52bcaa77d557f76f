"""Config changes with which a run fits into memory, found by planning each combination of up to three settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_llama.config.fields import get
from megatron_llama.config.problems import ConfigError, format_value
from megatron_llama.config.settings import OFFLOADED, RECOMPUTE, Config
from megatron_llama.plan.derive import split_evenly
from megatron_llama.plan.job import job_of_plan
from megatron_llama.plan.plan import Plan
from megatron_llama.plan.resolve import change_settings
from megatron_llama.system.tables import gib
from megatron_llama.tools.forecast.hardware import HardwareSpec, devices
from megatron_llama.tools.forecast.step_time import load_constants, step_time

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
    device = devices()[PRICED_ON]
    before = _price(plan, device)
    matches: list[tuple[dict[str, Any], Plan]] = []
    values = _on_these_devices(plan, has_host)
    can_fit = any(fits(other) for other in _extremes(plan, values, replan))
    for count in range(1, MOST_CHANGES + 1 if can_fit else 1):
        sufficient = [settings for settings, _ in matches]
        fitting = _fitting_sets(plan, values, count, replan, fits)
        matches += [each for each in fitting if not any(_includes(each[0], settings) for settings in sufficient)]
        if len(matches) >= SUGGESTED or (matches and count > 1):  # there are hundreds of sets of three settings
            break

    def cheapest(matches: Iterable[tuple[dict[str, Any], Plan]]) -> list[Change]:
        changes = [
            Change(_overrides(plan, settings, other), plan.world_size, other, _price(other, device) / before)
            for settings, other in matches
        ]
        return sorted(changes, key=lambda change: (change.slower, len(change.settings)))[:SUGGESTED]

    if any("trainer.offload" not in settings for settings, _ in matches):
        return cheapest(matches)
    # Without master weights a step takes no longer than offloaded, but the results differ.
    here = [*cheapest(_without_master_weights(plan, replan, fits)), *cheapest(matches)]
    if not more_devices:
        return here[:SUGGESTED]
    # Offloading may cost more than additional devices: suggest both.
    return [*here[: SUGGESTED - 1], *cheapest(_larger_grids(plan, replan, fits))][:SUGGESTED]


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
    values: dict[str, list[Any]] = {
        "trainer.pipeline_layers": [even] if split is None and trainer.pipeline_layers != even else [],
        "trainer.zero": list(range(trainer.zero + 1, 4)) if plan.data_ranks > 1 else [],
        "trainer.recompute": recompute,
        "trainer.micro_batch_size": _halves(trainer.micro_batch_size),
        "trainer.precision": ["bf16"] if plan.precision.compute_format == "fp32" else [],
        "trainer.tp": [trainer.tp * times for times in (2, 4, 8) if trainer.tp * times <= LARGEST_TP],
        "trainer.pp": [trainer.pp * times for times in (2, 4, 8, 16) if trainer.pp * times <= plan.world_size],
        "optim.state_bits": [8] if optim.state_bits is None and "optim.state_bits" not in optim.row.refuses else [],
        "trainer.offload": _offloaded(plan) if has_host else [],
    }
    return {name: options for name, options in values.items() if options}


def _without_master_weights(
    plan: Plan, replan: Callable[[Config, int], Plan], fits: Callable[[Plan], bool]
) -> list[tuple[dict[str, Any], Plan]]:
    """Return bf16 weights with stochastic rounding, alone or with full recomputation, if they fit on these devices."""
    if plan.precision.param_dtype != "float32":
        return []
    settings = {"trainer.precision": "bf16_sr"}
    for more in ({}, {"trainer.recompute": "full"} if plan.config.trainer.recompute != "full" else {}):
        other = _plan_with(plan, settings | more, plan.world_size, replan)
        if other is not None and fits(other):
            return [(settings | more, other)]
    return []


def _offloaded(plan: Plan) -> list[list[str]]:
    """Return larger values of trainer.offload: each addition alone, then all."""
    current, step_on_device = plan.config.trainer.offload, "trainer.offload" in plan.config.optim.row.refuses
    more = [kind for kind in OFFLOADED if kind not in current and not (kind == "optimizer" and step_on_device)]
    additions = [*([kind] for kind in more), *([more] if len(more) > 1 else [])]
    return [[kind for kind in OFFLOADED if kind in current or kind in added] for added in additions]


def _extremes(plan: Plan, values: Mapping[str, list[Any]], replan: Callable[[Config, int], Plan]) -> Iterator[Plan]:
    """Yield the plans of least memory: each setting at its last value, for each grid, with and without 8-bit states.

    Some grids cut the blocks of 8-bit states, which a rule forbids.
    """
    most = {name: options[-1] for name, options in values.items() if name != "trainer.pipeline_layers"}
    among = ("trainer.tp", "trainer.pp", "optim.state_bits")
    for chosen in itertools.product(*([get(plan.config, name), *values.get(name, [])] for name in among)):
        if other := _plan_with(plan, {**most, **dict(zip(among, chosen, strict=True))}, plan.world_size, replan):
            yield other


def _halves(size: int) -> list[int]:
    return [size // 2**power for power in range(1, size.bit_length()) if size % 2**power == 0]


def _fitting_sets(
    plan: Plan,
    values: Mapping[str, list[Any]],
    count: int,
    replan: Callable[[Config, int], Plan],
    fits: Callable[[Plan], bool],
) -> Iterator[tuple[dict[str, Any], Plan]]:
    """Yield sets of ``count`` settings that fit, each with the smallest sufficient change of its last setting."""
    for names in itertools.combinations(values, count):
        *others, last = names
        for chosen in itertools.product(*(values[name] for name in others)):
            for value in values[last]:
                settings = {**dict(zip(others, chosen, strict=True)), last: value}
                other = _plan_with(plan, settings, plan.world_size, replan)
                if other is not None and fits(other):
                    yield settings, other
                    break


def _larger_grids(
    plan: Plan, replan: Callable[[Config, int], Plan], fits: Callable[[Plan], bool]
) -> Iterator[tuple[dict[str, Any], Plan]]:
    """Yield the grids that fit on the smallest sufficient number of devices, with and without recomputation.

    A grid either holds one copy of the model (tp x pp) or combines tensor parallelism with ZeRO 3.
    """
    trainer = plan.config.trainer
    for world in (plan.world_size * 2**power for power in range(MOST_DEVICES.bit_length())):
        if world > MOST_DEVICES:
            return
        matches = []
        grids = [(tp, max(1, world // tp), trainer.zero) for tp in (8, 4, 2, 1)]
        grids += [(tp, 1, 3) for tp in (8, 4, 2, 1) if tp < world]
        for tp, pp, zero in grids:
            for recompute in dict.fromkeys((trainer.recompute, "full")):
                settings = {"trainer.tp": tp, "trainer.pp": pp, "trainer.zero": zero, "trainer.recompute": recompute}
                settings |= {"trainer.micro_batch_size": 1} if trainer.micro_batch_size > 1 else {}
                other = _plan_with(plan, settings, world, replan)
                if other is not None and fits(other):
                    changed = {name: value for name, value in settings.items() if value != get(plan.config, name)}
                    matches.append((changed, other))
                    break
        if matches:
            yield from matches
            return


def _plan_with(
    plan: Plan, settings: Mapping[str, Any], world: int, replan: Callable[[Config, int], Plan]
) -> Plan | None:
    """Return the plan with changed settings; None if they break a rule."""
    try:
        return replan(change_settings(plan.requested, settings, plan.config.optim), world)
    except ConfigError:
        return None
