"""The files of a profile that are about all ranks: as text, as JSON, and the memory as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_llama.plan import Plan
from megatron_llama.system.files import write_atomically
from megatron_llama.tools.memory_picture import draw_memory
from megatron_llama.tools.profile.module_tree import Profile, RankProfile
from megatron_llama.tools.profile.profile_text import lines, tree_lines
from megatron_llama.tools.profile.trace import Memory
from megatron_llama.topology import AXIS_NAMES

TEXT_FILE = "profile.txt"


def write_profile(plan: Plan, ranks: Sequence[RankProfile], folder: Path) -> None:
    """Writes the ranks' profile to ``folder``. Raises OSError."""
    profile = Profile(plan, ranks)
    write_atomically(folder / "profile.json", json.dumps(as_json(profile), indent=1) + "\n")
    write_atomically(folder / TEXT_FILE, "\n".join(lines(profile)) + "\n")
    write_atomically(folder / "modules.txt", "\n".join(tree_lines(profile.nodes(folded=False))) + "\n")
    measured = [(rank.memory.peak, rank.rank, rank.memory) for rank in ranks if rank.memory is not None]
    if measured:
        _, rank, memory = max(measured)
        title = f"{plan.model.name}, rank {rank} of {plan.world_size}: tensors in step {ranks[0].traced}"
        write_atomically(folder / "memory.png", _picture(memory, title))


def _picture(memory: Memory, title: str) -> bytes:
    return draw_memory(
        memory.seconds * 1000,
        memory.bytes,
        memory.kinds,
        [(begin * 1000, name) for begin, name in memory.passes],
        title=title,
        axis="ms of the traced step; F: forward, B: backward passes, O: optimizer; colours: what made them",
    )


def as_json(profile: Profile) -> dict[str, Any]:
    """Seconds, FLOPs and parameters; of the memory only the peak."""
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
