"""Compare methods that reduce data-parallel communication: loss, bytes and time of a small Llama.

    python -m benchmarks less_communication --input REDPAJAMA_FOLDER \\
        --steps 100 --seeds 1 2 3 --output DIR

Trains on four ranks of this machine, as two nodes of two. Bytes are forecasts of tools/forecast/traffic.py; --count
compares them with two real steps. See docs/guides/methods/less_communication.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.methods import variants
from benchmarks.methods.variants import Trained
from benchmarks.results import ROOT, run_program
from megatron_llama.config import load_config
from megatron_llama.plan import resolve
from megatron_llama.system.tables import markdown_table
from megatron_llama.tools.forecast.traffic import between_nodes, totals, wire_bytes
from megatron_llama.tools.traffic.cli import operations_of_rank

RANKS, PER_NODE = 4, 2
RECIPE = (
    f"model=llama_2m device=cpu trainer.dp={RANKS} trainer.micro_batch_size=2 trainer.global_batch_size=8 "
    "data.name=redpajama data.tokenizer=null data.seq_length=128 optim.lr=1e-3 trainer.val_steps=16 "
    "logging.every_steps=50 logging.tensorboard=false logging.sample_prompts=[] checkpoint.every_steps=null "
    "checkpoint.save_last=false"
).split()


@dataclass(frozen=True)
class Method:
    """A training method."""

    settings: str
    exact: bool = False
    """Whether results equal the first method's, so that one seed is enough."""
    may_diverge: bool = False
    """Whether a run that ends early is a result instead of a failure."""
    sends_like: str = ""
    """Method with equal traffic, if the traffic forecast does not apply to this one."""


SHARDED, ONE_BIT = "trainer.zero=3", "trainer.zero=0 optim.name=onebit_adam"
METHODS = {
    "zero 3": Method(SHARDED),
    "zero 3, a second copy in each node": Method(f"{SHARDED} trainer.secondary_group=2", exact=True),
    "gradients in bf16": Method(f"{SHARDED} trainer.grad_reduce=bf16 trainer.reduce_group=2"),
    "gradients in int8": Method(f"{SHARDED} trainer.grad_reduce=int8 trainer.reduce_group=2"),
    "weights in int8": Method(f"{SHARDED} trainer.param_gather=int8"),
    "ZeRO++: all three": Method(
        f"{SHARDED} trainer.secondary_group=2 trainer.grad_reduce=int8 trainer.reduce_group=2 trainer.param_gather=int8"
    ),
    "zero 0": Method("trainer.zero=0", exact=True),
    # 1-bit Adam has no bias correction. This run separates its effect from the effect of compression.
    "zero 0, 1-bit Adam's warm-up only": Method(f"{ONE_BIT} optim.freeze_step=1000000", sends_like="zero 0"),
    "zero 0, 1-bit Adam": Method(ONE_BIT, may_diverge=True),
    "zero 0, its warm-up only, eps 1e-5": Method(
        f"{ONE_BIT} optim.freeze_step=1000000 optim.eps=1e-5", sends_like="zero 0"
    ),
    # Embedding rows without a gradient in the warm-up have a second moment of 0: eps is then the whole denominator.
    "zero 0, 1-bit Adam, eps 1e-5": Method(f"{ONE_BIT} optim.eps=1e-5", may_diverge=True),
}


def prepare(source: Path, output: Path) -> str:
    """Prepare dataset and tokenizer unless they exist; return the override of data.prefixes."""
    import yaml

    made = output / "redpajama.yaml"
    if not made.exists():
        texts = sorted(path for path in source.rglob("*") if path.name.endswith((".jsonl", ".jsonl.zst", ".json")))
        texts = [path for path in texts if path.parent.name in ("c4", "wikipedia", "github")]
        prefix = output / "tokenizer"
        small = ("--vocab-size", 384, "--model-prefix", prefix, "--sample-mib", 2)
        run_program("data_prep/train_tokenizer.py", "--input", *texts, *small)
        where = ("--output", output / "redpajama", "--conf", made, "--tokenizer-model", f"{prefix}.model")
        run_program("data_prep/redpajama.py", "prepare", "--input", source, *where)
    prefixes = yaml.safe_load(made.read_text(encoding="utf-8"))["prefixes"]
    return f"data.prefixes=[{','.join(map(str, prefixes))}]"


def sent(overrides: Sequence[str]) -> tuple[float, float]:
    """Return MB that all ranks send along dp per step, in total and between nodes."""
    plan = resolve(load_config([*overrides, "data.mock=true", "data.prefixes=[]"], ROOT / "conf"), RANKS)
    within = across = 0.0
    for rank in range(RANKS):
        operations = [o for o in operations_of_rank(plan, rank) if o.key.axis == "dp"]
        within += sum(wire_bytes(line, amount.payload) for line, amount in totals(operations).items())
        across += sum(amount.payload for amount in between_nodes(operations, rank, RANKS, PER_NODE).values())
    return within / 1e6, across / 1e6


def table(runs_by_name: Mapping[str, Sequence[Trained]], settings: Mapping[str, list[str]]) -> list[str]:
    """Return the table in Markdown, from the runs of each method by seed."""
    losses = {
        name: [run.records[-1].get("val_loss") or math.nan for run in runs] for name, runs in runs_by_name.items()
    }
    first, *_ = losses.values()
    rows = []
    for name, runs in runs_by_name.items():
        final = losses[name]
        megabytes = [f"{size:.2f}" for size in sent(settings[METHODS[name].sends_like or name])]
        seconds = statistics.fmean(run.seconds for run in runs)
        rows.append(
            (
                name,
                f"{statistics.fmean(final):.4f}",
                variants.gap(final, first[: len(final)]),
                *megabytes,
                f"{seconds:.0f}",
            )
        )
    head = ("", "validation loss", "gap to the first", "MB per step", "MB between nodes", "CPU s per run")
    return [*markdown_table(head, rows)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--input", type=Path, required=True, help="RedPajama folder, as for data_prep/redpajama.py")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "runs" / "less_communication", help="folder of runs and results"
    )
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run (default 100)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of each method")
    parser.add_argument("--count", action="store_true", help="also measure the bytes of two steps of each method")


def run(args: argparse.Namespace) -> int:
    """Prepare, count, train and report; return 1 if a program failed."""
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    runs_by_name: dict[str, list[Trained]] = {name: [] for name in METHODS}
    settings = {name: [*RECIPE, *method.settings.split()] for name, method in METHODS.items()}
    length = [f"trainer.steps={args.steps}", f"trainer.val_every_steps={args.steps}"]
    try:
        data = prepare(args.input.resolve(), output)
        for name, overrides in settings.items():
            # 1-bit Adam compresses only from its second step on: see test_count_steps.py.
            if args.count and "onebit" not in METHODS[name].settings:
                run_program("scripts/traffic.py", "--measure", *overrides)
        for number, seed in enumerate(args.seeds):
            for name, method in METHODS.items():
                if number and method.exact:
                    continue
                words = [*settings[name], data, f"trainer.seed={seed}", *length]
                runs_by_name[name].append(
                    variants.train(output / variants.folder_name(name, seed), words, method.may_diverge)
                )
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{' '.join(error.cmd[1:3])} ended with status {error.returncode}\n")
        return 1
    recipe = f"`{' '.join(RECIPE)} trainer.steps={args.steps}`, {len(args.seeds)} seeds"
    text = "\n".join([variants.conditions(), "", recipe, "", *table(runs_by_name, settings)])
    (output / "less_communication.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0
