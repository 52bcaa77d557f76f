"""``scripts/plan.py --calibrate``: measures this machine in a minute or two, so that runs on it can be planned."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_llama import cli
from megatron_llama.system.files import write_atomically
from megatron_llama.system.units import plural
from megatron_llama.tools.bar import bar
from megatron_llama.tools.forecast.this_machine import COLLECTIVES, FORMS, RANKS, STEPS, VERSION, Machine, path_of
from megatron_llama.tools.mock_run import MOCK_RUN

if TYPE_CHECKING:
    from megatron_llama.plan import Plan


def calibrate(path: Path | None = None) -> int:
    """Measures and writes the file of this host; returns the exit status."""
    from megatron_llama.devices import HOST, get_device
    from megatron_llama.launch.start import Share, start_ranks

    by_ranks: dict[str, Any] = {}
    load = os.getloadavg()[0]
    for ranks in RANKS:
        sys.stdout.write(f"measuring {ranks} {plural(ranks, 'rank')} of {RANKS[-1]} at most ...\n")
        sys.stdout.flush()
        plans = dict(_plans(ranks))
        with tempfile.TemporaryDirectory() as folder:
            entry, share = partial(_measure, plans, Path(folder)), Share(ranks, output_dir=Path(folder))
            if status := start_ranks(next(iter(plans.values())), entry, share):
                return status
            by_ranks[str(ranks)] = json.loads((Path(folder) / "measured.json").read_text())
    import torch

    device = get_device(HOST)
    machine = Machine(
        version=VERSION,
        host=socket.gethostname(),
        date=datetime.datetime.now().isoformat(" ", "minutes"),
        cores=device.count(),
        memory_bytes=device.memory_bytes(),
        torch=torch.__version__,
        load=load,
        by_ranks=by_ranks,
    )
    path = path or path_of()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(machine), indent=1) + "\n")
    sys.stdout.write(f"written to {path}\n")
    return 0


def _plans(ranks: int) -> Iterator[tuple[str, Plan]]:
    """Those of the steps that are timed, by name and number format."""
    from megatron_llama.launch.world import find_world

    fixed = ["model.num_hidden_layers=4", "model.num_attention_heads=2", "model.num_key_value_heads=2"]
    fixed += ["trainer.micro_batch_size=1", f"trainer.dp={ranks}", "device=cpu", "trainer.steps=100"]
    for name, (sizes, micro_batches) in STEPS.items():
        for form in FORMS:
            words = [f"{setting}={value}" for setting, value in sizes.items()]
            words += [f"trainer.global_batch_size={micro_batches * ranks}", f"trainer.precision={form}"]
            config = cli.parse_overrides([*fixed, *words, *MOCK_RUN, "checkpoint.every_steps=null"])
            yield f"{name}, {form}", find_world(config, None).plan()


def _measure(plans: dict[str, Plan], folder: Path, plan: Plan) -> None:
    """What each rank does; the first one writes."""
    from megatron_llama.devices import HOST, get_device
    from megatron_llama.tools.plan.measure_machine import MEASUREMENTS, MESSAGES, measure

    device, rank = get_device(HOST), int(os.environ["RANK"])
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), ranks)
    if rank:
        measure(plans, rank, device, torch_device, lambda: None)
        return
    numbers, total = itertools.count(1), MEASUREMENTS
    if ranks > 1:
        total += sum(map(len, COLLECTIVES.values())) * len(MESSAGES)
    with bar(f"{ranks} {plural(ranks, 'rank')}", "measurements", total) as shown:
        found = measure(plans, rank, device, torch_device, lambda: shown.show(next(numbers)))
    (folder / "measured.json").write_text(json.dumps(found))
