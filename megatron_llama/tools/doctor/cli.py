"""``scripts/doctor.py``: what is wrong with the machines of a run, and what to do."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_llama import cli
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_USER

if TYPE_CHECKING:
    from megatron_llama.config import Config
    from megatron_llama.launch.environment import ProcessContext
    from megatron_llama.launch.world import World
    from megatron_llama.tools.doctor.examination import Case, Report
    from megatron_llama.tools.doctor.finding import Finding
    from megatron_llama.tools.doctor.network import Meeting

QUICK, JSON = "--quick", "--json"
USAGE = """\
python scripts/doctor.py [--quick] [--json] [group=choice ...] [section.setting=value ...]

Examines the machines on which `python train.py` with the same settings would run: versions, devices and drivers,
network interfaces, ports, who reaches whom, clocks, the run's folder and caches, limits; then products, collectives and
links between nodes, measured by the ranks of the run's layout. Every finding comes with what to do. Start it as
train.py: by hand, with launch.hosts, under torchrun or srun. It trains nothing, and leaves nothing behind.

  --quick   without the measurements, in a few seconds and without torch; run.slurm begins with that
  --json    for programs
  --help    this text

Examples
  python scripts/doctor.py model=llama_15m trainer.tp=2 trainer.dp=2
  srun --nodes 4 --ntasks-per-node 1 python scripts/doctor.py model=llama7b trainer.tp=8
  python scripts/doctor.py launch.hosts=[a,b,c] model=llama7b trainer.tp=8 --json

docs/guides/tools/doctor.md lists the checks. Exit status: 0; 2 where a run is sure to break, or a mistake in what was
asked; 1 where
the examination itself failed.
"""
# The ranks only measure: no files, no restarts, and whoever hangs is named soon.
_HANG_SECONDS = "trainer.hang_timeout_seconds=60"


def main(argv: Sequence[str]) -> int:
    """Runs ``scripts/doctor.py`` with ``argv``; returns the exit status."""
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(USAGE)
        return 0
    from megatron_llama.config import ConfigError, format_problems
    from megatron_llama.launch.environment import process_context
    from megatron_llama.launch.job_store import LaunchFailed
    from megatron_llama.tools.common import MOCK_RUN

    overrides = [word for word in argv if word not in (QUICK, JSON)]
    try:
        context = process_context(os.environ)
        config = cli.parse_overrides([*overrides, *MOCK_RUN, _HANG_SECONDS], context)
        if context is None and (config.launch.hosts or config.launch.hostfile is not None):
            return _on_hosts(config, argv)
        return _examine(config, context, quick=QUICK in argv, as_json=JSON in argv)
    except ConfigError as error:
        if QUICK in argv:  # train.py says it itself, a moment later
            return 0
        sys.stderr.write(format_problems(error) + "\n")
        return EXIT_USER
    except LaunchFailed as error:
        sys.stderr.write(f"The examination failed: {error}.\n")
        return EXIT_FAILED


def _on_hosts(config: Config, argv: Sequence[str]) -> int:
    """Starts this program on each host."""
    from megatron_llama.launch.run_dir import choose_run_dir
    from megatron_llama.launch.ssh import run_on_hosts
    from megatron_llama.launch.world import find_world

    world = find_world(config, None)
    plan = world.plan()
    choose_run_dir(plan)
    return run_on_hosts(plan, world.hosts, list(argv))


def _examine(config: Config, context: ProcessContext | None, *, quick: bool, as_json: bool) -> int:
    """One process's part; the first one prints."""
    from megatron_llama.config import ConfigError
    from megatron_llama.launch.world import find_world
    from megatron_llama.tools.doctor.examination import Case, Report, examine_nodes, say
    from megatron_llama.tools.doctor.finding import BREAKS, Finding, of_problem, severest

    begin, wanted = time.monotonic(), config.device.name
    findings, plan, world = list[Finding](), None, None
    try:
        world = find_world(config, context)
        plan = world.plan()
    except ConfigError as error:
        if not quick:  # train.py says it itself, a moment later
            findings += [of_problem("settings", problem, socket.gethostname()) for problem in error.problems]
    config.device.name = wanted  # each node looks for itself
    case = Case(config, plan, context, quick)
    meeting, lost = _meet(context)
    if meeting is None:
        _show(Report([], [], [*findings, *lost], None, time.monotonic() - begin), as_json=as_json)
        return EXIT_USER
    nodes, found, readings = examine_nodes(case, meeting)
    findings += found
    measured = None
    if not quick and all(meeting.exchange(plan is not None and severest(findings) != BREAKS)):
        assert world is not None, "a plan was made for it"
        say(case, "measuring products, collectives and links")
        measured, failed = _measure(case, world, meeting)
        findings += failed
    if case.is_first:
        _show(Report(nodes, readings, findings, measured, time.monotonic() - begin), as_json=as_json)
    broken = meeting.exchange(severest(findings) == BREAKS)[0]  # all processes end alike
    meeting.close()
    return EXIT_USER if broken else 0


def _meet(context: ProcessContext | None) -> tuple[Meeting | None, list[Finding]]:
    """The meeting with the other processes, or why there is none."""
    from megatron_llama.config import ConfigError
    from megatron_llama.launch.job_store import LaunchFailed
    from megatron_llama.launch.join import secret_of_job
    from megatron_llama.tools.doctor.finding import BREAKS, Finding, of_problem
    from megatron_llama.tools.doctor.network import Meeting

    host = socket.gethostname()
    try:
        return Meeting.of(context, "" if context is None else secret_of_job(context)), []
    except ConfigError as error:
        return None, [of_problem("meeting", problem, host) for problem in error.problems]
    except (LaunchFailed, OSError) as error:
        assert context is not None, "a process alone meets nobody"
        remedy = f"open TCP port {context.master_port} of {context.master_addr} for {host} (firewall, security group)"
        return None, [Finding("meeting", BREAKS, f"{host} → {context.master_addr}", str(error), remedy)]


def _show(report: Report, *, as_json: bool) -> None:
    sys.stderr.write("\r\x1b[K" if sys.stderr.isatty() else "")
    text = (
        json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n"
        if as_json
        else report.page(colour=sys.stdout.isatty())
    )
    sys.stdout.write(text)
    sys.stdout.flush()


def _measure(case: Case, world: World, meeting: Meeting) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Starts the ranks, or becomes one; on the first process what they have measured, and what is slow."""
    from megatron_llama.launch.join import join
    from megatron_llama.launch.start import Share, start_ranks
    from megatron_llama.tools.doctor import ranks
    from megatron_llama.tools.doctor.finding import BREAKS, Finding
    from megatron_llama.tools.doctor.ranks import RESULT, measure_ranks

    plan = case.plan
    assert plan is not None, "without one nothing is measured"
    with tempfile.TemporaryDirectory() as folder:
        entry, run_dir = partial(measure_ranks, folder), Path(meeting.exchange(f"{folder}-run")[0])
        run_dir.mkdir(exist_ok=True)  # the first one's name, on each node's own disk
        plan.config.run.dir = str(run_dir)
        with redirect_stdout(io.StringIO()):  # the plan, and who is where
            if case.context is None:
                share = Share(plan.world_size, hang_seconds=plan.config.trainer.hang_timeout_seconds)
                status = start_ranks(plan, entry, share)
            else:
                status = join(plan, world, case.context, entry)
        failed = [each for each in meeting.exchange(status) if each]
        shutil.rmtree(run_dir, ignore_errors=True)
        if failed:
            what = "the ranks could not measure: the cause stands above"
            return None, [Finding("collectives", BREAKS, "all nodes", what, "mend that first")]
        if not case.is_first:
            return None, []
        measured = json.loads((Path(folder) / RESULT).read_text(encoding="utf-8"))
        return measured, list(ranks.judge(measured))
