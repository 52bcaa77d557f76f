"""Pipeline diagrams: megatron-core's order, start times of passes, and the drawn shapes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_llama import cli as train_cli
from megatron_llama.launch.world import find_world
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.figures import as_png, as_svg
from megatron_llama.tools.pipeline import cli, diagram
from megatron_llama.tools.pipeline.diagram import Panel, Pass, PipelineTimeline, Span
from megatron_llama.tools.pipeline.record_passes import record_passes, recorded_order, tiny_plan
from tests.oracle import on_ranks, rank_data
from tests.pages import commands_of
from tests.paths import ROOT
from tests.ranks import run_ranks

Layout = tuple[int, int, int]
LAYOUTS: tuple[Layout, ...] = ((2, 1, 3), (4, 1, 6), (2, 2, 4), (4, 2, 4))


def _orders(_: int) -> dict[Layout, list[list[Pass]]]:
    dist.destroy_process_group()
    return {layout: recorded_order(*layout) for layout in LAYOUTS}


@pytest.fixture(scope="module")
def orders() -> dict[Layout, list[list[Pass]]]:
    """Return the records of megatron-core's schedule by (pp, vpp, micro batches)."""
    records: dict[Layout, list[list[Pass]]] = run_ranks(_orders, 1)[0]
    return records


def unit_seconds(_: int, pass_: Pass) -> float:
    return 2.0 if pass_.backward else 1.0


def format_order(order: list[Pass]) -> str:
    """Format the passes as F0 B0 ..., with the chunk after the micro batch if there are several."""
    several = any(pass_.chunk for pass_ in order)
    return " ".join(
        f"{'B' if backward else 'F'}{batch}" + (f"'{chunk}" if several else "") for backward, chunk, batch in order
    )


def test_schedules_have_the_published_order(orders: dict[Layout, list[list[Pass]]]) -> None:
    first, last = orders[2, 1, 3]
    assert format_order(first) == "F0 F1 B0 F2 B1 B2", "one more micro batch in flight than on the last stage"
    assert format_order(last) == "F0 B0 F1 B1 F2 B2"
    assert format_order(orders[4, 1, 6][0]).startswith("F0 F1 F2 F3 B0 F4 B1 F5")
    first, last = orders[2, 2, 4]
    assert format_order(first).startswith("F0'0 F1'0 F0'1 F1'1 F2'0 B0'1 F3'0 B1'1 F2'1 B0'0")
    assert format_order(last).startswith("F0'0 F1'0 F0'1 B0'1 F1'1 B1'1 F2'0 B0'0")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_pass_runs_once_and_waits_for_its_neighbor(layout: Layout, orders: dict[Layout, list[list[Pass]]]) -> None:
    pp, vpp, microbatches = layout
    passes = [Pass(way, chunk, batch) for way in (False, True) for chunk in range(vpp) for batch in range(microbatches)]
    assert [sorted(order) for order in orders[layout]] == [passes] * pp
    timeline = diagram.earliest_timeline(orders[layout], unit_seconds)
    assert timeline.bubble == pytest.approx(diagram.bubble_of_equal_stages(*layout), abs=1e-12), "the formula"
    assert len(timeline.messages) == 2 * (pp * vpp - 1) * microbatches, (
        "none to the first stage, no gradient to the last"
    )
    for sender, sent, receiver, used in timeline.messages:
        assert abs(sender - receiver) in (1, pp - 1) and sent.end <= used.start


def test_a_real_run_has_the_drawn_order(orders: dict[Layout, list[list[Pass]]]) -> None:
    layout = (2, 2, 4)
    recorded = on_ranks(_record_steps, tiny_plan(*layout))
    assert [[span.pass_ for span in spans] for spans in recorded] == orders[layout]
    timeline = diagram.measured_timeline(recorded)
    assert 0 < timeline.bubble < 1
    for sender, sent, receiver, used in timeline.messages:
        assert sent.end < used.start, f"message from {sender} to {receiver} arrived after its use"


def _record_steps(plan: Plan, model: ParallelModel) -> list[Span]:
    for _ in range(2):
        with record_passes(model.chunks) as spans:
            model.forward_backward(rank_data(plan).train.at(0))
    return spans


def two_stages() -> PipelineTimeline:
    """Return a timeline of two stages and one micro batch; the second stage takes three times as long."""
    order = [Pass(False, 0, 0), Pass(True, 0, 0)]
    return diagram.earliest_timeline([order] * 2, lambda rank, pass_: (3 if rank else 1) * unit_seconds(rank, pass_))


def test_a_diagram_has_every_pass_and_message() -> None:
    timeline = two_stages()
    panels = [Panel("above", "ms", timeline), Panel("below & last", "ms", timeline, scale=0.5)]
    text = as_svg(diagram.draw("two stages", panels))
    root = ET.fromstring(text)  # noqa: S314  our own
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["forward pass of micro batch 0", "backward pass of micro batch 0"] * 4
    assert "prefers-color-scheme:dark" in text and "below &amp; last" in text
    boxes = re.findall(r"</title>\s*<path d=\"M (\S+) \S+ L (\S+)", text)
    widths = [float(right) - float(left) for left, right in boxes]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.02), "a backward pass has twice the width"
    assert widths[4] == pytest.approx(2 * widths[0], rel=0.02), "both panels have one scale"
    assert as_svg(diagram.draw("two stages", panels)) == text
    assert as_png(diagram.draw("two stages", panels)).startswith(b"\x89PNG")


PAGE_FILE = ROOT / "docs/guides/training/parallelism.md"
PAGE = PAGE_FILE.read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in commands_of(PAGE_FILE) if line.startswith("python ")]
PICTURES = [command[2:] for command in COMMANDS if command[1] == "scripts/pipeline.py" and "--out" in command]


def make_plan(arguments: list[str]) -> Plan:
    """Resolve the plan of a command without its files: its checkpoint comes from an earlier command."""
    overrides = [
        argument
        for argument in arguments
        if "=" in argument and not argument.startswith(("checkpoint.resume=", "cluster."))
    ]
    return find_world(train_cli.parse_overrides([*overrides, *MOCK_RUN, "dry_run=true"]), None).plan()


def test_each_command_plans_the_ranks_shown() -> None:
    runs = [command[2:] for command in COMMANDS if command[1] in ("train.py", "scripts/pipeline.py")]
    assert len(runs) == len(
        [line for line in PAGE.splitlines() if re.match(r"    (\$ )?python (train|scripts/pip)", line)]
    )
    worlds = {plan.config.run.dir: plan.world_size for plan in map(make_plan, runs)}
    assert worlds["runs/3d"] == 8 and worlds["runs/tp2"] == worlds["runs/pp2_vpp2"] == 2 and worlds["runs/one"] == 1


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(PICTURES)))])
def test_diagrams_and_tables_match_the_commands(number: int, tmp_path: Path) -> None:
    shown = Path(PICTURES[number][-1])
    text, picture = run_ranks(_draw, 1, PICTURES[number], tmp_path / shown.name)[0]
    link = Path(os.path.relpath(ROOT / shown, PAGE_FILE.parent)).as_posix()
    assert _content(picture) == _content((ROOT / shown).read_text(encoding="utf-8")) and f"({link})" in PAGE
    table = [line for line in text.splitlines()[5:-1] if line]  # below the layout and megatron-core's version
    assert len(table) == 9 and all(f"    {line}" in PAGE.splitlines() for line in table)


def _draw(_: int, arguments: list[str], out: Path) -> tuple[str, str]:
    dist.destroy_process_group()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert cli.main([*arguments[:-1], str(out)]) == 0
    return output.getvalue(), out.read_text(encoding="utf-8")


def _content(svg: str) -> list[str]:
    """Return the texts and tooltips of a picture with the rounded places of its boxes, which each matplotlib draws."""
    boxes = re.findall(r"<title>(.*?)</title>\s*<path d=\"M (\S+) (\S+) L (\S+)", svg)
    places = [f"{about} {float(x):.0f} {float(y):.0f} {float(right):.0f}" for about, x, y, right in boxes]
    return [*re.findall("<text[^>]*>(.*?)</text>", svg), *places]
