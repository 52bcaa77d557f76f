"""Token counts of a batch: without padding, attention within documents; in all layouts and after a resume."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_llama.arch.flops import flops_per_token
from megatron_llama.data.finetuning_set import PADDING
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from megatron_llama.train.metrics import MetricsLogger
from megatron_llama.train.metrics_file import read_metrics
from megatron_llama.train.run_rank import run_rank
from tests.data.files import write_indexed
from tests.oracle import batches_of, make_plan, on_ranks
from tests.ranks import run_ranks
from tests.train.steps import PEAK, measured, plan_of

LENGTH = 16
# Samples in pairs would mix kinds with and without documents in a micro batch, which no dataset does.
ALONE = "trainer.micro_batch_size=1"
# The documents of a sample, by its number modulo 4: padded, packed with and without padding, full.
KINDS: list[tuple[str, list[int]]] = [("num_tokens", [5]), ("documents", [3, 4, 1]), ("documents", [10, 6]), ("", [16])]


class Kinds:
    """Samples with padding of every kind. Padding and tokens have the same id."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        key, lengths = KINDS[index % 4]
        ids = [number for number, length in enumerate(lengths) for _ in range(length)]
        values = {
            "num_tokens": torch.tensor(len(ids)),
            "documents": torch.tensor(ids + [PADDING] * (LENGTH - len(ids))),
        }
        plain = {"tokens": torch.zeros(LENGTH, dtype=torch.int64), "labels": torch.ones(LENGTH, dtype=torch.int64)}
        counted = (torch.arange(LENGTH) < 2).float()
        return {**plain, "loss_mask": counted, **({key: values[key]} if key else {})}


def squares(lengths: list[int]) -> int:
    return sum(length**2 for length in lengths)


@pytest.mark.parametrize("layout", ["", "trainer.tp=2", "trainer.pp=2", "trainer.zero=1"])
def test_a_global_batch_is_counted_once_in_every_layout(layout: str) -> None:
    world = 2 if layout else 1
    plan = make_plan(world, ALONE, *filter(None, [layout]))
    expected = [2 * 8, 2 * (5 + 8 + 16 + 16), 2 * sum(squares(lengths) for _, lengths in KINDS)]
    assert on_ranks(_counts, plan) == [expected] * world


def _counts(plan: Plan, model: ParallelModel) -> list[int]:
    return [int(count) for count in model.count(batches_of(Kinds(), plan).at(0))]


def test_loss_of_a_single_token() -> None:
    """All tokens of the sample are equal, and so are their losses."""
    ((one, two),) = on_ranks(_losses, make_plan(1, ALONE, "trainer.global_batch_size=1"))
    assert one == pytest.approx(two)  # a rounding in fp32 apart


def _losses(plan: Plan, model: ParallelModel) -> list[float]:
    two = batches_of(Kinds(), plan).at(0)[0]
    one = replace(two, loss_mask=two.loss_mask.clone())
    one.loss_mask.view(-1)[1:] = 0
    return [float(model.evaluate([batch])[0]) for batch in (one, two)]


def test_speed_and_utilisation_without_padding(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)  # 8 sequences of 256
    with MetricsLogger(plan, PEAK) as logger:
        logger.log_step(measured(1, step_time_s=0.5, tokens=1000, attended=100_000))
        logger.log_step(measured(2, step_time_s=0.5))
        logger.finish()
    padded, full = read_metrics(tmp_path / "metrics.jsonl")
    assert padded["tokens_per_second"] == 2000 and padded["padded_tokens_per_second"] == 4096
    flops = flops_per_token(plan.model, 100)  # the mean document
    assert padded["tflops_per_device"] == pytest.approx(flops.causal * 2000 / 2 / 1e12)
    assert padded["mfu"] == pytest.approx(flops.causal * 2000 / (2 * 100e9))
    assert padded["mfu_full"] == pytest.approx(flops.full * 2000 / (2 * 100e9))
    assert full["tokens_per_second"] == 4096 and "padded_tokens_per_second" not in full, "nothing was padded"
    assert full["mfu"] == pytest.approx(flops_per_token(plan.model, 256).causal * 4096 / (2 * 100e9))


@pytest.mark.parametrize("pack", [False, True], ids=["padded", "packed"])
def test_consumed_tokens_are_exact_over_a_resume_in_another_layout(tmp_path: Path, pack: bool) -> None:
    lengths = [2 + (5 * number) % LENGTH for number in range(24)]
    examples = [[1 + (number + place) % 60 for place in range(length)] for number, length in enumerate(lengths)]
    write_indexed(tmp_path / "set_mask", [[1] * length for length in lengths], "B")
    prefix = write_indexed(tmp_path / "set", examples)

    def run(world: int, *layout: str) -> list[dict[str, float]]:
        data = ["data.mock=false", "data.kind=sft", f"data.pack={pack}", f"data.prefixes=[{prefix}]"]
        settings = ["trainer.global_batch_size=4", "trainer.steps=6", "checkpoint.every_steps=2", "checkpoint.keep=10"]
        quiet = ["logging.tensorboard=false", "device.peak_tflops=1", f"run.dir={tmp_path / 'run'}"]
        (tmp_path / "run").mkdir(exist_ok=True)
        run_ranks(_train, world, make_plan(world, *data, "data.split='1,0,0'", *settings, *quiet, *layout))
        return read_metrics(tmp_path / "run/metrics.jsonl")

    whole = run(1)
    if not pack:  # an epoch: each example once; its last token is only a label
        assert whole[-1]["consumed_tokens"] == sum(lengths) - len(lengths)
    assert whole[-1]["consumed_tokens"] < 24 * LENGTH
    state = json.loads((tmp_path / "run/checkpoints/step_00000002/checkpoint.json").read_text())["state"]
    assert state["consumed_tokens"] == whole[1]["consumed_tokens"]
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"run/checkpoints/step_{step:08d}")
    resumed = run(2, "trainer.zero=1")
    names = ("step", "consumed_samples", "consumed_tokens")
    assert [[line[name] for name in names] for line in resumed] == [[line[name] for name in names] for line in whole]


def _train(rank: int, plan: Plan) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(plan.world_size)
    run_rank(plan)
