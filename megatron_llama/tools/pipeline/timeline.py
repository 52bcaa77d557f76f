"""When each rank of a pipeline computes what: from the order in which it does so, and how long each pass takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PREVIOUS, NEXT = -1, 1
"""Neighbours of a rank, as a difference of pp ranks; the last rank's next one is the first."""


class Pass(NamedTuple):
    """A chunk's forward or backward pass over a micro batch."""

    backward: bool
    chunk: int
    microbatch: int


class Done(NamedTuple):
    """A pass as a rank did it."""

    what: Pass
    start: float
    """Seconds, of a clock that all ranks of a machine share."""
    end: float
    needs: tuple[int, int] | None
    """The message that it had to wait for: (side, number among those from that side), or None."""


@dataclass
class RankRecord:
    """What one rank did in a step, in order."""

    done: list[Done] = field(default_factory=list)
    sent: dict[int, list[Pass]] = field(default_factory=lambda: {PREVIOUS: [], NEXT: []})
    """By side: the passes whose results were sent there."""
    received: dict[int, int] = field(default_factory=lambda: {PREVIOUS: 0, NEXT: 0})
    """By side: messages received from there."""


class Span(NamedTuple):
    """A pass, and when it was done, in seconds from the step's start."""

    what: Pass
    start: float
    end: float


class Message(NamedTuple):
    """A result that a rank sent, and the pass that used it."""

    sender: int
    sent: Span
    receiver: int
    used: Span


@dataclass(frozen=True)
class Timeline:
    """A step of all ranks of a pipeline."""

    ranks: tuple[tuple[Span, ...], ...]
    """The spans of each rank in order."""
    messages: tuple[Message, ...]

    @property
    def seconds(self) -> float:
        """From the first pass's start to the last one's end."""
        return max(spans[-1].end for spans in self.ranks)

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(span.end - span.start for span in self.ranks[rank])

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait."""
        return 1 - sum(map(self.busy, range(len(self.ranks)))) / (len(self.ranks) * self.seconds)


def bubble_of_equal_stages(pp: int, vpp: int, microbatches: int) -> float:
    """The share of a step that is bubble where all passes of a kind take equally long.

    (p - 1) / (v m + p - 1): a rank computes v m passes of its chunks, forward and backward, and waits as long as p - 1
    of them take (Narayanan et al. 2021, arXiv:2104.04473, section 2.2, where it is (p - 1) / (v m) of the rest).
    """
    return (pp - 1) / (vpp * microbatches + pp - 1)


def needed(records: Sequence[RankRecord]) -> dict[tuple[int, Pass], tuple[int, Pass]]:
    """{(rank, pass): (rank, pass whose result it waited for)}, from the messages that were sent and received.

    Messages of one direction between two ranks arrive in the order in which they were sent.
    """
    found = {}
    for rank, record in enumerate(records):
        for done in record.done:
            if done.needs is not None:
                side, number = done.needs
                sender = (rank + side) % len(records)
                found[rank, done.what] = sender, records[sender].sent[-side][number]
    return found


def as_measured(records: Sequence[RankRecord]) -> Timeline:
    """What happened, by the clock."""
    begin = min(record.done[0].start for record in records)
    ranks = [tuple(Span(done.what, done.start - begin, done.end - begin) for done in record.done) for record in records]
    return _timeline(ranks, records)


def as_early_as_possible(records: Sequence[RankRecord], seconds: Callable[[int, Pass], float]) -> Timeline:
    """Each rank does its passes in the recorded order, and each as soon as what it needs is there.

    ``seconds`` says how long a rank's pass takes. Messages take no time.
    """
    needs = needed(records)
    ends: dict[tuple[int, Pass], float] = {}
    ranks: list[list[Span]] = [[] for _ in records]
    while sum(map(len, ranks)) < sum(len(record.done) for record in records):
        before = len(ends)
        for rank, record in enumerate(records):
            for done in record.done[len(ranks[rank]) :]:
                need = needs.get((rank, done.what))
                if need is not None and need not in ends:
                    break
                start = max(ranks[rank][-1].end if ranks[rank] else 0.0, ends[need] if need is not None else 0.0)
                ranks[rank].append(Span(done.what, start, start + seconds(rank, done.what)))
                ends[rank, done.what] = ranks[rank][-1].end
        assert len(ends) > before, "a schedule that ran to its end has no circle"
    return _timeline([tuple(spans) for spans in ranks], records)


def _timeline(ranks: Sequence[tuple[Span, ...]], records: Sequence[RankRecord]) -> Timeline:
    places: Mapping[tuple[int, Pass], Span] = {
        (rank, span.what): span for rank, spans in enumerate(ranks) for span in spans
    }
    messages = [
        Message(sender, places[sender, sent], receiver, places[receiver, used])
        for (receiver, used), (sender, sent) in needed(records).items()
    ]
    return Timeline(tuple(ranks), tuple(messages))
