"""data.document_mask: pretraining trains on each document independently of its sequence."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from megatron_llama.config import ConfigError, load_config
from megatron_llama.data.batches import Batches
from megatron_llama.data.sample_stream import build_streams, resume_streams
from megatron_llama.devices import get_device
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan, resolve
from tests.data.files import data_plan, write_indexed
from tests.data.megatron import megatron_record
from tests.model.llamas import CPU
from tests.oracle import SMALL
from tests.paths import CONF
from tests.ranks import run_ranks

LENGTH = 16
Item = dict[str, list[int]]


def documents_of(seed: int, count: int = 40) -> list[list[int]]:
    """Documents of 1 to 40 tokens without an end token. Ids are consecutive, so that each occurs once."""
    chooser, first, collected = random.Random(seed), 1, []
    for _ in range(count):
        length = chooser.choice([1, 1, 2, chooser.randint(1, 40)])
        collected.append(list(range(first, first + length)))
        first += length
    return collected


def items(prefix: str, **settings: object) -> list[Item]:
    """All samples of the first two epochs."""
    plan = data_plan([prefix], **{"data.seq_length": LENGTH, "data.split": "1,0,0", **settings})
    return run_ranks(_items, 1, plan)[0]


def _items(rank: int, plan: Plan) -> list[Item]:
    stream, _ = build_streams(plan)
    return [{name: values.tolist() for name, values in stream[n].items()} for n in range(2 * len(stream))]


@pytest.mark.parametrize("seed", range(3))
def test_borders_are_those_of_the_files(seed: int, tmp_path: Path) -> None:
    documents = documents_of(seed)
    owner = {token: number for number, document in enumerate(documents) for token in document}
    prefix = write_indexed(tmp_path / "text", documents)
    plain = items(prefix)
    masked = items(prefix, **{"data.document_mask": True})
    only_attention = items(prefix, **{"data.document_mask": True, "data.eod_mask_loss": False})
    only_loss = items(prefix, **{"data.eod_mask_loss": True})
    left_out = 0
    for item, bare, *others in zip(masked, plain, only_attention, only_loss, strict=True):
        tokens, labels, ids = item["tokens"], item["labels"], item["documents"]
        owners = [owner[token] for token in tokens]
        same = [a == b for a, b in zip(owners, owners[1:], strict=False)]
        assert [a == b for a, b in zip(ids, ids[1:], strict=False)] == same
        counts = [float(owner[label] == label_owner) for label, label_owner in zip(labels, owners, strict=True)]
        assert item["loss_mask"] == counts
        left_out += counts.count(0.0)
        assert bare == {"tokens": tokens, "labels": labels, "loss_mask": [1.0] * LENGTH}, "as it was before"
        assert others == [{**bare, "documents": ids}, {**bare, "loss_mask": counts}]
    assert left_out > len(masked), "else nothing was shown"


@pytest.mark.parametrize("name", ["document_mask", "eod_mask_loss"])
def test_megatrons_order_has_no_document_boundaries(name: str, tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "text", documents_of(0))
    plan = data_plan([prefix], **{"data.seq_length": LENGTH, "data.split": "1,0,0", f"data.{name}": True})
    (message,) = run_ranks(_resumed, 1, plan)
    assert f"data.{name}" in message and "needs document boundaries" in message


def _resumed(rank: int, plan: Plan) -> str:
    training, validation = build_streams(plan)
    with pytest.raises(ConfigError) as caught:
        resume_streams(plan, megatron_record(plan, 8), 8, training, validation)
    return str(caught.value)


class TokenSpans:
    """Documents of a stream's first samples, each as a separate padded sample; then samples without loss."""

    def __init__(self, stream: list[dict[str, torch.Tensor]]) -> None:
        self.spans = []
        for sample in stream:
            start = 0
            for size in sample["documents"].unique_consecutive(return_counts=True)[1].tolist():
                span = {name: torch.zeros_like(values) for name, values in sample.items() if name != "documents"}
                for name, values in span.items():
                    values[:size] = sample[name][start : start + size]
                self.spans.append(span)
                start += size

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index < len(self.spans):
            return self.spans[index]
        return {name: torch.zeros_like(values) for name, values in self.spans[0].items()}


Gradients = tuple[float, dict[str, torch.Tensor]]
LAYOUTS = {
    "plain": (1, []),
    "tp2+sp": (2, ["trainer.tp=2"]),
    "tp2": (2, ["trainer.tp=2", "trainer.sp=false"]),
    "pp2": (2, ["trainer.pp=2"]),
    "selective": (1, ["trainer.recompute=selective"]),
    "full": (1, ["trainer.recompute=full"]),
    "micro batches of 4": (1, ["trainer.micro_batch_size=4"]),
    "lora": (1, ["finetune.method=lora", "finetune.lora_rank=2", "trainer.recompute=full"]),
    "bf16": (1, ["trainer.precision=bf16"]),
}


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_loss_and_gradients_are_those_of_each_document_alone(ranks: int, layout: list[str], tmp_path: Path) -> None:
    chooser = random.Random(5)
    documents = [[chooser.randrange(64) for _ in range(chooser.randint(1, 20))] for _ in range(60)]
    prefix = write_indexed(tmp_path / "text", documents)
    settings = [
        *[setting for setting in SMALL if not setting.startswith("data=")],
        *("data=redpajama", "data.tokenizer=null", f"data.prefixes=[{prefix}]", "data.split='1,0,0'"),
        *("data.document_mask=true", f"data.cache_dir={tmp_path}"),
    ]
    plan = resolve(load_config([*settings, "data.mock=true", *layout], CONF), ranks)
    plan.config.data.mock = False  # a rule allows LoRA on random weights for mock data only
    exact = "trainer.precision=bf16" not in layout
    for (loss, gradients), (other_loss, others) in run_ranks(_together_and_alone, ranks, plan):
        assert loss == pytest.approx(other_loss, rel=1e-6 if exact else 1e-3)
        assert gradients.keys() == others.keys() and gradients
        for name, gradient in gradients.items():
            bound = 1e-5 if exact else 0.05
            assert (gradient - others[name]).norm() <= bound * others[name].norm() + 1e-7, name


def _together_and_alone(rank: int, plan: Plan) -> tuple[Gradients, Gradients]:
    topology = plan.topology(rank)
    with process_groups(plan, topology, get_device("cpu"), CPU):
        stream, _ = build_streams(plan)
        whole = [dict(stream[number]) for number in range(plan.config.trainer.global_batch_size)]
        spans = TokenSpans(whole)
        assert len(spans) > 2 * len(whole)
        model = build_model(plan, topology, get_device("cpu"), CPU)
        together = Batches(stream, plan, topology, CPU).at(0)
        alone = Batches(spans, plan, topology, CPU)
        size = plan.config.trainer.global_batch_size
        apart = [batch for first in range(0, len(spans), size) for batch in alone.at(first)]
        collected = []
        for microbatches in (together, apart):
            model.zero_grad()
            loss = model.forward_backward(microbatches).item()
            collected.append((loss, {s.name: s.grad.clone() for s in model.shards if s.grad is not None}))
        return collected[0], collected[1]
