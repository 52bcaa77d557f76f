"""Entry of a process that another launcher started: it becomes a rank, or starts the ranks of its node."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path

from megatron_llama import event_hook
from megatron_llama.config.stored_settings import leaves_newest
from megatron_llama.launch.environment import ProcessContext, is_loopback
from megatron_llama.launch.failure_cause import CONSEQUENCE_DELAY_SECONDS
from megatron_llama.launch.host_checks import check_start
from megatron_llama.launch.job_store import SECRET, LaunchFailed, StoreLost, describe_lost_store
from megatron_llama.launch.rank import TRAIN, Entry, run_as_rank
from megatron_llama.launch.rendezvous import (
    ARRIVAL_LIMIT_SECONDS,
    NodeInfo,
    Rendezvous,
    check_consistent,
    node_info,
    node_table,
)
from megatron_llama.launch.run_dir import (
    check_shared,
    claim_run_dir,
    default_run_dir,
    open_plan,
    rank_outputs,
    report_to_batch_script,
)
from megatron_llama.launch.ssh import control_line_closed, follow_control_line, read_secret
from megatron_llama.launch.start import LocalRanks, logged_start, rank_environment, start_ranks
from megatron_llama.launch.watchdog import watch_this_process
from megatron_llama.launch.world import World
from megatron_llama.plan import Plan
from megatron_llama.system.exit_status import EXIT_FAILED
from megatron_llama.system.output import set_spill_folder
from megatron_llama.system.phase import ATTEMPT
from megatron_llama.system.signals import exit_with_parent

PREPARE_LIMIT_SECONDS = 3600.0


def join(plan: Plan, world: World, context: ProcessContext, entry: Entry, prints_plan: bool = True) -> int:
    """Join the other processes, then run ``entry`` as a rank or in the ranks of this node; return the exit status.

    Args:
        prints_plan: Whether process 0 prints the plan; otherwise the path of its file.
    """
    assert world.device is not None, "planning rejects unavailable devices"
    exit_with_parent(os.getppid())
    if context.launcher == "hosts" and control_line_closed():  # ssh ended while this process started
        os._exit(EXIT_FAILED)
    os.environ.update(rank_environment(world.device, plan))
    starts_ranks = context.launcher == "hosts" or plan.world_size > context.world_size
    ranks, first = 1, context.rank
    if starts_ranks:
        counts = context.ranks_of_nodes(plan.world_size)
        ranks, first = counts[context.node], [0, *accumulate(counts)][context.node]
    with ExitStack() as stack:
        info = node_info(context, first, ranks, plan.world_size)
        try:
            forks = starts_ranks and world.device.forkable
            rendezvous, local = _join_rendezvous(plan, world, context, info, stack, entry, prints_plan, forks)
        except StoreLost as error:
            address = f"{context.master_addr}:{context.master_port}"
            raise LaunchFailed(str(describe_lost_store(error, address)).rstrip(".")) from error
        set_spill_folder(Path(str(plan.config.run.dir)))
        if context.rank == 0:
            event_hook.listen(plan.config.hook.on_event, plan.run_dir)
        _set_gloo_interface(context, local)
        hang_seconds = plan.config.trainer.hang_timeout_seconds
        if not starts_ranks:
            os.environ.update(context.environment(), TORCHELASTIC_USE_AGENT_STORE="True")
            watch_this_process(context.rank, plan.world_size, hang_seconds, rendezvous.board())
            return run_as_rank(plan, context.rank, entry)
        # Nodes report hangs to each other; a single launcher watches all its ranks.
        board = rendezvous.board() if context.world_size > 1 else None
        output_dir = stack.enter_context(rank_outputs(Path(str(plan.config.run.dir)), range(first, first + ranks)))
        master = (context.master_addr, context.master_port)
        share = LocalRanks(ranks, plan.world_size, first, master, board, output_dir, hang_seconds)
        obey = partial(follow_control_line, partial(os._exit, EXIT_FAILED)) if context.launcher == "hosts" else None
        return (logged_start if context.rank == 0 else start_ranks)(plan, entry, share, while_running=obey)


def _join_rendezvous(
    plan: Plan,
    world: World,
    context: ProcessContext,
    local: NodeInfo,
    stack: ExitStack,
    entry: Entry,
    prints_plan: bool,
    forks: bool,
) -> tuple[Rendezvous, NodeInfo]:
    """Wait for all processes and set the common ``run.dir``; process 0 locks it until ``stack`` closes.

    Returns the rendezvous and this process's report, with the address that the other processes see.
    """
    # If raw data files are converted to datasets at the start, other nodes may take longer.
    prepared = plan.config.data.prefixes != world.config.data.prefixes
    limit = PREPARE_LIMIT_SECONDS if prepared else ARRIVAL_LIMIT_SECONDS
    rendezvous = Rendezvous(context, limit, secret_of_job(context), forks=forks)
    rendezvous.report(local)
    if context.rank > 0:
        try:
            start = rendezvous.wait(check_shared if context.nodes > 1 else lambda run_dir: None)
        except StoreLost as error:
            time.sleep(CONSEQUENCE_DELAY_SECONDS)
            raise LaunchFailed(f"process 0 ended before the start: {error}") from error
    else:
        nodes = check_consistent(rendezvous.gather())
        local = nodes[0]
        requested = plan.config.run.dir or default_run_dir(plan.config, context.job)
        chosen, restarted = rendezvous.agree_on_run_dir(requested)
        plan.config.run.dir = chosen
        stack.enter_context(claim_run_dir(Path(chosen)))
        report_to_batch_script("running", chosen)
        checked = check_start(plan, Path(chosen)) if entry == TRAIN else ""
        sys.stdout.write(open_plan(plan, prints_plan) + checked + "\n")
        if context.nodes > 1:
            sys.stdout.write(f"{node_table(nodes, context)}{rendezvous.describe_security()}\n\n")
        sys.stdout.flush()
        start = rendezvous.open(nodes, chosen, restarted)
    plan.config.run.dir = start.run_dir
    if start.restarted and leaves_newest(plan.config):
        plan.config.checkpoint.resume = "auto"
    os.environ[ATTEMPT] = start.attempt
    return rendezvous, local


def secret_of_job(context: ProcessContext) -> str:
    """Return the job's secret; empty if no launcher created one."""
    return read_secret() if context.launcher == "hosts" else os.environ.get(SECRET, "")


def _set_gloo_interface(context: ProcessContext, local: NodeInfo) -> None:
    """Set gloo's interface to the one with a route to the first node.

    gloo's default is the interface of the host name, the loopback on many machines.
    """
    interface = local.interface
    one_machine = context.nodes == 1 or is_loopback(context.master_addr)
    if one_machine:
        interface = "lo" if sys.platform == "linux" else None
    if interface is not None and (one_machine or interface != "lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
