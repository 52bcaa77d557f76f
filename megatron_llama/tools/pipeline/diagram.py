"""Diagram of a pipeline step: a lane per rank, a box per pass, a line per message.

matplotlib draws one figure for SVG and PNG (tools/figures.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_llama.system.output import import_pyplot
from megatron_llama.tools.figures import STYLE, TOOLTIP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZES, DIGIT = (8, 6), 0.6  # font sizes of a micro batch's number, points, and the width of a digit at size 1
LANE_INCHES, BOX, PANEL_POINTS = 0.4, 0.65, 660
"""Height of a lane; height of a box relative to it; width of a panel."""
MAX_MESSAGES = 600  # messages are not drawn beyond this number: the lines would hide the boxes
MOST_BOXES = 2000  # passes beyond this number have no tooltips and numbers: the picture would take seconds and MiB
FORWARD = ("#2563eb", "#60a5fa", "#93c5fd", "#bfdbfe")
BACKWARD = ("#c2410c", "#f97316", "#fdba74", "#fed7aa")
"""Shades by chunk; the last one is repeated for further chunks."""
DARK_TEXT_FROM = 2  # first chunk whose numbers are dark
SOFT, LANE = "#64748b", "#eef1f4"
INK = {"text.color": "#1f2933", "xtick.color": SOFT, "ytick.labelcolor": "#1f2933", "axes.labelcolor": SOFT}


class Panel(NamedTuple):
    """A timeline with a title."""

    title: str
    unit: str
    timeline: PipelineTimeline
    scale: float = 1.0
    """Seconds per ``unit``."""


def draw(title: str, panels: Sequence[Panel]) -> Figure:
    """Stack the panels in one scale; the longest fills the width of the page."""
    pyplot = import_pyplot()
    lanes = [len(panel.timeline.ranks) for panel in panels]
    longest = max(panel.timeline.seconds / panel.scale for panel in panels)
    chunks = 1 + max(span.pass_.chunk for span in panels[0].timeline.ranks[0])
    with pyplot.style.context(["default", STYLE, INK]):
        size = 10, 0.8 + sum(LANE_INCHES * count + 0.7 for count in lanes)
        figure, axes = pyplot.subplots(
            len(panels), 1, figsize=size, dpi=200, squeeze=False, height_ratios=lanes, layout="constrained"
        )
        figure.suptitle(title, x=0.01, ha="left", weight="bold", size=10)
        for panel, axis in zip(panels, axes[:, 0], strict=True):
            axis.set(xlim=(0, longest), ylim=(lanes[0] - 0.5, -0.5))
            _draw_panel(axis, panel, chunks, PANEL_POINTS / longest)
        legend = [
            (name + (f", chunk {chunk}" if chunks > 1 else ""), shades[chunk])
            for name, shades in (("forward", FORWARD), ("backward", BACKWARD))
            for chunk in range(min(chunks, len(shades)))
        ]
        legend.append(("waits", LANE))
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=color, label=label) for label, color in legend]
        handles.append(pyplot.Line2D([], [], color=SOFT, linewidth=0.6, label="sends"))
        figure.legend(handles=handles, loc="outside lower left", ncols=6, fontsize=8, handlelength=1, handleheight=1)
    return figure


def _draw_panel(axis: Axes, panel: Panel, chunks: int, points: float) -> None:
    """Draw one panel; ``points`` is the width of a unit."""
    from matplotlib.patches import Rectangle

    timeline, scale = panel.timeline, panel.scale
    few = sum(map(len, timeline.ranks)) <= MOST_BOXES
    for rank, spans in enumerate(timeline.ranks):
        bars: dict[str, list[tuple[float, float]]] = {}
        axis.add_patch(Rectangle((0, rank - BOX / 2), timeline.seconds / scale, BOX, color=LANE, linewidth=0))
        for (backward, chunk, microbatch), start, end in spans:
            shades, width = BACKWARD if backward else FORWARD, (end - start) / scale
            gap = min(0.6 / points, width / 2)  # separates adjacent boxes
            shade = shades[min(chunk, len(shades) - 1)]
            if not few:
                bars.setdefault(shade, []).append((start / scale, width - gap))
                continue
            box = Rectangle((start / scale, rank - BOX / 2), width - gap, BOX, linewidth=0)
            box.set(color=shade, clip_on=False)
            about = f"{'backward' if backward else 'forward'} pass of micro batch {microbatch}"
            box.set_gid(TOOLTIP + about + (f", chunk {chunk}" if chunks > 1 else ""))
            axis.add_patch(box)
            color = "#1f2933" if chunk >= DARK_TEXT_FROM else "#fefefe"
            place, label = ((start + end) / 2 / scale, rank), str(microbatch)
            for fitting in [size for size in SIZES if width * points > DIGIT * size * len(label) + 1.5][:1]:
                axis.text(*place, label, color=color, size=fitting, ha="center", va="center_baseline")
        for shade, ranges in bars.items():
            axis.broken_barh(ranges, (rank - BOX / 2, BOX), color=shade, linewidth=0)
    messages = timeline.messages
    for sender, sent, receiver, used in messages if len(messages) <= MAX_MESSAGES else ():
        side, alpha = (BOX / 2 if receiver > sender else -BOX / 2), 0.3 if abs(receiver - sender) > 1 else 0.75
        ends = [sent.end / scale, used.start / scale], [sender + side, receiver - side]
        axis.plot(*ends, color=SOFT, linewidth=0.6, alpha=alpha)
    axis.set_title(panel.title, loc="left", size=8, color=SOFT)
    axis.set_yticks(range(len(timeline.ranks)), [f"stage {rank}" for rank in range(len(timeline.ranks))])
    axis.tick_params(left=False, labelsize=8)
    axis.locator_params("x", nbins=12)
    axis.set_xlabel(panel.unit, loc="right", size=8)
    axis.spines[:].set_visible(False)


# Timeline of each rank, computed from the order and the duration of its passes.


class Pass(NamedTuple):
    """Forward or backward pass of a chunk over a micro batch."""

    backward: bool
    chunk: int
    microbatch: int


class Span(NamedTuple):
    """A pass with its start and end, in seconds from the start of the step. Ranks of a host share the clock."""

    pass_: Pass
    start: float
    end: float


class Message(NamedTuple):
    """A message: the pass that produced it and the pass that consumed it."""

    sender: int
    sent: Span
    receiver: int
    used: Span


@dataclass(frozen=True)
class PipelineTimeline:
    """Passes of all ranks of a pipeline in one step."""

    ranks: Sequence[Sequence[Span]]
    """Spans of each rank, in order."""

    @property
    def messages(self) -> list[Message]:
        """Activations and gradients sent between the ranks."""
        spans = {(rank, span.pass_): span for rank, of_rank in enumerate(self.ranks) for span in of_rank}
        stages = count_stages([span.pass_ for span in of_rank] for of_rank in self.ranks)
        needs = {key: sender_of(*key, len(self.ranks), stages) for key in spans}
        return [Message(need[0], spans[need], key[0], spans[key]) for key, need in needs.items() if need is not None]

    @property
    def seconds(self) -> float:
        """Time from the start of the first pass to the end of the last pass."""
        return max(spans[-1].end for spans in self.ranks)

    def busy(self, rank: int) -> float:
        """Return the seconds that a rank computes."""
        return sum(span.end - span.start for span in self.ranks[rank])

    @property
    def bubble(self) -> float:
        """Fraction of the ranks' time spent waiting."""
        return 1 - sum(map(self.busy, range(len(self.ranks)))) / (len(self.ranks) * self.seconds)


def bubble_of_equal_stages(pp: int, vpp: int, microbatches: int) -> float:
    """Return the bubble fraction of a pipeline with equal stages.

    (p - 1) / (v m + p - 1): a rank computes v m forward and backward passes and waits for the time of p - 1 of them.
    Narayanan et al. 2021, arXiv:2104.04473, section 2.2, divide by the compute time instead: (p - 1) / (v m).
    """
    return (pp - 1) / (vpp * microbatches + pp - 1)


def measured_timeline(records: Sequence[Sequence[Span]]) -> PipelineTimeline:
    """Build the timeline of the recorded passes of each rank."""
    begin = min(spans[0].start for spans in records)
    return PipelineTimeline([[Span(each.pass_, each.start - begin, each.end - begin) for each in of] for of in records])


def earliest_timeline(orders: Sequence[Sequence[Pass]], seconds: Callable[[int, Pass], float]) -> PipelineTimeline:
    """Build the timeline in which each pass starts as soon as its rank is free and its input has arrived.

    Args:
        orders: Passes of each rank in their order.
        seconds: Returns the duration of a pass of a rank. Messages take no time.
    """
    stages = count_stages(orders)
    ends: dict[tuple[int, Pass], float] = {}
    ranks: list[list[Span]] = [[] for _ in orders]
    while sum(map(len, ranks)) < sum(map(len, orders)):
        before = len(ends)
        for rank, order in enumerate(orders):
            for pass_ in order[len(ranks[rank]) :]:
                need = sender_of(rank, pass_, len(orders), stages)
                if need is not None and need not in ends:
                    break
                start = max(ranks[rank][-1].end if ranks[rank] else 0.0, ends[need] if need is not None else 0.0)
                ranks[rank].append(Span(pass_, start, start + seconds(rank, pass_)))
                ends[rank, pass_] = ranks[rank][-1].end
        assert len(ends) > before, "a completed schedule has no cycle"
    return PipelineTimeline(ranks)


def count_stages(orders: Iterable[Iterable[Pass]]) -> int:
    """Return the number of virtual stages of the ranks' passes."""
    return sum(1 + max(pass_.chunk for pass_ in order) for order in orders)


def sender_of(rank: int, pass_: Pass, pp: int, stages: int) -> tuple[int, Pass] | None:
    """Return the (rank, pass) whose message a pass needs; None at the ends of the pipeline.

    Chunk c of rank r is virtual stage c * pp + r. Activations come from the preceding stage, gradients from the next.
    """
    stage = pass_.chunk * pp + rank + (1 if pass_.backward else -1)
    return (stage % pp, pass_._replace(chunk=stage // pp)) if 0 <= stage < stages else None
