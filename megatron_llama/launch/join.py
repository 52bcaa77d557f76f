"""A process that another program has started: it becomes a rank, or the starter of its node's ranks."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path

from megatron_llama.launch.environment import ProcessContext, is_loopback
from megatron_llama.launch.job_store import SECRET, LaunchFailed
from megatron_llama.launch.rank import CONSEQUENCE_DELAY_SECONDS, Entry, run_as_rank
from megatron_llama.launch.rendezvous import ARRIVAL_LIMIT_SECONDS, Rendezvous
from megatron_llama.launch.reports import NodeInfo, check_consistent, node_info, node_table
from megatron_llama.launch.run_dir import (
    claim_run_dir,
    default_run_dir,
    rank_outputs,
    report_to_batch_script,
    write_config_and_plan,
)
from megatron_llama.launch.ssh import follow_control_line, read_secret
from megatron_llama.launch.start import Share, rank_environment, start_ranks
from megatron_llama.launch.watchdog import watch_this_process
from megatron_llama.launch.world import World
from megatron_llama.plan import Plan
from megatron_llama.system.exit_status import EXIT_FAILED
from megatron_llama.system.output import set_spill_folder
from megatron_llama.system.phase import ATTEMPT
from megatron_llama.system.signals import exit_with_parent

PREPARE_LIMIT_SECONDS = 3600.0


def join(plan: Plan, world: World, context: ProcessContext, entry: Entry) -> int:
    """Meets the other processes of the run, then runs ``entry`` as, or in, the ranks of this one; the exit status."""
    assert world.device is not None, "a plan refuses a device that is not here"
    exit_with_parent(os.getppid())
    os.environ.update(rank_environment(world.device, plan))
    starts_ranks = context.launcher == "hosts" or plan.world_size > context.world_size
    ranks, first = 1, context.rank
    if starts_ranks:
        counts = context.ranks_of_nodes(plan.world_size)
        ranks, first = counts[context.node], [0, *accumulate(counts)][context.node]
    with ExitStack() as stack:
        rendezvous, mine = _meet(plan, world, context, node_info(context, first, ranks, plan.world_size), stack)
        set_spill_folder(Path(str(plan.config.run.dir)))
        _use_interface(context, mine)
        hang_seconds = plan.config.trainer.hang_timeout_seconds
        if not starts_ranks:
            os.environ.update(context.environment(), TORCHELASTIC_USE_AGENT_STORE="True")
            watch_this_process(context.rank, plan.world_size, hang_seconds, rendezvous.board())
            return run_as_rank(plan, context.rank, entry)
        # Nodes tell each other of a hang; on one alone its starter sees all.
        board = rendezvous.board() if context.world_size > 1 else None
        output_dir = stack.enter_context(rank_outputs(Path(str(plan.config.run.dir)), range(first, first + ranks)))
        master = (context.master_addr, context.master_port)
        share = Share(ranks, plan.world_size, first, master, board, output_dir, hang_seconds)
        obey = partial(follow_control_line, partial(os._exit, EXIT_FAILED)) if context.launcher == "hosts" else None
        return start_ranks(plan, entry, share, while_running=obey)


def _meet(
    plan: Plan, world: World, context: ProcessContext, mine: NodeInfo, stack: ExitStack
) -> tuple[Rendezvous, NodeInfo]:
    """Brings the processes together; the first one claims the run's folder until ``stack`` closes. All then have the
    same ``run.dir``. Returns this process's report as the others see it."""
    # Where files of records were replaced by datasets, other nodes may still prepare theirs.
    prepared = plan.config.data.prefixes != world.config.data.prefixes
    limit = PREPARE_LIMIT_SECONDS if prepared else ARRIVAL_LIMIT_SECONDS
    rendezvous = Rendezvous(context, limit, secret_of_job(context))
    rendezvous.report(mine)
    if context.rank > 0:
        try:
            opening = rendezvous.wait()
        except EOFError as error:
            time.sleep(CONSEQUENCE_DELAY_SECONDS)
            raise LaunchFailed(f"the first process ended before the start: {error}") from error
    else:
        nodes = check_consistent(rendezvous.gather())
        mine = nodes[0]
        wanted = plan.config.run.dir or default_run_dir(plan.config, context.job)
        chosen, again = rendezvous.agree_on_run_dir(wanted)
        plan.config.run.dir = chosen
        stack.enter_context(claim_run_dir(Path(chosen)))
        report_to_batch_script("running", chosen)
        sys.stdout.write(write_config_and_plan(plan, Path(chosen)) + "\n")
        if context.nodes > 1:
            sys.stdout.write(f"{node_table(nodes, context)}{rendezvous.openness()}\n\n")
        sys.stdout.flush()
        opening = rendezvous.open(nodes, chosen, again)
    plan.config.run.dir = opening.run_dir
    if opening.again and plan.config.checkpoint.resume == "never":  # that was about the first start
        plan.config.checkpoint.resume = "auto"
    os.environ[ATTEMPT] = opening.attempt
    return rendezvous, mine


def secret_of_job(context: ProcessContext) -> str:
    """What only this job's processes know; empty where no starter has made it."""
    return read_secret() if context.launcher == "hosts" else os.environ.get(SECRET, "")


def _use_interface(context: ProcessContext, mine: NodeInfo) -> None:
    """Has gloo use the interface that leads to the first node: by default it takes the one of the host's name, which
    is the loopback on many machines."""
    interface = mine.interface
    one_machine = context.nodes == 1 or is_loopback(context.master_addr)
    if one_machine:
        interface = "lo" if sys.platform == "linux" else None
    if interface is not None and (one_machine or interface != "lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
