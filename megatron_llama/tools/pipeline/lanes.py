"""Diagram of a pipeline step: a lane per rank, a box per pass, a line per message.

The diagram is a list of shapes. ``as_svg`` writes an SVG that follows the reader's light or dark theme; ``as_png``
draws the shapes with matplotlib. The SVG is deterministic.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.sax.saxutils import escape

from megatron_llama.system.output import import_pyplot

WIDTH, LEFT, RIGHT, TOP = 1000, 64, 14, 34
LANE, BOX = 40, 26
PANEL_GAP = 30
"""Vertical gap between panels."""
SIZES, DIGIT = (11, 8), 0.58
"""Font sizes of a micro batch's number, and the width of a digit at size 1."""
MAX_MESSAGES = 600
"""Messages are not drawn beyond this number: the lines would hide the boxes."""
FORWARD = ("#2563eb", "#60a5fa", "#93c5fd", "#bfdbfe")
BACKWARD = ("#c2410c", "#f97316", "#fdba74", "#fed7aa")
"""Shades by chunk; the last one is repeated for further chunks."""
DARK_TEXT_FROM = 2
"""First chunk whose numbers are dark."""
INK, SOFT, LANE_FILL, PAGE = (
    ("#1f2933", "#e5e7eb"),
    ("#64748b", "#94a3b8"),
    ("#eef1f4", "#262c36"),
    ("#ffffff", "#0d1117"),
)
"""(light theme, dark theme)"""


class Box(NamedTuple):
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    """A color, or the name of a CSS class."""
    about: str = ""
    """Tooltip."""


class LineShape(NamedTuple):
    """A thin line."""

    x: float
    y: float
    to_x: float
    to_y: float
    faint: bool = False


class Text(NamedTuple):
    """Text, positioned by its baseline."""

    x: float
    y: float
    words: str
    fill: str = "ink"
    size: float = 11
    anchor: str = "middle"
    bold: bool = False


class Picture(NamedTuple):
    """Shapes on a page."""

    height: float
    shapes: tuple[Box | LineShape | Text, ...]


class Panel(NamedTuple):
    """A timeline with a title."""

    title: str
    unit: str
    timeline: PipelineTimeline
    scale: float = 1.0
    """Seconds per ``unit``."""


def draw(title: str, panels: Sequence[Panel]) -> Picture:
    """Stack the panels in one scale; the longest fills the width of the page."""
    shapes: list[Box | LineShape | Text] = [Text(LEFT, 20, title, size=14, anchor="start", bold=True)]
    y: float = TOP
    scale = (WIDTH - LEFT - RIGHT) / max(panel.timeline.seconds / panel.scale for panel in panels)
    for panel in panels:
        shapes += _panel(panel, y, scale / panel.scale)
        y += 18 + LANE * len(panel.timeline.ranks) + 26 + PANEL_GAP
    chunks = 1 + max(span.pass_.chunk for span in panels[0].timeline.ranks[0])
    shapes += _legend(chunks, y - PANEL_GAP + 16)
    return Picture(y - PANEL_GAP + 30, tuple(shapes))


def _panel(panel: Panel, top: float, scale: float) -> Iterator[Box | LineShape | Text]:
    """Draw one panel; ``scale`` is the width of a second."""
    timeline = panel.timeline
    yield Text(LEFT, top + 10, panel.title, "soft", anchor="start")
    top += 18

    def x_at(seconds: float) -> float:
        return LEFT + seconds * scale

    def middle(rank: int) -> float:
        return top + rank * LANE + LANE / 2

    for rank, spans in enumerate(timeline.ranks):
        yield Text(LEFT - 8, middle(rank) + 4, f"stage {rank}", anchor="end")
        yield Box(LEFT, middle(rank) - BOX / 2, timeline.seconds * scale, BOX, "lane")
        for (backward, chunk, microbatch), start, end in spans:
            shades = BACKWARD if backward else FORWARD
            about = f"{'backward' if backward else 'forward'} pass of micro batch {microbatch}"
            about += f", chunk {chunk}" if _chunks(timeline) > 1 else ""
            fill = shades[min(chunk, len(shades) - 1)]
            # A thin gap separates adjacent boxes.
            yield Box(x_at(start), middle(rank) - BOX / 2, max(0.4, (end - start) * scale - 0.8), BOX, fill, about)
            words, color = str(microbatch), "#1f2933" if chunk >= DARK_TEXT_FROM else "#ffffff"
            for size in [size for size in SIZES if (end - start) * scale > DIGIT * size * len(words) + 2][:1]:
                yield Text(x_at((start + end) / 2), middle(rank) + 0.36 * size, words, color, size)
    if len(timeline.messages) <= MAX_MESSAGES:
        for sender, sent, receiver, used in timeline.messages:
            side = 1 if receiver > sender else -1
            yield LineShape(
                x_at(sent.end),
                middle(sender) + side * BOX / 2,
                x_at(used.start),
                middle(receiver) - side * BOX / 2,
                faint=abs(receiver - sender) > 1,
            )
    bottom = top + LANE * len(timeline.ranks)
    for tick in _ticks(timeline.seconds / panel.scale):
        x = x_at(tick * panel.scale)
        yield LineShape(x, bottom, x, bottom + 4)
        yield Text(x, bottom + 16, f"{tick:g}", "soft", 10)
    yield Text(WIDTH - RIGHT, bottom + 28, panel.unit, "soft", 10, "end")


def _chunks(timeline: PipelineTimeline) -> int:
    return 1 + max(span.pass_.chunk for span in timeline.ranks[0])


def _ticks(end: float) -> list[float]:
    """Return about ten round numbers from 0 to ``end``."""
    rough = end / 10
    power = 10 ** math.floor(math.log10(rough))
    step = power * next(times for times in (1, 2, 5, 10) if times * power >= rough)
    return [round(number * step, 12) for number in range(int(end / step + 1e-9) + 1)]


def _legend(chunks: int, y: float) -> Iterator[Box | LineShape | Text]:
    x: float = LEFT
    for name, shades in (("forward", FORWARD), ("backward", BACKWARD)):
        for chunk in range(min(chunks, len(shades))):
            words = name + (f", chunk {chunk}" if chunks > 1 else "")
            yield Box(x, y - 9, 12, 12, shades[chunk])
            yield Text(x + 17, y + 1, words, "soft", anchor="start")
            x += 34 + 5.9 * len(words)
    yield Box(x, y - 9, 12, 12, "lane")
    yield Text(x + 17, y + 1, "waits", "soft", anchor="start")
    yield LineShape(x + 64, y - 3, x + 82, y - 3)
    yield Text(x + 88, y + 1, "sends", "soft", anchor="start")


def as_svg(picture: Picture) -> str:
    """Write the picture as SVG text."""
    light, dark = (
        f".page{{fill:{PAGE[i]}}}.lane{{fill:{LANE_FILL[i]}}}.ink{{fill:{INK[i]}}}.soft{{fill:{SOFT[i]}}}"
        f"line{{stroke:{SOFT[i]}}}"
        for i in (0, 1)
    )
    height = round(picture.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">',
        f"<style>{light}line{{stroke-width:.8;opacity:.75}}.faint{{opacity:.3}}"
        f"@media(prefers-color-scheme:dark){{{dark}}}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        *map(_svg, picture.shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _svg(shape: Box | LineShape | Text) -> str:
    match shape:
        case Box(x, y, width, height, fill, about):
            where = f'x="{_short(x)}" y="{_short(y)}" width="{_short(width)}" height="{_short(height)}"'
            title = f"><title>{escape(about)}</title></rect>" if about else "/>"
            return f"<rect {where} {_color(fill)}{title}"
        case LineShape(x, y, to_x, to_y, faint):
            style = 'class="faint" ' if faint else ""
            ends = f'x1="{_short(x)}" y1="{_short(y)}" x2="{_short(to_x)}" y2="{_short(to_y)}"'
            return f"<line {style}{ends}/>"
        case Text(x, y, words, fill, size, anchor, bold):
            more = ' font-weight="600"' if bold else ""
            place = f'x="{_short(x)}" y="{_short(y)}" font-size="{size:g}" text-anchor="{anchor}"'
            return f"<text {place} {_color(fill)}{more}>{escape(words)}</text>"


def _color(fill: str) -> str:
    return f'fill="{fill}"' if fill.startswith("#") else f'class="{fill}"'


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def as_png(picture: Picture) -> bytes:
    """Render the picture as PNG bytes on a white background; imports matplotlib."""
    pyplot = import_pyplot()
    from matplotlib.patches import Rectangle

    class_colors = {"lane": LANE_FILL[0], "ink": INK[0], "soft": SOFT[0]}
    points = 0.72  # points per unit of the picture, at 100 units per inch
    figure = pyplot.figure(figsize=(WIDTH / 100, picture.height / 100), dpi=200)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(picture.height, 0))
    axes.axis("off")
    for shape in picture.shapes:
        match shape:
            case Box(x, y, width, height, fill):
                axes.add_patch(Rectangle((x, y), width, height, color=class_colors.get(fill, fill), linewidth=0))
            case LineShape(x, y, to_x, to_y, faint):
                axes.plot([x, to_x], [y, to_y], color=SOFT[0], linewidth=0.8 * points, alpha=0.3 if faint else 0.75)
            case Text(x, y, words, fill, size, anchor, bold):
                axes.text(
                    x,
                    y,
                    words,
                    color=class_colors.get(fill, fill),
                    fontsize=size * points,
                    ha={"start": "left", "middle": "center", "end": "right"}[anchor],
                    va="baseline",
                    weight="bold" if bold else "normal",
                )
    written = io.BytesIO()
    figure.savefig(written, format="png")
    pyplot.close(figure)
    return written.getvalue()


# Timeline of each rank, computed from the order and the duration of its passes.


PREVIOUS, NEXT = -1, 1
"""Offsets of the neighboring pp ranks, modulo the number of ranks."""


class Pass(NamedTuple):
    """Forward or backward pass of a chunk over a micro batch."""

    backward: bool
    chunk: int
    microbatch: int


class Done(NamedTuple):
    """A pass executed by a rank."""

    pass_: Pass
    start: float
    """Seconds of a clock shared by all ranks of a host."""
    end: float
    needs: tuple[int, int] | None
    """The received message it depends on: (side, index of the message from this side), or None."""


@dataclass
class RankRecord:
    """Passes and messages of one rank in a step, in order."""

    done: list[Done] = field(default_factory=list)
    sent: dict[int, list[Pass]] = field(default_factory=lambda: {PREVIOUS: [], NEXT: []})
    """Passes whose results were sent, by side."""
    received: dict[int, int] = field(default_factory=lambda: {PREVIOUS: 0, NEXT: 0})
    """Number of received messages, by side."""


class Span(NamedTuple):
    """A pass with its start and end, in seconds from the start of the step."""

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
    """Passes and messages of all ranks of a pipeline in one step."""

    ranks: tuple[tuple[Span, ...], ...]
    """Spans of each rank, in order."""
    messages: tuple[Message, ...]

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


def dependencies(records: Sequence[RankRecord]) -> dict[tuple[int, Pass], tuple[int, Pass]]:
    """Map each (rank, pass) that waits for a message to the (rank, pass) that sent it.

    Messages of one direction between two ranks arrive in the order of sending.
    """
    result = {}
    for rank, record in enumerate(records):
        for done in record.done:
            if done.needs is not None:
                side, number = done.needs
                sender = (rank + side) % len(records)
                result[rank, done.pass_] = sender, records[sender].sent[-side][number]
    return result


def measured_timeline(records: Sequence[RankRecord]) -> PipelineTimeline:
    """Build the timeline of recorded start and end times."""
    begin = min(record.done[0].start for record in records)
    ranks = [
        tuple(Span(done.pass_, done.start - begin, done.end - begin) for done in record.done) for record in records
    ]
    return _timeline(ranks, records)


def earliest_timeline(records: Sequence[RankRecord], seconds: Callable[[int, Pass], float]) -> PipelineTimeline:
    """Build the timeline in which each pass starts as soon as its rank is free and its input has arrived.

    Passes run in the recorded order. ``seconds`` returns the duration of a pass; messages take no time.
    """
    needs = dependencies(records)
    ends: dict[tuple[int, Pass], float] = {}
    ranks: list[list[Span]] = [[] for _ in records]
    while sum(map(len, ranks)) < sum(len(record.done) for record in records):
        before = len(ends)
        for rank, record in enumerate(records):
            for done in record.done[len(ranks[rank]) :]:
                need = needs.get((rank, done.pass_))
                if need is not None and need not in ends:
                    break
                start = max(ranks[rank][-1].end if ranks[rank] else 0.0, ends[need] if need is not None else 0.0)
                ranks[rank].append(Span(done.pass_, start, start + seconds(rank, done.pass_)))
                ends[rank, done.pass_] = ranks[rank][-1].end
        assert len(ends) > before, "a completed schedule has no cycle"
    return _timeline([tuple(spans) for spans in ranks], records)


def _timeline(ranks: Sequence[tuple[Span, ...]], records: Sequence[RankRecord]) -> PipelineTimeline:
    places: Mapping[tuple[int, Pass], Span] = {
        (rank, span.pass_): span for rank, spans in enumerate(ranks) for span in spans
    }
    messages = [
        Message(sender, places[sender, sent], receiver, places[receiver, used])
        for (receiver, used), (sender, sent) in dependencies(records).items()
    ]
    return PipelineTimeline(tuple(ranks), tuple(messages))
