"""Losses and gradient norms of layouts and options against recorded ones of one CPU process in fp32.

``python -m megatron_llama.tools.prove_gpu.parity`` records them in ``oracle.json``.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_llama.system.files import read_json, write_atomically
from megatron_llama.tools.common import package_version
from megatron_llama.tools.prove_gpu.checks import Check, CheckFailed, Clock, Outcome
from megatron_llama.tools.prove_gpu.training import NO_SAVE, QUIET, require_losses

if TYPE_CHECKING:
    from megatron_llama.tools.prove_gpu.session import Session, TrainingRun

ORACLE = Path(__file__).with_name("oracle.json")
PACKAGES = ("torch", "megatron-core", "numpy")
STEPS = 10
SHAPE = (
    *("model.vocab_size=64", "model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=4"),
    *("model.num_attention_heads=4", "model.num_key_value_heads=2", "data.seq_length=16"),
    "model.initializer_range=0.1",  # at 0.02 so small a model is almost linear and would hide errors
    *("trainer.global_batch_size=8", "trainer.micro_batch_size=2", "optim.lr=1e-3"),
    "optim.eps=1e-6",  # at 1e-8 a weight whose gradient is about as small would be moved by the rounding of sums
    *(f"trainer.steps={STEPS}", NO_SAVE),
)
MODELS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "tied": ("model.tie_word_embeddings=true", "model.vocab_size=61"),
    "window": ("model.sliding_window=5",),
    "blocks": ("model.sparse_attention={block: 2, num_local_blocks: 3, num_global_blocks: 1}",),
    "wide": ("model.head_dim=64", "data.seq_length=128"),
    "documents": ("data.kind=sft", "data.pack=true", "model.head_dim=64", "data.seq_length=128"),
}
"""Models with recorded losses: overrides of SHAPE."""
RECORDED = ("reduced_train_loss", "gradient_norm")
FP32 = (1e-4, 1e-3)
"""Tolerances of losses and gradient norms, relative: sums in another order, over all steps."""
BF16 = (2e-2, math.inf)  # 8 bits of mantissa; gradient norms of so small a model are not compared


class Row(NamedTuple):
    """A layout or option."""

    name: str
    ranks: int
    overrides: tuple[str, ...] = ()
    model: str = "plain"
    tolerances: tuple[float, float] = FP32


IN_BF16 = "trainer.precision=bf16"
OFFLOAD = "trainer.offload=[activations,optimizer]"
COMPILED = "trainer.compile=true"
MICRO_1 = "trainer.micro_batch_size=1"
ROWS = (
    Row("fp32", 1),
    Row("bf16", 1, (IN_BF16,), tolerances=BF16),
    Row("tp2, sp", 2, ("trainer.tp=2",)),
    Row("dp2, zero 3", 2, ("trainer.zero=3",)),
    Row("pp2, vpp2", 2, ("trainer.pp=2", "trainer.vpp=2")),
    Row("tp2, pp2, sp, window", 4, ("trainer.tp=2", "trainer.pp=2"), "window"),
    Row("tp2, pp2, dp2, sp, zero 3, tied", 8, ("trainer.tp=2", "trainer.pp=2", "trainer.zero=3"), "tied"),
    Row("zero 3", 1, ("trainer.zero=3",)),
    Row("window", 1, (), "window"),
    Row("documents, bf16", 1, (IN_BF16,), "documents", BF16),
    Row("full recompute", 1, ("trainer.recompute=full",)),
    Row("bf16, stochastic rounding", 1, ("trainer.precision=bf16_sr",), tolerances=BF16),
    Row("compiled", 1, (COMPILED, "trainer.compile_strict=true"), "wide"),
    Row("dp2, zero 1", 2, ("trainer.zero=1",)),
    Row("dp2, zero 2", 2, ("trainer.zero=2",)),
    Row("pp2, tied", 2, ("trainer.pp=2",), "tied"),
    Row("tp2, async_tp, compiled", 2, ("trainer.tp=2", COMPILED, "trainer.async_tp=true"), "wide"),
    Row("tp2, dp2, sp, zero 2, offload", 4, ("trainer.tp=2", "trainer.zero=2", OFFLOAD)),
    Row("dp4, hybrid, zero 3", 4, ("trainer.zero=3", "trainer.shard_group=2", MICRO_1)),
    Row("tp4, sp", 4, ("trainer.tp=4",)),
    Row("offload", 1, (OFFLOAD,)),
    Row("selective recompute", 1, ("trainer.recompute=selective",)),
    Row("elementwise recompute", 1, ("trainer.recompute=elementwise",)),
    Row("window, bf16", 1, (IN_BF16,), "window", BF16),
    Row("blocks", 1, (), "blocks"),
    Row("blocks, bf16", 1, (IN_BF16,), "blocks", BF16),
    Row("documents", 1, (), "documents"),
    Row("tied", 1, (), "tied"),
    Row("long heads", 1, (), "wide"),
)
"""The most important rows come first, because the time may end."""
Oracle = Mapping[str, Mapping[str, Sequence[float]]]
"""Recorded values per step, by model and metric."""


def checks(session: Session) -> Sequence[Check[Session]]:
    """Return a check for each row that fits the devices."""
    oracle: Oracle = read_json(ORACLE)["models"]
    return [Check(row.name, partial(_compare_row, row, oracle)) for row in ROWS if row.ranks <= session.ranks]


def _compare_row(row: Row, oracle: Oracle, session: Session) -> Outcome:
    name = f"parity/{row.name.replace(',', '').replace(' ', '_')}"
    run = session.train(name, *row_settings(row), ranks=row.ranks)
    require_losses(run, STEPS)
    return compare(values_of(run), oracle[row.model], row.tolerances)


def row_settings(row: Row) -> list[str]:
    """Return the overrides of a row."""
    defaults = ("trainer.precision=fp32", "trainer.compile=false")
    given = {word.partition("=")[0] for word in row.overrides}
    added = [word for word in defaults if word.partition("=")[0] not in given]
    return [*SHAPE, *QUIET, *added, *MODELS[row.model], *row.overrides]


def values_of(run: TrainingRun) -> dict[str, list[float]]:
    """Return the recorded metrics of a run."""
    return {name: run.column(name) for name in RECORDED}


def compare(
    actual: Mapping[str, Sequence[float]], expected: Mapping[str, Sequence[float]], tolerances: tuple[float, float]
) -> Outcome:
    """Return the largest relative difference of the losses. Raises CheckFailed at the first value that is too far."""
    values = {"losses": list(actual[RECORDED[0]]), "expected": list(expected[RECORDED[0]])}
    errors = {}
    for name, tolerance in zip(RECORDED, tolerances, strict=True):
        differences = [abs(a - b) / abs(b) for a, b in zip(actual[name], expected[name], strict=True)]
        for step, difference in enumerate(differences, 1):
            if not difference <= tolerance and not tolerance == math.inf:
                text = f"{name} of step {step} is {actual[name][step - 1]:.6g}, not {expected[name][step - 1]:.6g}"
                raise CheckFailed(f"{text}: {difference:.1e} apart, at most {tolerance:.0e}", values)
        errors[name] = max(differences)
    return Outcome(f"losses within {errors[RECORDED[0]]:.1e}", values | {"error": errors[RECORDED[0]]})


def record(models: Sequence[str], train: Callable[[Row], TrainingRun]) -> dict[str, dict[str, list[float]]]:
    """Return the values of models, trained by ``train`` in one process in fp32."""
    return {model: values_of(train(Row(model, 1, (), model))) for model in models}


def main() -> int:
    """Train all models on the CPU and write ``oracle.json``."""
    from megatron_llama.devices import HOST
    from megatron_llama.tools.prove_gpu.session import Session

    with tempfile.TemporaryDirectory() as folder:
        session = Session(Path(folder) / "results", Path(folder) / "runs", Clock(3600.0), HOST)

        def train(row: Row) -> TrainingRun:
            sys.stderr.write(f"{row.name}\n")
            return session.train(row.name, *row_settings(row))

        values = record([*MODELS], train)
    versions = {name: package_version(name) for name in PACKAGES}
    content: dict[str, Any] = {"versions": versions, "steps": STEPS, "models": values}
    write_atomically(ORACLE, json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
