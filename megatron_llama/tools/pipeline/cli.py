"""``scripts/pipeline.py``: who computes and sends what when, drawn, and how much of the time is bubble."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama import cli
from megatron_llama.devices import find_device
from megatron_llama.system.exit_status import EXIT_USER
from megatron_llama.system.tables import text_table
from megatron_llama.tools.common import MOCK_RUN

if TYPE_CHECKING:
    from megatron_llama.plan import Plan
    from megatron_llama.tools.pipeline.lanes import Timeline
    from megatron_llama.tools.pipeline.record import Passes
    from megatron_llama.tools.settings import ClusterConfig

MOST_MICROBATCHES = 32
USAGE = """\
python scripts/pipeline.py [--measure] [--out FILE.svg|FILE.png] [group=choice ...] [setting=value ...]

Draws a training step of `python train.py` with the same settings as its pipeline stages run it: a lane for each stage,
a box for each micro batch's forward and backward pass, a line for each message. The order is megatron-core's own: its
schedule is run here once as each stage, on a tiny model. How long a pass takes is by floating-point operations; with
cluster.device=NAME as scripts/plan.py forecasts it for that device. trainer.dp=N is for machines that are not here.

  --measure   also run the model itself on this machine, and draw the step as it was; the boxes of the first picture
              are then as long as the medians that were measured
  --out FILE  where the picture goes, .svg or .png (default: runs/pipeline/NAME.svg)
  --help      this text

Prints for each stage how long it computes and waits, and the bubble: the share of the stages' time in which they wait.

Examples
  python scripts/pipeline.py trainer.pp=4 trainer.global_batch_size=8 trainer.micro_batch_size=1
  python scripts/pipeline.py model=llama7b trainer.pp=4 trainer.vpp=2 trainer.dp=1 cluster.device=h100
  python scripts/pipeline.py --measure trainer.pp=2 --out pipeline.png

Exit status: 0; 2 a config that can't work; else a failure. docs/guides/training/parallelism.md explains what the
pictures show.
"""


def main(argv: Sequence[str]) -> int:
    """Runs ``scripts/pipeline.py`` with ``argv``; returns the exit status."""
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(USAGE)
        return 0
    # Imported here: --help needs none of it.
    from megatron_llama.config import ConfigError, format_problems

    parser = argparse.ArgumentParser(usage=USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments, overrides = parser.parse_known_args(argv)
    try:
        plan, cluster = plan_picture(overrides, arguments.measure)
        out = arguments.out or _default_path(plan)
        _check(plan, out)
        return _draw(plan, cluster, out, arguments.measure)
    except ConfigError as error:
        sys.stderr.write(format_problems(error) + "\n")
        return EXIT_USER


def plan_picture(overrides: Sequence[str], measure: bool) -> tuple[Plan, ClusterConfig | None]:
    """The plan of a command line, and the cluster if it names one. Raises ConfigError with everything that is wrong."""
    from megatron_llama.config import ConfigError, Problem
    from megatron_llama.launch.world import find_world
    from megatron_llama.tools.forecast.hardware import devices, find_device
    from megatron_llama.tools.settings import load_cluster

    cluster, rest, problems = load_cluster(overrides)
    if find_device(cluster.device) is None:
        advice = f"write one of {', '.join(devices())}"
        problems.append(Problem("cluster.device", cluster.device, "is not in the hardware table", advice))
    try:
        config = cli.parse_overrides([*rest, *MOCK_RUN, "data.name=pipeline", f"dry_run={not measure}"])
        plan = find_world(config, None).plan()
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return plan, cluster if len(rest) < len(overrides) else None


def _default_path(plan: Plan) -> Path:
    trainer = plan.config.trainer
    return Path(f"runs/pipeline/{plan.model.name}_pp{trainer.pp}_vpp{trainer.vpp}_m{plan.num_microbatches}.svg")


def _check(plan: Plan, out: Path) -> None:
    """Raises ConfigError for what can't be drawn."""
    from megatron_llama.config import ConfigError, Problem

    problems = []
    if plan.config.trainer.pp == 1:
        rule = "one stage is no pipeline: there is nothing to draw"
        problems.append(Problem("trainer.pp", 1, rule, "write trainer.pp=2 or more"))
    if out.suffix not in (".svg", ".png"):
        problems.append(Problem("--out", str(out), "pictures are .svg or .png", f"write --out {out.stem}.svg"))
    if problems:
        raise ConfigError(problems)


def _draw(plan: Plan, cluster: ClusterConfig | None, out: Path, measure: bool) -> int:
    from megatron_llama.plan import layout_lines
    from megatron_llama.system.files import write_atomically
    from megatron_llama.tools.pipeline import record
    from megatron_llama.tools.pipeline.lanes import Panel, as_early_as_possible, as_png, as_svg, draw
    from megatron_llama.tools.pipeline.record import measured, recorded_order

    pp, vpp, microbatches = plan.config.trainer.pp, plan.config.trainer.vpp, _drawn_microbatches(plan, measure)
    real = measured(plan) if measure else None
    if isinstance(real, int):
        return real
    if real is not None:
        passes = record.as_medians(real, vpp)
    else:
        passes = record.by_flops(plan) if cluster is None else record.on_cluster(plan, cluster)
    ideal = as_early_as_possible(recorded_order(pp, vpp, microbatches), passes.of(pp))
    panels = [Panel(f"passes {passes.source}; bubble {ideal.bubble:.1%}", passes.unit, ideal)]
    if real is not None:
        panels.append(Panel(f"measured; bubble {real.bubble:.1%}", passes.unit, real, scale=0.001))
    name = f"{_schedule(plan)}: {pp} stages, {microbatches} micro batches"
    picture = draw(name, panels)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, as_svg(picture) if out.suffix == ".svg" else as_png(picture))
    lines = [*layout_lines(plan), "", *_report(plan, passes, ideal, real, microbatches), "", f"picture: {out}"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _drawn_microbatches(plan: Plan, measure: bool) -> int:
    """All that are measured; else at most MOST_MICROBATCHES, in whole rounds of pp."""
    pp = plan.config.trainer.pp
    most = max(MOST_MICROBATCHES // pp, 2) * pp
    return plan.num_microbatches if measure or plan.num_microbatches <= most else most


def _schedule(plan: Plan) -> str:
    vpp = plan.config.trainer.vpp
    return f"interleaved 1F1B, {vpp} chunks a stage" if vpp > 1 else "1F1B"


def _report(plan: Plan, passes: Passes, ideal: Timeline, real: Timeline | None, drawn: int) -> Iterator[str]:
    """What each stage computes, and the bubbles."""
    from megatron.core import __version__ as megatron_core

    from megatron_llama.tools.pipeline.lanes import bubble_of_equal_stages

    pp, vpp = plan.config.trainer.pp, plan.config.trainer.vpp
    yield f"megatron-core {megatron_core}: {_schedule(plan)}"
    yield f"passes {passes.source}, in {passes.unit}"
    if drawn < plan.num_microbatches:
        yield f"drawn with {drawn} of the {plan.num_microbatches} micro batches: later ones repeat the middle"
    head = ["stage", "layers", "forward", "backward", "computes", "waits"]
    rows = [head + (["measured: computes", "waits"] if real is not None else [])]
    for rank in range(pp):
        chunks = range(rank, pp * vpp, pp)
        row = [str(rank), " ".join(_layers(plan.stage_layers[stage]) for stage in chunks)]
        row += [" ".join(f"{of[stage]:.3g}" for stage in chunks) for of in (passes.forward, passes.backward)]
        row += [f"{ideal.busy(rank):.4g}", f"{ideal.seconds - ideal.busy(rank):.4g}"]
        if real is not None:
            row += [f"{1000 * real.busy(rank):.4g}", f"{1000 * (real.seconds - real.busy(rank)):.4g}"]
        rows.append(row)
    yield from (f"  {row}" for row in text_table(rows, left=2))
    yield ""
    yield "bubble, the share of the stages' time in which they wait"
    equal = bubble_of_equal_stages(pp, vpp, drawn)
    bubbles = [
        ("if all stages took equally long, (p-1)/(v m + p-1)", f"{equal:.1%}"),
        ("as drawn", f"{ideal.bubble:.1%}"),
    ]
    if drawn < plan.num_microbatches:
        whole = bubble_of_equal_stages(pp, vpp, plan.num_microbatches)
        bubbles.append((f"if all did, with all {plan.num_microbatches} micro batches", f"{whole:.1%}"))
    if real is not None:
        bubbles.append(("measured", f"{real.bubble:.1%}"))
    yield from (f"  {row}" for row in text_table(bubbles, left=1))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    device = find_device(plan.config.device.name)
    shares_cores = device is not None and not device.is_accelerator
    if real is not None and shares_cores and plan.world_size > cores:
        yield f"{plan.world_size} ranks share {cores} cores here: what waits in the picture may wait for a core."


def _layers(layers: Sequence[int]) -> str:
    """0-3."""
    if not layers:
        return "none"
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
