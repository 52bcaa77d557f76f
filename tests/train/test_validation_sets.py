"""Named validation sets: the loss of each is by hand and in every layout the same, also after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_llama.config import load_config
from megatron_llama.data.batches import build_data
from megatron_llama.data.sample_stream import SampleStream
from megatron_llama.devices import get_device
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan, format_plan, resolve
from megatron_llama.train.loop import validate
from tests.checkpoint.jobs import Job
from tests.data.files import data_plan, numbered, write_indexed
from tests.messages import unwrap
from tests.model.llamas import CPU
from tests.oracle import SMALL
from tests.paths import CONF
from tests.ranks import run_ranks

SIZES = {"wiki": 40, "code": 12, "tiny": 3}
"""Documents; tiny has fewer sequences than a batch."""


def write_sets(folder: Path) -> list[str]:
    """Return the settings of a training set and three validation sets of 64 ids, from another seed each."""
    for number, (name, count) in enumerate({"train": 60, **SIZES}.items()):
        documents = [[(7 * token + number) % 64 for token in document] for document in numbered(count)]
        write_indexed(folder / name, documents)
    sets = ",".join(f"{name}:{folder}/{name}" for name in SIZES)
    data = ["data=python_stdlib", "data.tokenizer=null", f"data.prefixes=[{folder}/train]", "data.seq_length=16"]
    return [*data, f"data.cache_dir={folder}/cache", f"data.validation_prefixes={{{sets}}}"]


def _losses(rank: int, plan: Plan) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of a validation, and in one process the mean loss of each set, sequence by sequence."""
    topology, by_hand = plan.topology(rank), {}
    with process_groups(plan, topology, get_device("cpu"), CPU):
        model = build_model(plan, topology, get_device("cpu"), CPU)
        sets = build_data(plan, topology, CPU).validation
        for name, batches in sets.items() if plan.world_size == 1 else ():
            samples, losses = batches.samples, []
            assert isinstance(samples, SampleStream)
            for number in range(min(len(samples), 4 * plan.config.trainer.global_batch_size)):
                logits = model.logits(samples[number]["tokens"][None])
                assert logits is not None
                losses.append(torch.nn.functional.cross_entropy(logits[:, 0].double(), samples[number]["labels"]))
            by_hand[f"val_loss/{name}"] = torch.stack(losses).mean().item()
        return validate(plan, model, sets), by_hand


def test_each_set_has_its_loss_in_every_layout(tmp_path: Path) -> None:
    settings = [*SMALL, *write_sets(tmp_path), "trainer.val_every_steps=1", "model.initializer_range=0.3"]
    ((metrics, by_hand),) = run_ranks(_losses, 1, resolve(load_config(settings, CONF), 1))
    assert len(by_hand) == 3 and {name: metrics[name] for name in by_hand} == pytest.approx(by_hand, rel=1e-6)
    assert metrics["val_loss"] == pytest.approx(sum(by_hand.values()) / 3) and len({*by_hand.values()}) == 3
    assert len(metrics) == 2 * (1 + len(SIZES))
    for layout in ("trainer.zero=3", "trainer.pp=2", "trainer.cp=2", "trainer.tp=2"):
        for other, _ in run_ranks(_losses, 2, resolve(load_config([*settings, layout], CONF), 2)):
            assert other == pytest.approx(metrics, rel=1e-6), layout


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_validates_the_same_and_not_before_its_first_step(tmp_path: Path) -> None:
    every = [*write_sets(tmp_path), "trainer.val_every_steps=2", "trainer.val_at_start=true", "trainer.dp=2"]
    logged = []
    for name, steps in (("whole", [6]), ("parts", [2, 6])):
        for count in steps:
            job = Job(tmp_path / name, *every, "optim=constant", "optim.warmup_steps=0", f"trainer.steps={count}")
            assert job.wait() == 0, job.output
        records = records_of(tmp_path / name)
        logged.append([{key: each[key] for key in each if "val" in key or key == "step"} for each in records])
        assert [each["step"] for each in records] == [0, 1, 2, 3, 4, 5, 6]
    assert logged[0] == logged[1] and [len(each) for each in logged[0]] == [9, 1, 9, 1, 9, 1, 9]
    assert job.output.count("before step 1: val loss ") == 1, "a resumed run has validated already"


@pytest.mark.parametrize(
    ("typed", "sets"),
    [
        ("[a,b]", ["a", "b"]),
        ("{wiki:a,code:[b,3.10]}", [{"wiki": ["a"]}, {"code": ["b", "3.10"]}]),
        ("[{wiki:a},{code:b}]", [{"wiki": ["a"]}, {"code": ["b"]}]),
    ],
)
def test_named_sets_on_the_command_line(typed: str, sets: list[Any]) -> None:
    assert load_config([f"data.validation_prefixes={typed}"], CONF).data.validation_prefixes == sets


def test_the_plan_of_named_sets(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "text", numbered(60))
    plan = data_plan([prefix], **{"data.validation_prefixes": [{"same": [prefix]}, {"x.y-z_1": prefix}]})
    assert "every 10 steps · 4 batches of 8 · sets same, x.y-z_1 by default" in unwrap(format_plan(plan))
    assert f"{prefix} is read in training and in validation" in " ".join(plan.notes)
