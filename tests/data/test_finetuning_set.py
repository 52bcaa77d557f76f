"""Fine-tuning sets in training: the masks select the tokens with loss, in each layout and epoch."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_llama.config import ConfigError, to_yaml
from megatron_llama.corpus.splits import open_splits
from megatron_llama.data.finetuning_set import PADDING, Examples, SFTDataset, build_sft
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan, format_plan, resolve
from megatron_llama.train.loop import validate
from tests.config.helpers import make
from tests.data.files import data_plan, write_indexed
from tests.messages import raises_with_message, unwrap
from tests.oracle import make_plan, on_ranks, rank_data
from tests.ranks import RankFailed, run_ranks

LENGTH = 16
Example = tuple[list[int], list[int]]
Item = dict[str, list[int]]


def some_examples(count: int, first: int = 1, vocabulary: int | None = None) -> list[Example]:
    """(ids, mask) of examples of 2 to 17 tokens. Ids count on, unless they must fit a vocabulary; some examples' whole
    end is learned, some have answers in between."""
    rng = random.Random(count + first)
    actual, place = [], first
    for _ in range(count):
        length = rng.randint(2, LENGTH + 1)
        ids = list(range(place, place + length))
        if vocabulary is not None:
            ids = [rng.randrange(vocabulary) for _ in ids]
        actual.append((ids, [int(rng.random() < 0.5) for _ in range(length - 1)] + [1]))
        place += length
    return actual


VALIDATING = {"trainer.val_every_steps": 1}


def write_set(path: Path, examples: list[Example]) -> str:
    """The two datasets of a set; returns its prefix."""
    write_indexed(path.with_name(path.name + "_mask"), [mask for _, mask in examples], "B")
    return write_indexed(path, [ids for ids, _ in examples])


def plan_of(prefixes: list[str], pack: bool = False, **more: Any) -> Plan:
    settings = {"data.kind": "sft", "data.pack": pack, "data.seq_length": LENGTH, "data.split": "1,0,0", **more}
    return data_plan(prefixes, **settings)


def items(plan: Plan, count: int) -> tuple[list[Item], list[Item]]:
    """The first samples of training and validation."""
    return run_ranks(_items, 1, plan, count)[0]


def _items(rank: int, plan: Plan, count: int) -> tuple[list[Item], list[Item]]:
    train, validation = build_sft(plan)
    return _lists(train, count), [each for held_out in validation.values() for each in _lists(held_out, len(held_out))]


def _lists(data: SFTDataset, count: int) -> list[Item]:
    count = count or len(data)
    return [{name: tensor.tolist() for name, tensor in data[index].items()} for index in range(count)]


def taken_apart(item: Item) -> list[Example]:
    """The examples of a sample; all that is checked of their form on the way."""
    actual, place = [], 0
    used = zip(item["tokens"], item["labels"], strict=True)
    documents = item.get("documents") or [0 if any(pair) else PADDING for pair in used]
    for number in range(max(documents) + 1):
        size = documents.count(number)
        assert documents[place : place + size] == [number] * size
        tokens, labels, mask = (item[name][slice(place, place + size)] for name in ("tokens", "labels", "loss_mask"))
        assert tokens[1:] == labels[:-1]
        actual.append(([*tokens, labels[-1]], [int(mark) for mark in mask]))
        place += size
    assert documents[place:] == [PADDING] * (LENGTH - place)
    assert not any(item["loss_mask"][place:]), "padding is in the loss"
    return actual


@pytest.mark.parametrize("pack", [False, True])
def test_an_epoch_is_every_example_once(tmp_path: Path, pack: bool) -> None:
    one, two = some_examples(37), some_examples(20, first=5000)
    actual, _ = items(plan_of([write_set(tmp_path / "one", one), write_set(tmp_path / "two", two)], pack), 0)
    seen = Counter((tuple(ids), tuple(mask)) for item in actual for ids, mask in taken_apart(item))
    # The first token is never a label, so its mask says nothing.
    assert seen == Counter((tuple(ids), tuple(mask[1:])) for ids, mask in one + two)
    assert len(actual) == 57 if not pack else len(actual) < 40
    assert ("documents" in actual[0]) == pack


def test_validation_on_a_separate_set_or_a_share(tmp_path: Path) -> None:
    one, two = some_examples(40), some_examples(10, first=5000)
    prefixes = [write_set(tmp_path / name, examples) for name, examples in (("one", one), ("two", two))]
    train, validation = items(plan_of(prefixes[:1], **{"data.validation_prefixes": prefixes[1:], **VALIDATING}), 0)
    assert len(train) == 40 and len(validation) == 10
    assert min(item["tokens"][0] for item in validation) >= 5000 > max(max(item["labels"]) for item in train)
    train, validation = items(plan_of(prefixes[:1], **{"data.split": "30,10,0", **VALIDATING}), 0)
    starts = {ids[0] for ids, _ in one[:30]}
    assert len(train) == 30 and len(validation) == 10 and {item["tokens"][0] for item in train} == starts


def _write_masks(prefix: str, masks: list[list[int]], kind: str = "B") -> None:
    write_indexed(Path(prefix + "_mask"), masks, kind)


BROKEN: dict[str, tuple[Callable[[str], object], str]] = {
    "no mask": (lambda prefix: Path(prefix + "_mask.idx").unlink(), "has no readable loss masks"),
    "other masks": (lambda prefix: _write_masks(prefix, [[1, 1]] * 5), "_mask does not match the dataset"),
    "uint16 masks": (
        lambda prefix: _write_masks(prefix, [[1] * len(ids) for ids, _ in some_examples(30)], "H"),
        "_mask does not match the dataset",
    ),
    "cut masks": (lambda prefix: os.truncate(prefix + "_mask.bin", 50), "_mask.bin has"),
    "too long": (
        lambda prefix: write_set(Path(prefix), [(list(range(LENGTH + 2)), [1] * (LENGTH + 2))]),
        "an example of 18 tokens, which needs data.seq_length=17 (configured: 16)",
    ),
    "single token": (lambda prefix: write_set(Path(prefix), [([5], [1])]), "an example of one token"),
}


@pytest.mark.parametrize(("harm", "message"), BROKEN.values(), ids=BROKEN)
def test_unfit_sets_are_refused(tmp_path: Path, harm: Callable[[str], object], message: str) -> None:
    prefix = write_set(tmp_path / "set", some_examples(30))
    plan = plan_of([prefix])
    harm(prefix)
    with raises_with_message(RankFailed, f"ConfigError.*{re.escape(prefix)}.*{re.escape(message)}"):
        items(plan, 1)


def test_sets_without_examples_or_masks_are_refused(tmp_path: Path) -> None:
    prefix = write_set(tmp_path / "set", some_examples(30))
    with pytest.raises(RankFailed, match="leaves none of its 30 examples for validation"):
        items(plan_of([prefix], **{"data.split": "999,1,0", **VALIDATING}), 1)
    prefix = write_indexed(tmp_path / "text", [[1, 2, 3]])
    with pytest.raises(ConfigError, match="text_mask.bin"):
        plan_of([prefix])


@pytest.mark.parametrize("mask", [[0, 0, 0, 0], [1, 0, 0, 0]], ids=["nothing", "first token"])
@pytest.mark.parametrize("where", ["training", "split", "validation_prefixes"])
def test_a_set_without_a_label_is_refused(tmp_path: Path, mask: list[int], where: str) -> None:
    """An example's first token is never a label."""
    labelled, masked = [([1, 2, 3, 4], [0, 0, 0, 1])] * 8, [([1, 2, 3, 4], mask)] * 8
    settings: dict[str, Any] = {"data.split": "1,1,0", **VALIDATING}
    examples = {"training": masked + labelled, "split": labelled + masked, "validation_prefixes": labelled}[where]
    if where == "validation_prefixes":
        settings["data.validation_prefixes"] = [write_set(tmp_path / "held_out", masked)]
    prefix = write_set(tmp_path / "set", examples)
    part = "training" if where == "training" else "validation"
    with pytest.raises(RankFailed, match=rf"no label for\s+{part}: each\s+token\s+is\s+masked"):
        items(plan_of([prefix], **settings), 1)
    whole = plan_of([write_set(tmp_path / "good", masked + labelled)])  # a masked part is valid
    assert sum(sum(item["loss_mask"]) for item in items(whole, 16)[0]) == 8


def test_epochs_are_steps(tmp_path: Path) -> None:
    prefix = write_set(tmp_path / "set", some_examples(45))
    whole = {"trainer.epochs": 3, "trainer.global_batch_size": 4, "optim.warmup_ratio": 0.1}
    plan = plan_of([prefix], **whole)
    assert plan.config.trainer.steps == 3 * 45 // 4 == 33 and plan.config.optim.warmup_steps == 4  # rounded up
    assert "3 epochs of 45 sequences" in plan.notes[-1]
    assert resolve(plan.config, 1).config == plan.config, "a resolved config resolves to itself"
    packed = plan_of([prefix], pack=True, **whole)
    assert packed.config.trainer.steps == 3 * len(items(packed, 0)[0]) // 4 < 33
    assert plan_of([prefix], **{**whole, "data.split": "30,15,0"}).config.trainer.steps == 3 * 30 // 4
    text = data_plan([prefix], **{"trainer.epochs": 2, "data.seq_length": 8, "data.split": "1,0,0"})
    assert text.config.trainer.steps == 2 * ((sum(len(ids) for ids, _ in some_examples(45)) - 1) // 8) // 8
    with pytest.raises(ConfigError, match=r"has\s+no\s+step"):
        plan_of([prefix], **{"trainer.epochs": 1, "trainer.global_batch_size": 46})


# Every layout trains on the same sets: loss and gradient norm of ragged masks, to the order of sums.
LAYOUTS = [(2, ["trainer.tp=2"]), (2, ["trainer.pp=2"]), (2, ["trainer.zero=2"]), (1, ["trainer.micro_batch_size=4"])]


def sft_overrides(tmp_path: Path, pack: bool) -> list[str]:
    prefix = write_set(tmp_path / "set", some_examples(50, vocabulary=64))
    kind = ["data.mock=false", "data.kind=sft", f"data.pack={str(pack).lower()}", f"data.prefixes=[{prefix}]"]
    return [*kind, "data.split='1,0,0'"]


@pytest.mark.parametrize("pack", [False, True])
def test_loss_is_per_learned_token_of_the_global_batch_in_every_layout(tmp_path: Path, pack: bool) -> None:
    overrides = sft_overrides(tmp_path, pack)
    ((loss, norm, by_hand),) = on_ranks(_losses, make_plan(1, *overrides))
    assert loss == pytest.approx(by_hand, rel=1e-6)
    for ranks, layout in LAYOUTS:
        for actual in on_ranks(_losses, make_plan(ranks, *overrides, *layout)):
            assert actual[:2] == pytest.approx((loss, norm), rel=1e-5), layout


def _losses(plan: Plan, model: ParallelModel) -> tuple[float, float, float]:
    """(loss, gradient norm, the loss added up token by token in one process) of the second global batch."""
    batches = rank_data(plan).train.at(8)
    total, count = 0.0, 0.0
    if plan.world_size == 1:
        for batch in batches:
            logits = model.logits(batch.tokens, batch.documents)
            assert logits is not None
            losses = torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), batch.labels, reduction="none")
            total += (losses * batch.loss_mask).sum().item()
            count += batch.loss_mask.sum().item()
    loss = model.forward_backward(batches).item()
    return loss, build_optimizer(plan, model).gradient_norm().item(), total / max(count, 1)


@pytest.mark.parametrize(("pack", "layout"), [(False, "trainer.zero=2"), (True, "trainer.pp=2")])
def test_validation_is_on_every_example_once(tmp_path: Path, pack: bool, layout: str) -> None:
    held_out = write_set(tmp_path / "held_out", some_examples(21, first=7, vocabulary=64))
    overrides = [*sft_overrides(tmp_path, pack), f"data.validation_prefixes=[{held_out}]"]
    overrides += ["trainer.val_every_steps=1", "model.initializer_range=0.3"]
    ((actual, by_hand),) = on_ranks(_val_loss, make_plan(1, *overrides))
    assert actual == pytest.approx(by_hand, rel=1e-6)
    for other, _ in on_ranks(_val_loss, make_plan(2, *overrides, layout)):
        assert other == pytest.approx(actual, rel=1e-6)


def _val_loss(plan: Plan, model: ParallelModel) -> tuple[float, float]:
    """Return the validation loss, and the mean over tokens with loss in one process, example by example."""
    validation = rank_data(plan).validation
    assert isinstance(validation[""].samples, SFTDataset)
    total, count = 0.0, 0.0
    examples = validation[""].samples.examples
    for ids, mask in (examples[number] for number in range(len(examples) if plan.world_size == 1 else 0)):
        tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
        tokens[0, : len(ids) - 1] = torch.tensor(ids[:-1].astype("int64"))
        logits = model.logits(tokens)
        assert logits is not None
        labels, learned = torch.tensor(ids[1:].astype("int64")), torch.tensor(mask[1:].astype("float64"))
        losses = torch.nn.functional.cross_entropy(logits[: len(labels), 0].double(), labels, reduction="none")
        total, count = total + (losses * learned).sum().item(), count + learned.sum().item()
    return validate(plan, model, validation)["val_loss"], total / max(count, 1)


def test_the_plan_states_the_examples_of_each_validation(tmp_path: Path) -> None:
    prefix = write_set(tmp_path / "set", some_examples(50))
    settings = {"data.split": "30,20,0", "trainer.val_every_steps": 5, "trainer.global_batch_size": 8}
    for steps, message in {
        None: "each validation uses all 20 examples, in 3 batches of 8",
        2: "each validation uses 16 of 20 examples; trainer.val_steps=null",
        3: "uses 24 examples of 20, so some count twice",
    }.items():
        plan = plan_of([prefix], **settings, **{"trainer.val_steps": steps})
        assert plan.config.trainer.val_steps == steps and message in " ".join(plan.notes), plan.notes
    only = plan_of([prefix], **{**settings, "data.split": "49,1,0"})
    assert "each validation uses the only example, in a batch of 8" in " ".join(only.notes), only.notes
    off = plan_of([prefix], **{**settings, "trainer.val_every_steps": 0})
    text = data_plan([prefix], **{"trainer.val_every_steps": 5, "data.split": "30,20,0"})
    assert text.config.trainer.val_steps == 4  # pretraining's is a number
    assert "each validation" not in " ".join((*off.notes, *text.notes))


@pytest.mark.parametrize(
    ("settings", "every"),
    [
        ({}, 10),  # a tenth of the steps
        ({"trainer.steps": 9}, 3),  # the batches of a validation
        ({"trainer.steps": 2}, 2),  # once, at the end
        ({"trainer.val_steps": 1, "trainer.steps": 9}, 1),
        ({"trainer.epochs": 10}, 3),  # 37 steps
        ({"data.split": "1,0,0"}, 0),
        ({"data.split": "999,1,0"}, 0),  # of 50 examples none
        ({"trainer.val_every_steps": 0}, 0),
        ({"trainer.steps": 0}, 0),
        ({"trainer.val_every_steps": 7}, 7),
        ({"data.mock": True}, None),
        ({"data.kind": "pretrain"}, None),
        ({"data.prefixes": ["missing"]}, 10),  # a plan for another host
    ],
)
def test_default_validation_of_held_out_examples(settings: dict[str, Any], every: int | None, tmp_path: Path) -> None:
    prefix = write_set(tmp_path / "set", some_examples(50))
    common = {"data.split": "30,20,0", "trainer.global_batch_size": 8, "trainer.steps": 100}
    steps = {"trainer.steps": 100} if "trainer.epochs" in settings else {}
    config = make(**{**common, "data.kind": "sft", "data.mock": False, "data.prefixes": [prefix], **settings, **steps})
    plan = resolve(config, 1, exists=lambda path: True)
    assert plan.config.trainer.val_every_steps == every
    page = unwrap(format_plan(plan))
    chosen = every and "trainer.val_every_steps" not in settings
    assert ("by default; trainer.val_every_steps=0 turns it off" in page) == bool(chosen)
    assert (" validation off" in page) == (not every)
    assert ("holds out none of the 50 examples" in page) == (settings == {"data.split": "999,1,0"})


def test_the_best_checkpoint_of_a_default_validation(tmp_path: Path) -> None:
    prefix = write_set(tmp_path / "set", some_examples(50))
    settings = {"data.split": "30,20,0", "checkpoint.keep_best": True, "trainer.global_batch_size": 8}
    assert plan_of([prefix], **settings).config.checkpoint.every_steps == 10
    assert plan_of([prefix], **settings, **{"checkpoint.every_steps": 20}).config.checkpoint.every_steps == 20
    with pytest.raises(ConfigError, match="needs validation: trainer.val_every_steps is 0"):
        plan_of([prefix], **{**settings, "data.split": "1,0,0"})


def test_the_set_that_preparation_held_out_is_for_validation(tmp_path: Path) -> None:
    training = write_set(tmp_path / "qa_train_sft", some_examples(50))
    assert plan_of([training]).config.data.validation_prefixes == []
    held_out = write_set(tmp_path / "qa_validation_sft", some_examples(20, 5))
    plan = plan_of([training])
    assert plan.config.data.validation_prefixes == [held_out] and plan.config.trainer.val_every_steps == 10
    assert f"data.validation_prefixes=[{held_out}]: held out by data_prep/sft.py --split" in plan.chosen
    other = write_set(tmp_path / "other", some_examples(9))
    assert plan_of([training, other]).config.data.validation_prefixes == []
    assert plan_of([training], **{"data.validation_prefixes": [other]}).config.data.validation_prefixes == [other]

    def resumed(name: str, began: Plan) -> Plan:
        (tmp_path / name / "checkpoints" / "step_00000001").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(to_yaml(began.config), encoding="utf-8")
        return plan_of([training], **{"run.dir": str(tmp_path / name)})

    assert resumed("new", plan).config.data.validation_prefixes == [held_out]
    began = plan_of([training, other])  # as an older version: without validation
    began.config.trainer.val_every_steps = None
    older = resumed("old", began).config
    assert older.data.validation_prefixes == [] and older.trainer.val_every_steps == 0


@pytest.mark.parametrize("pack", [False, True])
def test_a_sample_does_not_depend_on_the_length_of_the_run(tmp_path: Path, pack: bool) -> None:
    prefixes = [write_set(tmp_path / name, some_examples(20 + 7 * number)) for number, name in enumerate("ab")]
    count = 150  # several epochs
    short, long = (items(plan_of(prefixes, pack, **{"trainer.steps": steps}), count)[0] for steps in (1, 5000))
    assert short == long
    assert items(plan_of(prefixes, pack, **{"trainer.seed": 9}), count)[0] != long, "the seed does not matter"


@pytest.mark.parametrize(
    ("part", "value", "message"), [(0, 60_000, "has id 60000"), (1, 2, "has the loss mask 2")], ids=["id", "mask"]
)
def test_an_invalid_value_is_named_with_its_position(tmp_path: Path, part: int, value: int, message: str) -> None:
    examples = some_examples(30)
    examples[20][part][-1] = value
    read = Examples(open_splits(plan_of([write_set(tmp_path / "set", examples)]).config.data, 0), 60_000)
    assert [list(read[number][part]) for number in range(20)] == [example[part] for example in examples[:20]]
    with pytest.raises(ConfigError, match=f"token {len(examples[20][0]) - 1} of sequence 20 {message}"):
        read[20]
