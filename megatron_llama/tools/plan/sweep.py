"""Sweeps over layouts on one machine, as vTrain publishes them, as rows of published runs.

The columns are GPUs, global batch, micro batch, hidden size, attention heads, # layers, sequence length, tensor
parallelism, data parallelism, pipeline parallelism and iteration time (ms): GPT models trained by Megatron-DeepSpeed in
16 bits on the eight A100 of a node (VIA-Research/vTrain). What such a file does not say is filled in here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TIME = "iteration time (ms)"
CONFIDENCE = "sweep"
"""Many rows that are alike: a fit counts each one little."""
COLUMNS = {
    "n_devices": "GPUs",
    "global_batch": "global batch",
    "micro_batch": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "kv_heads": "attention heads",
    "layers": "# layers",
    "seq": "sequence length",
    "tp": "tensor parallelism",
    "dp": "data parallelism",
    "pp": "pipeline parallelism",
}
UNSAID = {
    "source": "VIA-Research/vTrain, one node",
    "model": "gpt",
    "arch": "GPT",
    "ffn_kind": "gelu",
    "vocab": "51200",
    "tied": "1",
    "device": "A100-40GB-SXM",
    "sharding": "none",
    "sp": "no",
    # The simulator's own settings say otherwise. But with 4/3 of the work, the longest of these runs would compute
    # their products at more than the chip's peak, after what scores and norms take of the memory's bandwidth.
    "recompute": "none",
    "precision": "fp16 mixed",
    "framework": "Megatron-DeepSpeed",
    "confidence": CONFIDENCE,
}


def is_sweep(rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether a table is one of these."""
    return bool(rows) and TIME in rows[0]


def published_rows(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The rows of a sweep with the columns of published runs, numbered from 1."""
    return [_published(number, row) for number, row in enumerate(rows, 1)]


def _published(number: int, row: Mapping[str, str]) -> dict[str, str]:
    found = {"id": f"sweep {number}", **UNSAID, **{name: row.get(column, "") for name, column in COLUMNS.items()}}
    found["ffn"], found["step_time_s"] = f"4 x {found['hidden']}", f"{row.get(TIME, '')} ms"
    return found
