"""Takes the place that torchrun, srun or launch.hosts has given: as one rank, or as the starter of a node's ranks."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path

from megatron_llama.config import ConfigError
from megatron_llama.config.data_prefixes import record_files
from megatron_llama.devices import Device
from megatron_llama.launch import rank_process as rank
from megatron_llama.launch import rendezvous as meeting
from megatron_llama.launch import run_dir
from megatron_llama.launch.process_context import Place
from megatron_llama.launch.rendezvous import ARRIVAL_LIMIT_SECONDS, Arrival, LaunchFailed, Meeting, PortMeeting
from megatron_llama.launch.ssh import obey_starter
from megatron_llama.launch.start import Share, host_store, start_ranks
from megatron_llama.launch.variables import variables
from megatron_llama.plan import Plan
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESTART, EXIT_USER

# Small files take a few minutes at most; were the first process to end, the others would know.
PREPARE_LIMIT_SECONDS = 3600.0


def join(plan: Plan, device: Device, place: Place, work: Callable[[Plan], None], prepared: Callable[[], Plan]) -> int:
    """Meets the other processes of the run, then runs ``work`` as, or in, the ranks of this one; the exit status.

    ``prepared`` makes what the run's data still lacks and gives the plan anew. The first process does it before the
    others, which then find it done, or, on a node with a disk of its own, do it once for that node.
    """
    rank.die_with(os.getppid())
    os.environ.update(variables(device, plan))
    starts = place.starter == "hosts" or plan.world_size > place.world_size
    ranks, first = 1, place.rank
    if starts:
        counts = place.ranks_of_nodes(plan.world_size)
        ranks, first = counts[place.node], [0, *accumulate(counts)][place.node]
    with ExitStack() as stack:
        where = meeting.meeting_of(place)
        mine = meeting.arrival_of(place, first, ranks, plan.world_size)
        arrivals = where.arrive(mine)
        if place.rank == 0:
            plan = prepared()
            mine = _open(plan, place, where, arrivals, stack)
        else:
            chosen = _wait(where, PREPARE_LIMIT_SECONDS if record_files(plan.config.data) else ARRIVAL_LIMIT_SECONDS)
            plan = prepared()
            plan.config.run.dir = chosen
        _use_interface(place, mine)
        listener = where.listener if isinstance(where, PortMeeting) else None
        if starts:
            master = (place.master_addr, place.master_port)
            share = Share(ranks, plan.world_size, first, listener=listener, master=master)
            return _start_share(plan, device, place, share, work)
        store = host_store(listener, plan.world_size) if listener else None
        os.environ.update(place.environment(), TORCHELASTIC_USE_AGENT_STORE="True")
        status = _be_rank(plan, place, work)
        del store
        return status


def _open(plan: Plan, place: Place, where: Meeting, arrivals: list[Arrival], stack: ExitStack) -> Arrival:
    """The first process's part: claims the folder, says what starts and where, and lets the others go on."""
    arrivals = meeting.settled(arrivals)
    chosen = plan.config.run.dir or where.remembered(run_dir.default_dir_of_job(plan.config, place.job))
    plan.config.run.dir = chosen
    stack.enter_context(run_dir.claimed(Path(chosen)))
    run_dir.tell_batch_script("running", chosen)
    sys.stdout.write(run_dir.record(plan, Path(chosen)) + "\n")
    if place.nodes > 1:
        sys.stdout.write(meeting.table(arrivals, place) + "\n")
    sys.stdout.flush()
    where.open(chosen)
    return arrivals[0]


def _wait(where: Meeting, limit_seconds: float) -> str:
    """The others' part: the run's folder, when the first process has opened it."""
    try:
        return where.wait(limit_seconds)
    except EOFError as error:
        time.sleep(rank.CONSEQUENCE_DELAY_SECONDS)
        raise LaunchFailed(f"the first process ended before the start: {error}") from error


def _use_interface(place: Place, mine: Arrival) -> None:
    """Has gloo use the interface that leads to the first node: by itself it takes the one of the host's name, which on
    many machines is the loopback."""
    interface = mine.interface
    if place.nodes == 1:
        interface = "lo" if sys.platform == "linux" else None
    if interface is not None and not (place.nodes > 1 and interface == "lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _start_share(plan: Plan, device: Device, place: Place, share: Share, work: Callable[[Plan], None]) -> int:
    """Starts this node's ranks and waits for them."""
    if device.forkable and getattr(work, "__module__", "").startswith("megatron_llama."):
        import megatron_llama.train.run_rank  # noqa: F401  imported once here, and not in each rank
    obey = partial(obey_starter, partial(os._exit, EXIT_FAILED)) if place.starter == "hosts" else None
    numbers = range(share.first_rank, share.first_rank + share.ranks)
    with run_dir.outputs(Path(str(plan.config.run.dir)), numbers) as output_dir:
        return start_ranks(partial(work, plan), share, fork=device.forkable, output_dir=output_dir, while_running=obey)


def _be_rank(plan: Plan, place: Place, work: Callable[[Plan], None]) -> int:
    """Is one of the ranks."""
    try:
        work(plan)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ConfigError as error:
        if place.rank > 0:
            time.sleep(rank.CONSEQUENCE_DELAY_SECONDS)
        sys.stderr.write(f"{error}\n")
        return EXIT_USER
    except SystemExit as error:
        if error.code == EXIT_RESTART:
            return EXIT_RESTART
        raise
    except Exception as error:
        if rank.says_peer_lost(error):
            time.sleep(rank.CONSEQUENCE_DELAY_SECONDS)
        _tell_starter(error)
        traceback.print_exc()
        sys.stderr.flush()
        if place.rank == 0:
            run_dir.tell_batch_script(EXIT_FAILED)
        # At once: ending in good order may wait for ranks that wait for this one, and the starter must be first to
        # hear of the rank that failed of itself.
        os._exit(EXIT_FAILED)
    return 0


def _tell_starter(error: Exception) -> None:
    """Leaves the traceback where torchrun looks for it, so that its summary shows the rank that failed first."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
