"""The bytes of a step over time, from the births, changes and deaths of storages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_llama.tools.forecast.module_work import any_layer
from megatron_llama.tools.rehearse.modules import RECOMPUTED, Place
from megatron_llama.tools.rehearse.report import HOST, KINDS, Holder, Timeline
from megatron_llama.tools.rehearse.watch import Record


class History:
    """A step that begins when this is made."""

    def __init__(self, records: Sequence[Record], changes: Sequence[tuple[int, int]]) -> None:
        self._records, self._changes, self._begin = records, changes, len(changes)

    def summary(self, marks: Sequence[tuple[int, Place]], runs: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """The fields of a ``Rehearsal`` about memory. ``runs`` are (chunk, micro batch) of the forward passes."""
        changes = np.array(self._changes, dtype=np.int64).reshape(-1, 2)
        numbers = {kind: number for number, kind in enumerate(KINDS)}
        kinds = np.array([numbers[record.kind] for record in self._records], dtype=np.int64)
        before, after = changes[: self._begin], changes[self._begin :]
        start = np.bincount(kinds[before[:, 0]], before[:, 1], len(KINDS)).astype(np.int64)
        steps = np.zeros((len(after) + 1, len(KINDS)), np.int64)
        steps[0] = start
        steps[np.arange(1, len(steps)), kinds[after[:, 0]]] = after[:, 1]
        alive = steps.cumsum(axis=0)
        totals = alive[:, : numbers[HOST]].sum(axis=1)  # it is the last kind
        peak = int(totals.argmax())
        named = [(change - self._begin, _name(place, runs)) for change, place in marks]
        last = [name for change, name in named if change <= peak]
        born = self._records[after[peak - 1, 0]] if peak else None
        where = f", in {born.module}: {born.operation}" if born else ""
        return {
            "peak": int(totals[peak]),
            "at_peak": _named(alive[peak]),
            "most": _named(alive.max(axis=0)),
            "moment": (last[-1] if last else "before the first pass") + where,
            "holders": self._holders(changes[: self._begin + peak]),
            "timeline": Timeline(KINDS, alive, tuple(named)),
        }

    def _holders(self, changes: Any) -> tuple[Holder, ...]:
        sizes = np.bincount(changes[:, 0], changes[:, 1], len(self._records)).astype(np.int64)
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0])
        for number in np.flatnonzero(sizes):
            record = self._records[int(number)]
            group = groups[record.kind, any_layer(record.module), record.operation, record.shape, record.dtype]
            group[0] += int(sizes[number])
            group[1] += 1
        found = [Holder(size, count, *key) for key, (size, count) in groups.items()]
        return tuple(sorted(found, key=lambda holder: -holder.size))


def _named(row: Any) -> Mapping[str, int]:
    return {kind: int(size) for kind, size in zip(KINDS, row, strict=True) if size}


def _name(place: Place, runs: Sequence[tuple[int, int]]) -> str:
    if place.run < 0:
        return "outside of forward and backward"
    chunk, microbatch = runs[place.run]
    several = f", chunk {chunk}" if any(other for other, _ in runs) else ""
    phase = "recomputation" if place.phase == RECOMPUTED else place.phase
    return f"{phase} of micro batch {microbatch}{several}"
