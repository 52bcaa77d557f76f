"""The fewest devices that a run fits on, and ends in time on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_llama.system.text_table import text_table
from megatron_llama.system.units import gib
from megatron_llama.tools.plan.forecast_run import MOST_DEVICES, forecast_plan
from megatron_llama.tools.tune.candidates import Candidate, Space, Tuned
from megatron_llama.tools.tune.target import Target


@dataclass(frozen=True)
class Count:
    """A number of devices that was looked at."""

    tuned: Tuned
    space: Space
    days: float | None
    """Of the whole run with the fastest settings, failures and checkpoints included; None where nothing fits."""

    @property
    def fastest(self) -> Candidate | None:
        """The fastest settings by forecast."""
        return self.space.candidates[0] if self.space.candidates else None


def numbers(target: Target, most: int) -> Iterator[int]:
    """Numbers of devices to look at: those that divide a node, then 1, 2, 3, 4, 6, 8, 12, ... nodes, up to ``most``."""
    yield from (n for n in range(1, target.per_node + 1) if target.per_node % n == 0 and n <= most)
    nodes = sorted({times << power for times in (1, 3) for power in range(MOST_DEVICES.bit_length())})
    yield from (n * target.per_node for n in nodes if 1 < n and n * target.per_node <= most)


def most_devices(target: Target, bounded: bool) -> int:
    """The most to look at: what there is, where the user has said so or it is here."""
    return target.ranks if bounded or target.here else MOST_DEVICES


def enough(tuned: Tuned, days: float | None, most: int, sure: float, progress: Callable[[int], None]) -> list[Count]:
    """What was looked at, up to the first number of devices on which the run fits and ends within ``days``."""
    found: list[Count] = []
    for number in numbers(tuned.target, most):
        part = Tuned(tuned.config, tuned.kept, tuned.target.part(number), tuned.more)
        space = part.space(sure=sure)
        best = space.candidates[0] if space.candidates else None
        found.append(Count(part, space, _days(part, best) if best else None))
        progress(len(found))
        if best and (days is None or (found[-1].days or 0.0) <= days):
            break
    return found


def _days(tuned: Tuned, best: Candidate) -> float:
    target, plan = tuned.target, tuned.plan(best.settings, best.ranks)
    return forecast_plan(plan, target.cluster, target.rank_device(best.ranks), best.ranks).days


def table_lines(found: list[Count]) -> Iterator[str]:
    """A row for each number of devices."""
    rows = [["devices", "sets that fit", "fastest: s a step", "days", "memory", "tp", "pp", "dp", "zero"]]
    for each in found:
        best, days = each.fastest, each.days
        row = [f"{each.tuned.target.ranks:,}", f"{len(each.space.candidates):,}"]
        if best is not None and days is not None:
            row += [f"{best.seconds:.4g}", f"{days:,.3g}", gib(best.needs)]
            row += [str(best.settings[f"trainer.{name}"]) for name in ("tp", "pp", "dp", "zero")]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    yield from text_table(rows, left=0)
