"""Command line of ``scripts/pipeline.py``: draw a pipeline schedule and print its bubble."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama import cli
from megatron_llama.config import ConfigError, Problem
from megatron_llama.devices import find_device
from megatron_llama.launch.world import find_world
from megatron_llama.plan import Plan, batch_line, layout_lines
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import format_ranges, text_table
from megatron_llama.system.ulimits import usable_cores
from megatron_llama.tools.common import MOCK_RUN, run_tool
from megatron_llama.tools.figures import as_png, as_svg
from megatron_llama.tools.pipeline import diagram
from megatron_llama.tools.planned_run import PlannedRun, read_planned_run

if TYPE_CHECKING:  # these need torch, which --help does not
    from matplotlib.figure import Figure

    from megatron_llama.tools.pipeline.record_passes import PassTimes

MAX_MICROBATCHES = 32


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/pipeline.py`` with ``argv``; return the exit status."""
    return run_tool("pipeline", argv, _run, {"--measure": bool, "--out": Path})


def _run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    plan, run = plan_picture(overrides, arguments.measure)
    trainer = plan.config.trainer
    name = f"{plan.model.name}_pp{trainer.pp}_vpp{trainer.vpp}_m{plan.num_microbatches}.svg"
    out = arguments.out or Path("runs/pipeline") / name
    problems = []
    if trainer.pp == 1:
        problems.append(Problem("trainer.pp", 1, "one stage is not a pipeline", "write trainer.pp=2 or more"))
    if out.suffix not in (".svg", ".png"):
        problems.append(Problem("--out", str(out), "pictures are .svg or .png", f"write --out {out.stem}.svg"))
    if problems:
        raise ConfigError(problems)
    return _draw(plan, run, out)


def plan_picture(overrides: Sequence[str], measure: bool) -> tuple[Plan, PlannedRun | None]:
    """Return the plan of a command line, and the planned run unless it is measured here.

    Raises ConfigError with all problems.
    """
    more = [*MOCK_RUN, "data.name=pipeline", f"dry_run={not measure}"]
    if measure:
        return find_world(cli.parse_overrides([*overrides, *more]), None).plan(), None
    run = read_planned_run(overrides, more)
    return run.world.plan(), run


def _draw(plan: Plan, run: PlannedRun | None, out: Path) -> int:
    """Draw a planned run, or measure it first; print the report and return the exit status."""
    from megatron_llama.tools.pipeline import record_passes

    if run is None:
        status, measured = record_passes.measure_pipeline(plan)
        if measured is None:
            return status
        head, hardware, microbatches = list[str](), None, plan.num_microbatches
        pass_times = record_passes.median_pass_times(measured, plan.config.trainer.vpp)
    else:
        head, hardware, microbatches = run.hardware.head(), run.hardware.title, _drawn_microbatches(plan)
        measured = None
        on_cluster = run.names_cluster and run.hardware.spec is not None
        pass_times = (
            record_passes.pass_times_on_cluster(plan, run.cluster)
            if on_cluster
            else record_passes.pass_times_by_flops(plan)
        )
    picture, ideal = schedule_picture(plan, pass_times, microbatches, hardware, measured)
    write_atomically(out, as_svg(picture) if out.suffix == ".svg" else as_png(picture))
    report = _report(plan, pass_times, ideal, measured, microbatches)
    lines = [*head, *layout_lines(plan, hardware), "", *report, "", f"picture: {out}"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def plan_svg(plan: Plan) -> str:
    """Return the pipeline schedule of a plan with several stages as SVG; passes take the time of their FLOPs."""
    from megatron_llama.tools.pipeline.record_passes import pass_times_by_flops

    return as_svg(schedule_picture(plan, pass_times_by_flops(plan), _drawn_microbatches(plan))[0])


def schedule_picture(
    plan: Plan,
    pass_times: PassTimes,
    microbatches: int,
    hardware: str | None = None,
    measured: diagram.PipelineTimeline | None = None,
) -> tuple[Figure, diagram.PipelineTimeline]:
    """Draw a plan's schedule, and the ``measured`` step below it; return the picture and the drawn timeline."""
    from megatron_llama.tools.pipeline.record_passes import recorded_order

    pp, vpp = plan.config.trainer.pp, plan.config.trainer.vpp
    ideal = diagram.earliest_timeline(recorded_order(pp, vpp, microbatches), pass_times.of(pp))
    panels = [diagram.Panel(f"passes {pass_times.source}; bubble {ideal.bubble:.1%}", pass_times.unit, ideal)]
    if measured is not None:
        panels.append(diagram.Panel(f"measured; bubble {measured.bubble:.1%}", pass_times.unit, measured, scale=0.001))
    name = f"{_schedule(plan)}: {pp} stages, {microbatches} micro batches; {batch_line(plan.config, hardware)}"
    return diagram.draw(name, panels), ideal


def _drawn_microbatches(plan: Plan) -> int:
    """Return the number of micro batches to draw: at most MAX_MICROBATCHES, a multiple of pp."""
    pp = plan.config.trainer.pp
    return min(plan.num_microbatches, max(MAX_MICROBATCHES // pp, 2) * pp)


def _schedule(plan: Plan) -> str:
    vpp = plan.config.trainer.vpp
    return f"interleaved 1F1B, {vpp} chunks a stage" if vpp > 1 else "1F1B"


def _report(
    plan: Plan,
    pass_times: PassTimes,
    ideal: diagram.PipelineTimeline,
    measured: diagram.PipelineTimeline | None,
    drawn: int,
) -> Iterator[str]:
    """Format the times of each stage and the bubble."""
    from megatron.core import __version__ as megatron_core

    pp, vpp = plan.config.trainer.pp, plan.config.trainer.vpp
    yield f"megatron-core {megatron_core}: {_schedule(plan)}"
    yield f"passes {pass_times.source}, in {pass_times.unit}"
    if drawn < plan.num_microbatches:
        yield f"drawn with {drawn} of {plan.num_microbatches} micro batches: the rest repeats the middle"
    timelines = [(ideal, 1)] if measured is None else [(ideal, 1), (measured, 1000)]
    head = ["stage", "layers", "forward", "backward", "computes", "waits"]
    if measured is not None:
        head += ["measured: computes", "waits"]
    rows = [head]
    for rank in range(pp):
        chunks = range(rank, pp * vpp, pp)
        row = [str(rank), " ".join(format_ranges(plan.stage_layers[stage]) or "none" for stage in chunks)]
        row += [" ".join(f"{of[stage]:.3g}" for stage in chunks) for of in (pass_times.forward, pass_times.backward)]
        for timeline, unit in timelines:
            busy = timeline.busy(rank)
            row += [f"{unit * busy:.4g}", f"{unit * (timeline.seconds - busy):.4g}"]
        rows.append(row)
    yield from (f"  {row}" for row in text_table(rows, left=2))
    yield from ("", "bubble, the share of the stages' time in which they wait")
    equal = "if all stages took equally long, (p-1)/(v m + p-1)"
    bubbles = [(equal, diagram.bubble_of_equal_stages(pp, vpp, drawn)), ("as drawn", ideal.bubble)]
    if drawn < (count := plan.num_microbatches):
        bubbles.append((f"the same with all {count} micro batches", diagram.bubble_of_equal_stages(pp, vpp, count)))
    if measured is not None:
        bubbles.append(("measured", measured.bubble))
    yield from (f"  {row}" for row in text_table([(name, f"{share:.1%}") for name, share in bubbles], left=1))
    cores = len(usable_cores())
    device = find_device(plan.config.device.name)
    shares_cores = device is not None and not device.is_accelerator
    if measured is not None and shares_cores and plan.world_size > cores:
        yield f"{plan.world_size} ranks share {cores} cores, so a stage may wait for a core"
