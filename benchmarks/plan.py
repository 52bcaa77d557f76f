"""Compare the step times that plan.py forecasts for this machine with measured ones, for small jobs in many layouts.

    python -m benchmarks plan [--only WORDS] [--steps 6] [--calibrate]

Each job runs some steps of ``train`` on random data; the median is compared. The forecast equals
``scripts/plan.py cluster.device=cpu`` and uses the measurements of ``--calibrate``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

from megatron_llama import cli
from megatron_llama.launch.world import find_world
from megatron_llama.parallel import open_device
from megatron_llama.plan import Plan
from megatron_llama.system.tables import text_table
from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.forecast.this_machine import load_calibration, local_step_time
from megatron_llama.tools.measured_steps import open_rank, rank_results
from megatron_llama.tools.plan.measure_machine import calibrate

SMALL = ("model=llama_15m", "trainer.micro_batch_size=2", "trainer.global_batch_size=4", "data.seq_length=256")
LARGE = ("model=llama_56m", "trainer.micro_batch_size=1", "trainer.global_batch_size=2", "data.seq_length=512")
ONE_SEQUENCE = ("trainer.micro_batch_size=1", "trainer.global_batch_size=1")
LORA = "finetune.method=lora"
BF16, TP2, PP2, DP2 = "trainer.precision=bf16", "trainer.tp=2", "trainer.pp=2", "trainer.dp=2"
JOBS = {
    "15M": SMALL,
    "15M, bf16": (*SMALL, BF16),
    "15M, seq 1024": (*SMALL, *ONE_SEQUENCE, "model.max_position_embeddings=1024", "data.seq_length=1024"),
    "15M, recompute full": (*SMALL, "trainer.recompute=full"),
    "56M": LARGE,
    "56M, bf16": (*LARGE, BF16),
    "56M, seq 1024, bf16": (*LARGE, "data.seq_length=1024", BF16),
    "56M, recompute full, bf16": (*LARGE, BF16, "trainer.recompute=full"),
    "15M, tp 2": (*SMALL, TP2),
    "56M, tp 2, bf16": (*LARGE, TP2, BF16),
    "15M, dp 2, zero 0": (*SMALL, DP2, "trainer.zero=0"),
    "15M, dp 2, zero 1": (*SMALL, DP2, "trainer.zero=1"),
    "15M, dp 2, zero 2": (*SMALL, DP2, "trainer.zero=2"),
    "56M, dp 2, zero 3, bf16": (*LARGE, DP2, BF16, "trainer.zero=3"),
    "15M, pp 2": (*SMALL, PP2, "trainer.global_batch_size=8"),
    "56M, pp 2, bf16": (*LARGE, PP2, BF16, "trainer.global_batch_size=4"),
    "15M, LoRA": (*SMALL, LORA),
    "15M, tp 2, LoRA": (*SMALL, TP2, LORA),
    "15M, dp 2, LoRA": (*SMALL, DP2, LORA),
    "15M, compile": (*SMALL, "trainer.compile=true"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--only", help="run only jobs whose name contains these words")
    parser.add_argument(
        "--steps", type=int, default=6, help="timed steps of each job, after an untimed one (default 6)"
    )
    parser.add_argument("--calibrate", action="store_true", help="measure the machine first (1 to 2 minutes)")
    parser.add_argument("--machine", type=Path, help="calibration file, instead of the default one")


def run(args: argparse.Namespace) -> int:
    """Print the table; return 1 if a forecast is off by more than 20 %."""
    if args.calibrate and (status := calibrate(args.machine)):
        return status
    machine = load_calibration(args.machine)
    print(f"calibrated {machine.date} at a load of {machine.load:.2g}; now {os.getloadavg()[0]:.2g}", flush=True)
    rows: list[tuple[str, ...]] = [("job", "measured s", "forecast s", "error", "largest parts of the forecast")]
    errors = []
    for name, overrides in JOBS.items():
        if args.only and args.only not in name:
            continue
        plan = _plan(overrides)
        time_parts = local_step_time(plan, machine)
        seconds = statistics.median(measured(plan, args.steps))
        errors.append(time_parts.total / seconds - 1)
        parts = sorted(time_parts.parts().items(), key=lambda part: -part[1])[:4]
        shown = ", ".join(f"{part} {share:.3f}" for part, share in parts)
        rows.append((name, f"{seconds:.3f}", f"{time_parts.total:.3f}", f"{100 * errors[-1]:+.0f} %", shown))
        print(f"{name}: {rows[-1][1]} s, forecast {rows[-1][2]} s", file=sys.stderr, flush=True)
    print("\n".join(text_table(rows, left=1)))
    sizes = sorted(map(abs, errors))
    print(f"mean error {100 * statistics.fmean(sizes):.1f} %, largest {100 * sizes[-1]:.1f} %, of {len(sizes)} jobs")
    return int(sizes[-1] > 0.20)


def _plan(overrides: tuple[str, ...]) -> Plan:
    words = [*overrides, *MOCK_RUN, "device=cpu", "checkpoint.every_steps=null", "trainer.steps=100"]
    return find_world(cli.parse_overrides(words), None).plan()


def measured(plan: Plan, steps: int) -> list[float]:
    """Return the seconds of each step on the first rank."""
    status, seconds = rank_results(plan, partial(_time_steps, steps))
    if status:
        raise RuntimeError("the job failed")
    return list(seconds[0])


def _time_steps(count: int, plan: Plan) -> list[float]:
    """Return the seconds of each step of a rank."""
    times = []
    with open_rank(plan, int(os.environ["RANK"]), *open_device(plan)) as steps:
        for number in range(1, count + 2):
            start = time.perf_counter()
            steps.run(number)
            times.append(time.perf_counter() - start)
    return times[1:]
