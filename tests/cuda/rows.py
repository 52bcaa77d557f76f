"""Runs that tests of the harness share, and the counts of a step of each: ``python -m tests.cuda.rows [ROW ...]``
rewrites them, or these rows alone.

Counts depend on torch's version, because torch chooses the kernels.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.cuda.build import missing
from tests.cuda.harness import Run, Runtime, open_runtime
from tests.cuda.log import counts, differences

GOLDENS = Path(__file__).with_name("goldens.json")
MEASURED_STEP = 2  # the first step creates communicators and states
BASE = "BASE"
"""In an override: the Hugging Face folder of a base model."""

ROWS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "one rank, fp32": (1, ("trainer.precision=fp32",)),
    "torch.compile": (1, ("trainer.compile=true",)),
    "LoRA": (1, ("finetune=lora", f"init_from={BASE}")),
    "packed documents": (1, ("data.document_mask=true",)),
    "offload": (1, ("trainer.offload=[activations,optimizer]",)),
    "tp 2, sp": (2, ("trainer.tp=2",)),
    "pp 2": (2, ("trainer.pp=2",)),
    "dp 2, zero 1": (2, ("trainer.zero=1",)),
    "dp 2, zero 3": (2, ("trainer.zero=3",)),
}
"""Name of a row: ranks, overrides."""

TP, CP, ZERO_3 = "trainer.tp=2", "trainer.cp=2", "trainer.zero=3"
LORA, DORA = "finetune=lora", "finetune.use_dora=true"
TENSORWISE, ROWWISE = "trainer.float8=tensorwise", "trainer.float8=rowwise"
QUANTIZED = ["model.hidden_size=128", "model.intermediate_size=128"]
YARN = "model.rope_scaling={rope_type: yarn, factor: 4.0, original_max_position_embeddings: 8}"
LONG = [YARN, "model.max_position_embeddings=32", "data.seq_length=32", "trainer.mlp_chunks=2"]
SETTINGS: list[tuple[str, int, list[str]]] = [
    ("LoRA, tp2·pp2+sp", 4, [LORA, TP, "trainer.pp=2"]),
    ("LoRA, int8, zero 3", 2, [LORA, "finetune.frozen_dtype=int8", ZERO_3, *QUANTIZED]),
    ("LoRA, nf4, tp2+sp", 2, [LORA, "finetune.frozen_dtype=nf4", TP, *QUANTIZED]),
    ("DoRA, tp2+sp", 2, [LORA, DORA, TP]),
    ("DoRA, dp2, zero 3, full recompute", 2, [LORA, DORA, ZERO_3, "trainer.recompute=full"]),
    ("float8, tensorwise, tp2+sp", 2, [TENSORWISE, TP]),
    ("float8, rowwise, pp2·dp2, zero 3", 4, [ROWWISE, "trainer.pp=2", ZERO_3]),
    ("float8, tensorwise, cp2, ulysses", 2, [TENSORWISE, CP, "trainer.cp_comm=ulysses"]),
    ("float8, rowwise, LoRA, tp2+sp", 2, [ROWWISE, LORA, TP]),
    ("float8, tensorwise, LoRA, dp2, zero 3", 2, [TENSORWISE, LORA, ZERO_3]),
    ("long context, cp2, full recompute", 2, [CP, "trainer.recompute=full", *LONG]),
    ("long context, cp2, ulysses, documents", 2, [CP, "trainer.cp_comm=ulysses", "data.document_mask=true", *LONG]),
    ("spike guard, dp2, zero 1", 2, ["trainer.spike_guard=skip"]),
    ("spike guard, rewind, tp2+sp", 2, ["trainer.spike_guard=rewind", TP]),
    ("bf16_sr, tp2+sp", 2, ["trainer.precision=bf16_sr", TP]),
    ("bf16_pure, dp2, zero 2", 2, ["trainer.precision=bf16_pure", "trainer.zero=2"]),
    ("fp32_OptStates", 1, ["trainer.precision=fp32_OptStates"]),
    ("SGD, dp2, zero 1", 2, ["optim.name=sgd"]),
    ("1-bit Adam, dp2", 2, ["optim.name=onebit_adam", "trainer.zero=0", "optim.freeze_step=1"]),
    ("gradients in int8, dp2, zero 2", 2, ["trainer.grad_reduce=int8", "trainer.zero=2"]),
    ("weights in int8, dp2, zero 3", 2, ["trainer.param_gather=int8", ZERO_3]),
    ("secondary group, dp4, zero 3", 4, ["trainer.secondary_group=2", ZERO_3, "trainer.micro_batch_size=1"]),
]
"""Settings without a row in the layout table: name, ranks, overrides."""
COPIES = ("trainer.check_copies_every=1", "trainer.tp=2", "trainer.zero=1")
"""Four ranks that compare their copies after each step."""


def base(runtime: Runtime, folder: Path) -> Path:
    """Train a model; return its Hugging Face folder."""
    export = ("checkpoint.save_last=true", "checkpoint.export_hf=true")
    runtime.train(folder, "trainer.steps=1", *export).check()
    return next((folder / "run").rglob("config.json")).parent


def start(runtime: Runtime, name: str, folder: Path, **settings: str) -> Run:
    ranks, overrides = ROWS[name]
    if any(BASE in override for override in overrides):
        model = str(base(runtime, folder / "base"))
        overrides = tuple(override.replace(BASE, model) for override in overrides)
    return runtime.train(folder, *overrides, devices=ranks, **settings)


def measured(run: Run) -> list[dict[str, Any]]:
    """Return the counts of one step of each rank."""
    return [counts(log.steps[MEASURED_STEP]) for log in run.logs if MEASURED_STEP in log.steps]


def changes(name: str, actual: list[dict[str, Any]]) -> list[str]:
    """Return a line for each count of a row that differs from the recorded one."""
    expected = goldens()["rows"][name]
    ranks = range(max(len(expected), len(actual)))
    by_rank = [
        {f"rank {rank}": dict(enumerate(counted)).get(rank, {}) for rank in ranks} for counted in (expected, actual)
    ]
    return differences(*by_rank)


def goldens() -> dict[str, Any]:
    """Return the recorded counts, or an empty dictionary if none are recorded."""
    return json.loads(GOLDENS.read_text()) if GOLDENS.exists() else {}


def main() -> int:
    if reason := missing():
        print(reason)
        return 1
    with tempfile.TemporaryDirectory() as folder, open_runtime(Path(folder) / "libraries") as runtime:
        rows = goldens().get("rows", {}) if sys.argv[1:] else {}
        for number, name in enumerate(sys.argv[1:] or ROWS):
            rows[name] = measured(start(runtime, name, Path(folder) / str(number)).check())
            print(name, sum(rows[name][0]["launches"].values()), flush=True)
            GOLDENS.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
