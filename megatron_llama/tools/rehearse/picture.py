"""A rehearsed step's memory as a picture."""

from __future__ import annotations

import numpy as np

from megatron_llama.tools.memory_picture import draw_memory
from megatron_llama.tools.rehearse.report import KINDS, Rehearsal


def draw(rehearsal: Rehearsal, title: str, memory_gib: float | None = None) -> bytes:
    """The bytes of a PNG: what is alive, by kind, over the changes of a step, with its passes below."""
    alive = rehearsal.timeline.bytes
    return draw_memory(
        np.arange(len(alive)),
        alive,
        KINDS,
        _passes(rehearsal),
        title=title,
        axis="a step, from one birth or death of a tensor to the next; F: forward, B: backward of a micro batch",
        memory_gib=memory_gib,
    )


def _passes(rehearsal: Rehearsal) -> list[tuple[float, str]]:
    """Where each pass begins, as a letter and its micro batch's number."""
    begins: list[tuple[float, str]] = []
    for change, name in rehearsal.timeline.marks:
        if " of micro batch " in name and (not begins or begins[-1][1] != _letter(name)):
            begins.append((change, _letter(name)))
    return begins


def _letter(name: str) -> str:
    """F3 for the forward pass of micro batch 3; recomputation belongs to the backward pass."""
    phase, _, batch = name.partition(" of micro batch ")
    return ("F" if phase == "forward" else "B") + batch.replace(", chunk ", "'")
