"""A pipeline's step as a picture: a lane for each rank, a box for each pass, a line for each message.

The picture is a list of shapes. ``as_svg`` writes it as an SVG that follows the reader's light or dark theme;
``as_png`` draws the same with matplotlib. The same timeline gives the same bytes of SVG.
"""
from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TOP = 1000, 64, 14, 34
LANE, BOX = 40, 26
BETWEEN = 30
"""Between two panels."""
SIZES, DIGIT = (11, 8), 0.58
"""Sizes of a micro batch's number, and the width of a digit of size 1."""
MOST_MESSAGES = 600
"""More lines than that hide the boxes."""
FORWARD = ("#2563eb", "#60a5fa", "#93c5fd", "#bfdbfe")
BACKWARD = ("#c2410c", "#f97316", "#fdba74", "#fed7aa")
"""By chunk; of more chunks the last shade is repeated."""
DARK_TEXT_FROM = 2
"""The chunk from whose shade on numbers are dark."""
INK, SOFT, LANE_FILL, PAGE = (
    ("#1f2933", "#e5e7eb"),
    ("#64748b", "#94a3b8"),
    ("#eef1f4", "#262c36"),
    ("#ffffff", "#0d1117"),
)
"""(on light, on dark)"""


class Box(NamedTuple):
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    """A colour, or the name of a class of STYLE."""
    about: str = ""
    """Shown by browsers where the mouse points."""


class Line(NamedTuple):
    """A thin line."""

    x: float
    y: float
    to_x: float
    to_y: float
    faint: bool = False


class Text(NamedTuple):
    """Words at their baseline."""

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
    shapes: tuple[Box | Line | Text, ...]


class Panel(NamedTuple):
    """A timeline and what stands above it."""

    title: str
    unit: str
    timeline: Timeline
    scale: float = 1.0
    """Of the unit in the timeline's."""


def draw(title: str, panels: Sequence[Panel]) -> Picture:
    """The panels below each other, in one scale; the longest is as wide as the page."""
    shapes: list[Box | Line | Text] = [Text(LEFT, 20, title, size=14, anchor="start", bold=True)]
    y: float = TOP
    wide = (WIDTH - LEFT - RIGHT) / max(panel.timeline.seconds / panel.scale for panel in panels)
    for panel in panels:
        shapes += _panel(panel, y, wide / panel.scale)
        y += 18 + LANE * len(panel.timeline.ranks) + 26 + BETWEEN
    chunks = 1 + max(span.what.chunk for span in panels[0].timeline.ranks[0])
    shapes += _legend(chunks, y - BETWEEN + 16)
    return Picture(y - BETWEEN + 30, tuple(shapes))


def _panel(panel: Panel, top: float, wide: float) -> Iterator[Box | Line | Text]:
    """``wide`` is the width of one second."""
    timeline = panel.timeline
    yield Text(LEFT, top + 10, panel.title, "soft", anchor="start")
    top += 18

    def across(seconds: float) -> float:
        return LEFT + seconds * wide

    def middle(rank: int) -> float:
        return top + rank * LANE + LANE / 2

    for rank, spans in enumerate(timeline.ranks):
        yield Text(LEFT - 8, middle(rank) + 4, f"stage {rank}", anchor="end")
        yield Box(LEFT, middle(rank) - BOX / 2, timeline.seconds * wide, BOX, "lane")
        for (backward, chunk, microbatch), start, end in spans:
            shades = BACKWARD if backward else FORWARD
            about = f"{'backward' if backward else 'forward'} pass of micro batch {microbatch}"
            about += f", chunk {chunk}" if _chunks(timeline) > 1 else ""
            fill = shades[min(chunk, len(shades) - 1)]
            # Boxes touch: a hair of the lane between them tells them apart.
            yield Box(across(start), middle(rank) - BOX / 2, max(0.4, (end - start) * wide - 0.8), BOX, fill, about)
            words, colour = str(microbatch), "#1f2933" if chunk >= DARK_TEXT_FROM else "#ffffff"
            for size in [size for size in SIZES if (end - start) * wide > DIGIT * size * len(words) + 2][:1]:
                yield Text(across((start + end) / 2), middle(rank) + 0.36 * size, words, colour, size)
    if len(timeline.messages) <= MOST_MESSAGES:
        for sender, sent, receiver, used in timeline.messages:
            side = 1 if receiver > sender else -1
            yield Line(
                across(sent.end),
                middle(sender) + side * BOX / 2,
                across(used.start),
                middle(receiver) - side * BOX / 2,
                faint=abs(receiver - sender) > 1,
            )
    bottom = top + LANE * len(timeline.ranks)
    for tick in _ticks(timeline.seconds / panel.scale):
        x = across(tick * panel.scale)
        yield Line(x, bottom, x, bottom + 4)
        yield Text(x, bottom + 16, f"{tick:g}", "soft", 10)
    yield Text(WIDTH - RIGHT, bottom + 28, panel.unit, "soft", 10, "end")


def _chunks(timeline: Timeline) -> int:
    return 1 + max(span.what.chunk for span in timeline.ranks[0])


def _ticks(end: float) -> list[float]:
    """About ten round numbers from 0 to ``end``."""
    rough = end / 10
    power = 10 ** math.floor(math.log10(rough))
    step = power * next(times for times in (1, 2, 5, 10) if times * power >= rough)
    return [round(number * step, 12) for number in range(int(end / step + 1e-9) + 1)]


def _legend(chunks: int, y: float) -> Iterator[Box | Line | Text]:
    x: float = LEFT
    for name, shades in (("forward", FORWARD), ("backward", BACKWARD)):
        for chunk in range(min(chunks, len(shades))):
            words = name + (f", chunk {chunk}" if chunks > 1 else "")
            yield Box(x, y - 9, 12, 12, shades[chunk])
            yield Text(x + 17, y + 1, words, "soft", anchor="start")
            x += 34 + 5.9 * len(words)
    yield Box(x, y - 9, 12, 12, "lane")
    yield Text(x + 17, y + 1, "waits", "soft", anchor="start")
    yield Line(x + 64, y - 3, x + 82, y - 3)
    yield Text(x + 88, y + 1, "sends", "soft", anchor="start")


def as_svg(picture: Picture) -> str:
    """The text of an SVG."""
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


def _svg(shape: Box | Line | Text) -> str:
    match shape:
        case Box(x, y, width, height, fill, about):
            where = f'x="{_short(x)}" y="{_short(y)}" width="{_short(width)}" height="{_short(height)}"'
            title = f"><title>{escape(about)}</title></rect>" if about else "/>"
            return f"<rect {where} {_colour(fill)}{title}"
        case Line(x, y, to_x, to_y, faint):
            style = 'class="faint" ' if faint else ""
            ends = f'x1="{_short(x)}" y1="{_short(y)}" x2="{_short(to_x)}" y2="{_short(to_y)}"'
            return f"<line {style}{ends}/>"
        case Text(x, y, words, fill, size, anchor, bold):
            more = ' font-weight="600"' if bold else ""
            place = f'x="{_short(x)}" y="{_short(y)}" font-size="{size:g}" text-anchor="{anchor}"'
            return f"<text {place} {_colour(fill)}{more}>{escape(words)}</text>"


def _colour(fill: str) -> str:
    return f'fill="{fill}"' if fill.startswith("#") else f'class="{fill}"'


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def as_png(picture: Picture) -> bytes:
    """The bytes of a PNG, on white. matplotlib is imported when one is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    named = {"lane": LANE_FILL[0], "ink": INK[0], "soft": SOFT[0]}
    points = 0.72  # of a unit of the picture, at 100 units an inch
    figure = pyplot.figure(figsize=(WIDTH / 100, picture.height / 100), dpi=200)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(picture.height, 0))
    axes.axis("off")
    for shape in picture.shapes:
        match shape:
            case Box(x, y, width, height, fill):
                axes.add_patch(Rectangle((x, y), width, height, color=named.get(fill, fill), linewidth=0))
            case Line(x, y, to_x, to_y, faint):
                axes.plot([x, to_x], [y, to_y], color=SOFT[0], linewidth=0.8 * points, alpha=0.3 if faint else 0.75)
            case Text(x, y, words, fill, size, anchor, bold):
                axes.text(
                    x,
                    y,
                    words,
                    color=named.get(fill, fill),
                    fontsize=size * points,
                    ha={"start": "left", "middle": "center", "end": "right"}[anchor],
                    va="baseline",
                    weight="bold" if bold else "normal",
                )
    written = io.BytesIO()
    figure.savefig(written, format="png")
    pyplot.close(figure)
    return written.getvalue()


# When each rank of a pipeline computes what: from the order in which it does so, and how long each pass takes.


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
