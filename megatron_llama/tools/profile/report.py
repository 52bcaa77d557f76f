"""Profile files about all ranks: text, JSON and a picture of memory."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_llama.arch.flops import flops_per_token
from megatron_llama.plan import Plan, layout_lines
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import gib, short_count, text_table
from megatron_llama.tools.figures import draw_memory
from megatron_llama.tools.measured_steps import BACKWARD, FORWARD
from megatron_llama.tools.profile.modules import ModuleNode, Profile, RankProfile
from megatron_llama.tools.profile.trace import NORM, OPTIMIZER, REST
from megatron_llama.topology import AXIS_NAMES
from megatron_llama.train.waits import AXES, DATA

TEXT_FILE = "profile.txt"


def write_profile(plan: Plan, ranks: Sequence[RankProfile], folder: Path) -> None:
    """Write the profile of all ranks to ``folder``. Raises OSError."""
    profile = Profile(plan, ranks)
    write_atomically(folder / "profile.json", json.dumps(as_json(profile), indent=1) + "\n")
    write_atomically(folder / TEXT_FILE, "\n".join(lines(profile)) + "\n")
    write_atomically(folder / "modules.txt", "\n".join(tree_lines(profile.nodes(folded=False))) + "\n")
    measured = [(rank.memory.peak, rank.rank, rank.memory) for rank in ranks if rank.memory is not None]
    if measured:
        _, rank, memory = max(measured)
        title = f"{plan.model.name}, rank {rank} of {plan.world_size}: tensors in step {ranks[0].traced}"
        axis = "ms of the traced step; F: forward, B: backward passes, O: optimizer; colors: origin"
        write_atomically(folder / "memory.png", draw_memory(memory, title=title, axis=axis))


def as_json(profile: Profile) -> dict[str, Any]:
    """Return seconds, FLOPs, parameters and peak memory as JSON values."""
    nodes = [{**asdict(node), "flops_per_second": node.flops_per_second} for node in profile.nodes(folded=False)]
    ranks = []
    for rank in profile.ranks:
        zones = [
            {**zone._asdict(), "seconds": s, "visits": rank.visits.get(zone, 0)} for zone, s in rank.seconds.items()
        ]
        grid = {"rank": rank.rank, **{f"{axis}_rank": rank.place[axis] for axis in AXIS_NAMES}}
        peak = None if rank.memory is None else rank.memory.peak
        ranks.append({**grid, "step_s": rank.step_seconds, "zones": zones, "peak_bytes": peak})
    first = profile.ranks[0]
    return {"steps": first.steps, "traced_step": first.traced, "modules": nodes, "ranks": ranks}


# A profile as text, for a terminal of 80 columns.
MAX_RANKS = 16  # larger worlds show the mean of each stage
MAX_PER_DEPTH = 3


def lines(profile: Profile) -> Iterator[str]:
    """Format profile.txt, with one row for all layers."""
    yield from _head(profile)
    yield from ("", "modules, forward and backward of a step; layers.* is the sum over layers")
    yield from tree_lines(profile.nodes(folded=True))
    yield from ("", "largest modules at each depth, summed over layers")
    yield from _top(profile.nodes(folded=True))
    yield from ("", "step of each rank in ms; tp, pp, dp and world are waits for other ranks")
    yield from _ranks(profile)
    waits = list(_waits(profile))
    if waits:
        yield from ("", "waits by axis and collective", *waits)
    peaks = [(rank.memory.peak, rank.rank) for rank in profile.ranks if rank.memory is not None]
    if peaks:
        size, number = max(peaks)
        yield from ("", f"peak tensor memory in step {profile.ranks[0].traced}: {gib(size)} on rank {number}")
        yield "on CPU without tensors allocated before the step"


def _head(profile: Profile) -> Iterator[str]:
    plan, first = profile.plan, profile.ranks[0]
    yield from layout_lines(plan)
    steps = first.steps
    span = f"step {steps[0]}" if len(steps) == 1 else f"mean of steps {steps[0]} to {steps[-1]}"
    traced = "it is also traced, which slows it down" if first.traced in steps else f"step {first.traced} is traced"
    yield f"profile of {span}; {traced}"
    step = max(rank.step_seconds for rank in profile.ranks)
    tokens = plan.tokens_per_step
    root = profile.nodes(folded=True)[0]
    formula = flops_per_token(plan.model, plan.config.data.length, plan.config.finetune)
    yield f"step {_ms(step)} ms, {tokens / step:,.0f} tokens/s, including padding and profiling overhead"
    full, causal = short_count(formula.full * tokens), short_count(formula.causal * tokens)
    yield f"FLOPs per step: {short_count(root.flops)} on all devices; MFU formula {full}, causal {causal}"
    each = root.flops / plan.world_size
    busy = root.flops_per_second or 0.0
    yield f"FLOP/s per device: {_rate(each / step)} over the step, {_rate(busy)} while computing"


def tree_lines(nodes: Sequence[ModuleNode]) -> Iterator[str]:
    """Format parameters, FLOPs, times, share of time, waits and FLOP/s of each module, indented by depth."""
    total = nodes[0].busy or 1.0
    rows: list[tuple[str, ...]] = [("", "params", "FLOPs", "fwd ms", "bwd ms", "share", "waits", "FLOP/s")]
    for node in nodes:
        name = node.name.rpartition(".")[2] if node.depth != 1 else node.name
        counts = [short_count(count) if count else "" for count in (node.parameters, node.flops)]
        times = (_ms(node.forward), _ms(node.backward)) if node.busy else ("", "")
        shares = [f"{seconds / total:.1%}" if seconds else "" for seconds in (node.busy, node.waited)]
        rows.append(("  " * node.depth + name, *counts, *times, *shares, _rate(node.flops_per_second)))
    yield from text_table(rows, left=1)


def _top(nodes: Sequence[ModuleNode]) -> Iterator[str]:
    """List the modules with the most parameters, FLOPs and time at each depth, like DeepSpeed's profiler."""
    rows: list[tuple[str, ...]] = [("depth", "parameters", "FLOPs", "time")]
    measures: tuple[Callable[[ModuleNode], float], ...] = (
        lambda node: node.parameters,
        lambda node: node.flops,
        lambda node: node.busy,
    )
    for depth in range(max(node.depth for node in nodes) + 1):
        level = [node for node in nodes if node.depth == depth]
        columns = []
        for measure in measures:
            total = measure(nodes[0]) or 1.0
            largest = sorted((node for node in level if measure(node)), key=measure, reverse=True)[:MAX_PER_DEPTH]
            columns.append([f"{_last(node)} {measure(node) / total:.0%}" for node in largest])
        for number in range(max(map(len, columns))):
            cells = (column[number] if number < len(column) else "" for column in columns)
            rows.append((str(depth) if number == 0 else "", *cells))
    yield from text_table(rows)


def _last(node: ModuleNode) -> str:
    """Return the last part of a name; the frozen matrices of LoRA keep two parts, as qkv_proj.base_layer."""
    parts = node.name.split(".")
    return node.name if node.depth <= 1 else ".".join(parts[-2 if parts[-1] == "base_layer" else -1 :])


def _ranks(profile: Profile) -> Iterator[str]:
    axes = [axis for axis in AXES if axis != "cp" or any(rank.spent(None, axis) for rank in profile.ranks)]
    heads = ("", "step", "fwd", "bwd", *axes, DATA, "optimizer", REST)
    rows: list[tuple[str, ...]] = [heads]
    values = {rank.rank: _row(rank, axes) for rank in profile.ranks}
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(profile.ranks, key=lambda rank: rank.place["pp"] if len(values) > MAX_RANKS else 0):
        several = len(values) > MAX_RANKS
        groups[f"stage {rank.place['pp']}, mean" if several else f"rank {rank.rank}"].append(rank.rank)
    for name, numbers in [*groups.items(), ("mean", list(values))]:
        means = [sum(values[number][at] for number in numbers) / len(numbers) for at in range(len(heads) - 1)]
        rows.append((name, *(_ms(mean) for mean in means)))
    yield from text_table(rows, left=1)


def _row(rank: RankProfile, axes: Sequence[str]) -> list[float]:
    waits = [rank.spent(None, axis) for axis in axes]
    row = [rank.step_seconds, rank.spent(FORWARD), rank.spent(BACKWARD), *waits, rank.spent(DATA)]
    return [*row, rank.spent(NORM) + rank.spent(OPTIMIZER), rank.spent(REST)]


def _waits(profile: Profile) -> Iterator[str]:
    """Format the number and duration of waits: the mean over ranks and the slowest rank."""
    seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    visits: dict[str, float] = defaultdict(float)
    for rank in profile.ranks:
        for zone, spent in rank.seconds.items():
            if zone.wait:
                seconds[zone.wait][rank.rank] += spent
                visits[zone.wait] += rank.visits.get(zone, 0.0)
    if not seconds:
        return
    count, step = len(profile.ranks), sum(rank.step_seconds for rank in profile.ranks)
    rows: list[tuple[str, ...]] = [("", "waits per rank", "mean ms", "max ms", "on rank", "of the step")]
    for name, by_rank in sorted(seconds.items(), key=lambda item: -sum(item[1].values())):
        total, slowest = sum(by_rank.values()), max(by_rank, key=lambda rank: by_rank[rank])
        times = (_ms(total / count), _ms(by_rank[slowest]), str(slowest), f"{total / step:.1%}")
        rows.append((name, f"{visits[name] / count:,.3g}", *times))
    yield from text_table(rows, left=1)


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1000
    return f"{milliseconds:,.0f}" if milliseconds >= 1000 else f"{milliseconds:.3g}" if milliseconds >= 0.01 else "0"


def _rate(flops_per_second: float | None) -> str:
    return "" if not flops_per_second else short_count(flops_per_second)
