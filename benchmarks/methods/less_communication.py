"""Train a small Llama with each way to send less between data-parallel ranks: losses, bytes and times.

    python -m benchmarks less_communication --input REDPAJAMA_FOLDER --steps 100 --seeds 1 2 3 --output DIR

Four ranks on this machine, as two nodes of two. Bytes are those of tools/forecast/traffic.py, which --count also counts
in two real steps and compares. docs/guides/methods/less_communication.md
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
class Way:
    """One way to train."""

    settings: str
    exact: bool = False
    """It computes what the first one computes: one seed shows that."""
    may_diverge: bool = False
    """A run that ends early is a result, and no failure."""
    sends_like: str = ""
    """The way that sends as many bytes, where prediction takes this one for another."""


SHARDED, ONE_BIT = "trainer.zero=3", "trainer.zero=0 optim.name=onebit_adam"
WAYS = {
    "zero 3": Way(SHARDED),
    "zero 3, a second copy in each node": Way(f"{SHARDED} trainer.secondary_group=2", exact=True),
    "gradients in bf16": Way(f"{SHARDED} trainer.grad_reduce=bf16 trainer.reduce_group=2"),
    "gradients in int8": Way(f"{SHARDED} trainer.grad_reduce=int8 trainer.reduce_group=2"),
    "weights in int8": Way(f"{SHARDED} trainer.param_gather=int8"),
    "ZeRO++: all three": Way(
        f"{SHARDED} trainer.secondary_group=2 trainer.grad_reduce=int8 trainer.reduce_group=2 trainer.param_gather=int8"
    ),
    "zero 0": Way("trainer.zero=0", exact=True),
    # Its Adam has no bias correction. Without ever sending signs it says what these change.
    "zero 0, 1-bit Adam's warm-up only": Way(f"{ONE_BIT} optim.freeze_step=1000000", sends_like="zero 0"),
    "zero 0, 1-bit Adam": Way(ONE_BIT, may_diverge=True),
    "zero 0, its warm-up only, eps 1e-5": Way(
        f"{ONE_BIT} optim.freeze_step=1000000 optim.eps=1e-5", sends_like="zero 0"
    ),
    # Rows of the embedding without a gradient in the warm-up keep a second moment of 0: eps is all that divides.
    "zero 0, 1-bit Adam, eps 1e-5": Way(f"{ONE_BIT} optim.eps=1e-5", may_diverge=True),
}


def prepare(source: Path, output: Path) -> str:
    """The dataset with a tokenizer of its own, made once; returns data.prefixes."""
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
    """MB that all ranks together send along dp in a step, and MB of it from node to node."""
    plan = resolve(load_config([*overrides, "data.mock=true", "data.prefixes=[]"], ROOT / "conf"), RANKS)
    within = across = 0.0
    for rank in range(RANKS):
        operations = [o for o in operations_of_rank(plan, rank) if o.key.axis == "dp"]
        within += sum(wire_bytes(line, amount.payload) for line, amount in totals(operations).items())
        across += sum(amount.payload for amount in between_nodes(operations, rank, RANKS, PER_NODE).values())
    return within / 1e6, across / 1e6


def table(found: Mapping[str, Sequence[Trained]], settings: Mapping[str, list[str]]) -> list[str]:
    """Markdown. ``found`` has the runs of each way by seed."""
    losses = {name: [run.records[-1].get("val_loss") or math.nan for run in runs] for name, runs in found.items()}
    first, *_ = losses.values()
    rows = []
    for name, runs in found.items():
        own = losses[name]
        megabytes = [f"{size:.2f}" for size in sent(settings[WAYS[name].sends_like or name])]
        seconds = statistics.fmean(run.seconds for run in runs)
        rows.append(
            (name, f"{statistics.fmean(own):.4f}", variants.gap(own, first[: len(own)]), *megabytes, f"{seconds:.0f}")
        )
    head = ("", "validation loss", "above the first, by seed", "MB sent a step", "MB between nodes", "CPU s a run")
    return [*markdown_table(head, rows)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--input", type=Path, required=True, help="a folder of RedPajama, as data_prep/redpajama.py")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "less_communication", help="runs and results")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run (default: 100)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="one run of each way for each seed")
    parser.add_argument("--count", action="store_true", help="also count two steps of each way, and compare")


def run(args: argparse.Namespace) -> int:
    """Prepare, count, train, report; status 1 where a program failed."""
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Trained]] = {name: [] for name in WAYS}
    settings = {name: [*RECIPE, *way.settings.split()] for name, way in WAYS.items()}
    length = [f"trainer.steps={args.steps}", f"trainer.val_every_steps={args.steps}"]
    try:
        data = prepare(args.input.resolve(), output)
        for name, overrides in settings.items():
            if (
                args.count and "onebit" not in WAYS[name].settings
            ):  # it counts signs from its second step on: test_count_steps.py
                run_program("scripts/traffic.py", "--measure", *overrides)
        for number, seed in enumerate(args.seeds):
            for name, way in WAYS.items():
                if number and way.exact:
                    continue
                words = [*settings[name], data, f"trainer.seed={seed}", *length]
                found[name].append(variants.train(output / variants.folder_name(name, seed), words, way.may_diverge))
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{' '.join(error.cmd[1:3])} ended with status {error.returncode}\n")
        return 1
    recipe = f"`{' '.join(RECIPE)} trainer.steps={args.steps}`, {len(args.seeds)} seeds"
    text = "\n".join([variants.conditions(), "", recipe, "", *table(found, settings)])
    (output / "less_communication.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0
