"""Command line of ``scripts/doctor.py``: check the nodes of a run and suggest fixes."""

from __future__ import annotations

import argparse
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
from typing import Any

from megatron_llama import cli
from megatron_llama.config import Config, ConfigError
from megatron_llama.launch.environment import ProcessContext, process_context
from megatron_llama.launch.job_store import LaunchFailed
from megatron_llama.launch.other_launchers import join, secret_of_job
from megatron_llama.launch.run_dir import choose_run_dir
from megatron_llama.launch.ssh import run_on_hosts
from megatron_llama.launch.start import LocalRanks, start_ranks
from megatron_llama.launch.world import World, find_world
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_USER
from megatron_llama.tools.common import MOCK_RUN, run_tool, show_line
from megatron_llama.tools.doctor.examination import DoctorReport, Examination, examine_nodes, show_progress
from megatron_llama.tools.doctor.finding import BREAKS, NOTES, Finding, finding_of_problem, highest_severity
from megatron_llama.tools.doctor.network import Connections

_REPORTED = "start train.py, or the doctor without --quick, to read the reasons"
# Report hangs early: the ranks only measure.
_HANG_SECONDS = "trainer.hang_timeout_seconds=60"


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/doctor.py`` with ``argv``; return the exit status."""
    return run_tool("doctor", argv, partial(_run, argv), {"--quick": bool, "--json": bool})


def _run(argv: Sequence[str], arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    context = None
    try:
        context = process_context(os.environ)
        config = cli.parse_overrides([*overrides, *MOCK_RUN, _HANG_SECONDS], context)
        if context is None and (config.launch.hosts or config.launch.hostfile is not None):
            world = find_world(config, None)
            plan = world.plan()
            choose_run_dir(plan)
            return run_on_hosts(plan, world.hosts, list(argv))
        return _examine(config, context, quick=arguments.quick, as_json=arguments.json)
    except ConfigError:
        if not arguments.quick:
            raise
        if context is None or context.rank == 0:  # run.slurm starts train.py next, which reports the errors
            sys.stderr.write(f"nothing is checked: the settings are invalid;\n    {_REPORTED}\n")
        return 0
    except LaunchFailed as error:
        sys.stderr.write(f"doctor failed: {error}.\n")
        return EXIT_FAILED


def _examine(config: Config, context: ProcessContext | None, *, quick: bool, as_json: bool) -> int:
    """Examine in one process; the first one prints."""
    begin, device_name = time.monotonic(), config.device.name
    findings, plan, world = list[Finding](), None, None
    try:
        world = find_world(config, context)
        plan = world.plan()
    except ConfigError as error:
        if quick:
            problem = "train.py rejects the settings; they and the space on the disks are not checked"
            findings.append(Finding("settings", NOTES, socket.gethostname(), problem, _REPORTED))
        else:
            findings += [finding_of_problem("settings", problem, socket.gethostname()) for problem in error.problems]
    config.device.name = device_name  # each node detects its own device
    examination = Examination(config, plan, context, quick)
    connections, lost = _connect(context)
    if connections is None:
        _show(DoctorReport([], [], [*findings, *lost], None, time.monotonic() - begin), as_json=as_json)
        return EXIT_USER
    nodes, node_findings, readings = examine_nodes(examination, connections)
    findings += node_findings
    measured = None
    if not quick and all(connections.exchange(plan is not None and highest_severity(findings) != BREAKS)):
        assert world is not None, "a plan has a world"
        show_progress(examination, "measuring matmuls, collectives and links")
        measured, failed = _measure(examination, world, connections)
        findings += failed
    if examination.is_first:
        _show(DoctorReport(nodes, readings, findings, measured, time.monotonic() - begin), as_json=as_json)
    broken = connections.exchange(highest_severity(findings) == BREAKS)[0]  # all processes return the same status
    connections.close()
    return EXIT_USER if broken else 0


def _connect(context: ProcessContext | None) -> tuple[Connections | None, list[Finding]]:
    """Connect to the other processes, or return the findings that explain the failure."""
    host = socket.gethostname()
    try:
        return Connections.of(context, "" if context is None else secret_of_job(context)), []
    except ConfigError as error:
        return None, [finding_of_problem("rendezvous", problem, host) for problem in error.problems]
    except (LaunchFailed, OSError) as error:
        assert context is not None, "a single process opens no connection"
        remedy = f"open TCP port {context.master_port} of {context.master_addr} for {host} (firewall, security group)"
        return None, [Finding("rendezvous", BREAKS, f"{host} → {context.master_addr}", str(error), remedy)]


def _show(report: DoctorReport, *, as_json: bool) -> None:
    show_line("")
    text = json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n" if as_json else None
    sys.stdout.write(text or report.page(colour=sys.stdout.isatty()))
    sys.stdout.flush()


def _measure(
    examination: Examination, world: World, connections: Connections
) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Start the ranks or become one; return the measurements and findings on the first process."""
    from megatron_llama.tools.doctor.rank_and_link_speed import RESULT, judge, measure_ranks

    plan = examination.plan
    assert plan is not None, "only runs with a plan are measured"
    with tempfile.TemporaryDirectory() as folder:
        entry, run_dir = partial(measure_ranks, folder), Path(connections.exchange(f"{folder}-run")[0])
        run_dir.mkdir(exist_ok=True)  # the path from the first process, on each node's disk
        plan.config.run.dir = str(run_dir)
        with redirect_stdout(io.StringIO()):  # suppress the plan and the placement
            if examination.context is None:
                share = LocalRanks(plan.world_size, hang_seconds=plan.config.trainer.hang_timeout_seconds)
                status = start_ranks(plan, entry, share)
            else:
                status = join(plan, world, examination.context, entry)
        failed = [each for each in connections.exchange(status) if each]
        shutil.rmtree(run_dir, ignore_errors=True)
        if failed:
            problem = "the ranks could not measure: see the error above"
            return None, [Finding("collectives", BREAKS, "all nodes", problem, "fix that error first")]
        if not examination.is_first:
            return None, []
        measured = json.loads((Path(folder) / RESULT).read_text(encoding="utf-8"))
        return measured, list(judge(measured))
