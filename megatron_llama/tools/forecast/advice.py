"""Changes of a config that make a run fit: tried, one by one and in twos and threes, not looked up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_llama.config.fields import get
from megatron_llama.config.problems import ConfigError, shown
from megatron_llama.config.settings import OFFLOADED, RECOMPUTE, Config
from megatron_llama.plan.derive import spread
from megatron_llama.plan.job import job_of_plan
from megatron_llama.plan.plan import Plan
from megatron_llama.plan.resolve import varied
from megatron_llama.system.tables import gib
from megatron_llama.tools.forecast.hardware import HardwareSpec, devices
from megatron_llama.tools.forecast.step_time import load_constants, step_time

MOST_CHANGES = 3
SUGGESTED = 3
LARGEST_TP = 8
MOST_DEVICES = 16_384
PRICED_ON = "h100"
"""The device whose times say which change is cheaper; only their order matters."""


@dataclass(frozen=True)
class Change:
    """Settings with which a run fits."""

    settings: Mapping[str, Any]
    world_size: int
    plan: Plan
    slower: float
    """Time of a step with them, times devices, over that without."""

    def describe(self, needed: int, on_host: int) -> str:
        """For a message: the settings, the memory of the device, that of its host (bytes), and what they cost."""
        written = " ".join(f"{name}={shown(value)}" for name, value in self.settings.items())
        grown = self.plan.world_size != self.world_size
        what = "device time" if grown else "time"
        cost = f", {self.slower - 1:+.0%} {what}" if abs(self.slower - 1) >= 0.005 else ""
        beside = f" and {gib(on_host)} of its host" if on_host else ""
        where = f" on a multiple of {self.plan.world_size} devices" if grown else ""
        return f"{written}{where} ({gib(needed)}{beside}{cost})"


def fitting_changes(
    plan: Plan,
    fits: Callable[[Plan], bool],
    again: Callable[[Config, int], Plan] | None,
    *,
    more_devices: bool,
    has_host: bool,
) -> list[Change]:
    """The cheapest three sets of settings with which ``plan`` fits: fewest device-seconds a step, as forecast.

    ``again`` plans another config. One setting is tried alone before two and three together, and with others only if
    it does not do alone; more devices only where nothing fits on those that are there without offloading, and that only
    where a device's memory is not its host's (``has_host``).
    """
    if again is None:
        return []
    device = devices()[PRICED_ON]
    before = _price(plan, device)
    found: list[tuple[dict[str, Any], Plan]] = []
    values = _on_these_devices(plan, has_host)
    hopeless = not any(fits(other) for other in _extremes(plan, values, again))
    for count in range(1, 0 if hopeless else MOST_CHANGES + 1):
        enough = [settings for settings, _ in found]
        tried = _tried(plan, values, count, again, fits)
        found += [each for each in tried if not any(_holds(each[0], settings) for settings in enough)]
        if len(found) >= SUGGESTED or (found and count > 1):  # of three settings there are hundreds of sets
            break

    def cheapest(found: Iterable[tuple[dict[str, Any], Plan]]) -> list[Change]:
        changes = [
            Change(_typed(plan, settings, other), plan.world_size, other, _price(other, device) / before)
            for settings, other in found
        ]
        return sorted(changes, key=lambda change: (change.slower, len(change.settings)))[:SUGGESTED]

    if more_devices and all("trainer.offload" in settings for settings, _ in found):  # which may cost more than they do
        return [*cheapest(found)[: SUGGESTED - 1], *cheapest(_grown(plan, again, fits))][:SUGGESTED]
    return cheapest(found)


def _holds(settings: Mapping[str, Any], enough: Mapping[str, Any]) -> bool:
    """Whether ``settings`` are those that are ``enough``, and more. To offload one thing and to change another is not
    more than to offload both."""
    return enough.keys() <= settings.keys() and enough.get("trainer.offload") in (None, settings.get("trainer.offload"))


def _typed(plan: Plan, settings: Mapping[str, Any], other: Plan) -> dict[str, Any]:
    """What to type after the command for ``other``: what was asked for another grid no longer holds."""
    asked, found = plan.asked.trainer, dict(settings)
    if asked.dp not in (None, other.dp):
        found["trainer.dp"] = other.dp
    for name in ("pipeline_layers", "shard_group"):
        if getattr(asked, name) is not None and getattr(other.asked.trainer, name) is None:
            found[f"trainer.{name}"] = None
    return found


def _price(plan: Plan, device: HardwareSpec) -> float:
    """Device-seconds of a step."""
    return step_time(job_of_plan(plan), device, load_constants()).total * plan.world_size


def _on_these_devices(plan: Plan, has_host: bool) -> dict[str, list[Any]]:
    """By setting: the values that need less memory, the smallest change first."""
    trainer, optim = plan.config.trainer, plan.config.optim
    done = RECOMPUTE.index(trainer.recompute)
    recompute = [more for more in ("elementwise", "full") if RECOMPUTE.index(more) > done]
    even, split = spread(plan.model.num_hidden_layers, trainer.pp), plan.asked.trainer.pipeline_layers
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


def _offloaded(plan: Plan) -> list[list[str]]:
    """Values of trainer.offload with more in it: one or the other, then both."""
    there, step_is_here = plan.config.trainer.offload, "trainer.offload" in plan.config.optim.row.refuses
    more = [what for what in OFFLOADED if what not in there and not (what == "optimizer" and step_is_here)]
    chosen = [*([what] for what in more), *([more] if len(more) > 1 else [])]
    return [[what for what in OFFLOADED if what in there or what in added] for added in chosen]


def _extremes(plan: Plan, values: Mapping[str, list[Any]], again: Callable[[Config, int], Plan]) -> Iterator[Plan]:
    """Plans with every setting at its most, for each grid, and each with 8-bit states and without: not every grid
    leaves their blocks whole."""
    most = {name: options[-1] for name, options in values.items() if name != "trainer.pipeline_layers"}
    among = ("trainer.tp", "trainer.pp", "optim.state_bits")
    for chosen in itertools.product(*([get(plan.config, name), *values.get(name, [])] for name in among)):
        if other := _planned(plan, {**most, **dict(zip(among, chosen, strict=True))}, plan.world_size, again):
            yield other


def _halves(size: int) -> list[int]:
    return [size // 2**power for power in range(1, size.bit_length()) if size % 2**power == 0]


def _tried(
    plan: Plan,
    values: Mapping[str, list[Any]],
    count: int,
    again: Callable[[Config, int], Plan],
    fits: Callable[[Plan], bool],
) -> Iterator[tuple[dict[str, Any], Plan]]:
    """Sets of ``count`` settings that fit. Of each set's last setting the smallest change that does."""
    for names in itertools.combinations(values, count):
        *others, last = names
        for chosen in itertools.product(*(values[name] for name in others)):
            for value in values[last]:
                settings = {**dict(zip(others, chosen, strict=True)), last: value}
                other = _planned(plan, settings, plan.world_size, again)
                if other is not None and fits(other):
                    yield settings, other
                    break


def _grown(
    plan: Plan, again: Callable[[Config, int], Plan], fits: Callable[[Plan], bool]
) -> Iterator[tuple[dict[str, Any], Plan]]:
    """Larger grids, on the fewest devices that do, with and without recomputation: all of them one copy of the model,
    or tensor parallelism with ZeRO 3 over the rest."""
    trainer = plan.config.trainer
    for world in (plan.world_size * 2**power for power in range(MOST_DEVICES.bit_length())):
        if world > MOST_DEVICES:
            return
        found = []
        grids = [(tp, max(1, world // tp), trainer.zero) for tp in (8, 4, 2, 1)]
        grids += [(tp, 1, 3) for tp in (8, 4, 2, 1) if tp < world]
        for tp, pp, zero in grids:
            for recompute in dict.fromkeys((trainer.recompute, "full")):
                settings = {"trainer.tp": tp, "trainer.pp": pp, "trainer.zero": zero, "trainer.recompute": recompute}
                settings |= {"trainer.micro_batch_size": 1} if trainer.micro_batch_size > 1 else {}
                other = _planned(plan, settings, world, again)
                if other is not None and fits(other):
                    same = {name: value for name, value in settings.items() if value != get(plan.config, name)}
                    found.append((same, other))
                    break
        if found:
            yield from found
            return


def _planned(plan: Plan, settings: Mapping[str, Any], world: int, again: Callable[[Config, int], Plan]) -> Plan | None:
    """The plan with other settings; None where they break a rule."""
    try:
        return again(varied(plan.asked, settings, plan.config.optim), world)
    except ConfigError:
        return None
