"""In all layouts, preference training equals a plain loop over separate answers with TRL's formulas."""

from __future__ import annotations

import math
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_llama.config.settings import FinetuneConfig
from megatron_llama.data.checks import check_data
from megatron_llama.data.finetuning_set import build_sft
from megatron_llama.model.preference import Pairs, PreferenceLoss, named_metrics
from megatron_llama.plan import Plan
from tests.data.files import write_indexed
from tests.finetuning.runner import LORA, MICRO_1, TOLERANCE, Tuned, World, make_plan, their_base, train_theirs, tune
from tests.oracle import distance
from tests.ranks import RankFailed, run_ranks
from tests.rows import each_layout

LENGTH, STEPS = 64, 4
Pair = tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]


def some_pairs(count: int, vocabulary: int) -> list[Pair]:
    """Pairs of (ids, mask): a common prompt without loss, and answers of different lengths."""
    rng = random.Random(3)
    pairs = []
    for _ in range(count):
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 10))]
        sides = []
        for _ in range(2):
            answer = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 14))]
            sides.append((prompt + answer, [0] * len(prompt) + [1] * len(answer)))
        pairs.append((sides[0], sides[1]))
    return pairs


def test_values_do_not_depend_on_the_position_of_an_example() -> None:
    """torch rounds some functions differently at the end of a tensor."""
    logps, reference = (torch.randn(2, 1, 74, generator=torch.Generator().manual_seed(1)) * 2**34).long()
    ones, labels = torch.ones(1, 74), torch.arange(74)[None] % 3 == 0
    loss, fields = PreferenceLoss(FinetuneConfig(objective="kto"), None), (ones, ones, ones, ones, reference, labels)

    def values(part: slice) -> torch.Tensor:
        pairs = Pairs(*[*(field[:, part] for field in fields), torch.tensor(0.1)])
        return loss._values(logps[:, part], pairs)[0]

    parts = [values(slice(example, example + 1)) for example in range(74)]
    assert torch.equal(values(slice(74)), torch.cat(parts, dim=-1))


def write_pairs(path: Path, pairs: list[Pair]) -> str:
    write_indexed(path.with_name(path.name + "_mask"), [c[1] + [2 + one for one in r[1]] for c, r in pairs], "B")
    return write_indexed(path, [c[0] + r[0] for c, r in pairs])


def write_labelled(path: Path, pairs: list[Pair]) -> str:
    """Both answers of each pair as examples with a label, of which each fifth one is undesirable."""
    sides = [side for pair in pairs for side in pair]
    marks = [[4 + 2 * (number % 5 == 0) + one for one in mask] for number, (_, mask) in enumerate(sides)]
    write_indexed(path.with_name(path.name + "_mask"), marks, "B")
    return write_indexed(path, [ids for ids, _ in sides])


def settings(folder: Path, world: World, *more: str) -> list[str]:
    """The settings of a run on new pairs in ``folder``."""
    folder.mkdir(exist_ok=True)
    write = write_labelled if "finetune.objective=kto" in more else write_pairs
    prefix = write(folder / "pairs", some_pairs(23, world.plan.model.vocab_size))
    data = ["data.mock=false", "data.kind=sft", f"data.prefixes=[{prefix}]", f"data.seq_length={LENGTH}"]
    return [*data, "data.split='1,0,0'", "finetune.objective=dpo", "finetune.beta=0.5", *world.full, *more]


def logp(llama: Any, side: tuple[list[int], list[int]]) -> torch.Tensor:
    ids, mask = torch.tensor(side[0]), torch.tensor(side[1])
    logps = llama(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return (logps.gather(1, ids[1:, None])[:, 0] * mask[1:]).sum()


def kto(llamas: Any, finetune: FinetuneConfig, sides: Any, numbers: list[int]) -> tuple[torch.Tensor, list[float]]:
    """KTO's loss of a batch by the trained and the initial model, and the means of its metrics."""
    ratios: list[list[torch.Tensor]] = []
    changes: list[list[torch.Tensor]] = []
    for number in numbers:
        (ids, mask), (other, marks) = sides[number], sides[number - 1]
        prompt, answer = ids[: mask.index(1)], other[marks.index(1) :]
        mismatched = (prompt + answer, [0] * len(prompt) + [1] * len(answer))
        for values, side in ((ratios, (ids, mask)), (changes, mismatched)):
            values.append([logp(llama, side) for llama in llamas])
    kl = torch.stack([ours - before for ours, before in changes]).mean().clamp(min=0).detach()
    losses: list[torch.Tensor] = []
    shown: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for number, (ours, before) in zip(numbers, ratios, strict=True):
        reward, desirable = finetune.beta * (ours - before), number % 5 > 0
        margin = (reward - finetune.beta * kl) * (1 if desirable else -1)
        factor = finetune.desirable_weight if desirable else finetune.undesirable_weight
        losses.append(factor * (1 - torch.sigmoid(margin)))
        shown[desirable].append(torch.stack((reward, ours)))
    sums = [torch.stack([torch.zeros(2), *shown[label]]).sum(0) / len(numbers) for label in (True, False)]
    shares = [len(shown[label]) / len(numbers) for label in (True, False)]
    rewards, logps = zip(*sums, strict=True)
    return torch.stack(losses).mean(), [float(value) for value in (*rewards, *logps, *shares, kl)]


def theirs(rank: int, plan: Plan, base: Path) -> Tuned:
    """Full training by transformers and torch.optim. Each answer has a separate forward pass."""
    model: Any = their_base(base)
    reference = deepcopy(model).requires_grad_(False)
    pairs, (train, _) = some_pairs(23, plan.model.vocab_size), build_sft(plan)
    finetune, size = plan.config.finetune, plan.config.trainer.global_batch_size
    metrics_of_steps = []

    def kto_loss_of(model: Any, plan: Plan, step: int) -> torch.Tensor:
        numbers = [n for index in range(step * size, (step + 1) * size) for n in train.order.examples(index)]
        loss, metrics = kto((model, reference), finetune, [side for pair in pairs for side in pair], numbers)
        metrics_of_steps.append(metrics)
        return loss

    def loss_of(model: Any, plan: Plan, step: int) -> torch.Tensor:
        values = []
        for index in range(step * size, (step + 1) * size):
            for number in train.order.examples(index):
                policy, initial = ([logp(llama, side) for side in pairs[number]] for llama in (model, reference))
                ratios = [ours - before for ours, before in zip(policy, initial, strict=True)]
                rewards = [finetune.beta * ratio for ratio in ratios]
                means = [ratio / sum(mask[1:]) for ratio, (_, mask) in zip(ratios, pairs[number], strict=True)]
                margin, smoothing = rewards[0] - rewards[1], finetune.label_smoothing
                loss = {
                    "sigmoid": -F.logsigmoid(margin) * (1 - smoothing) - F.logsigmoid(-margin) * smoothing,
                    "hinge": torch.relu(1 - margin),
                    "ipo": (means[0] - means[1] - 1 / (2 * finetune.beta)) ** 2,
                }[finetune.loss_type]
                if finetune.objective == "orpo":
                    policy = [logp / sum(mask[1:]) for logp, (_, mask) in zip(policy, pairs[number], strict=True)]
                    odds = [mean - (1 - mean.exp()).log() for mean in policy]
                    loss = -policy[0] - finetune.beta * F.logsigmoid(odds[0] - odds[1])
                    rewards = [finetune.beta * mean for mean in policy]
                    margin = rewards[0] - rewards[1]
                values.append(torch.stack((loss, *rewards, (margin > 0).float(), margin, *policy)))
        loss, *metrics = torch.stack(values).mean(dim=0)
        metrics_of_steps.append([value.item() for value in metrics])
        return loss

    tuned = train_theirs(model, plan, STEPS, kto_loss_of if finetune.objective == "kto" else loss_of)
    tuned.metrics = metrics_of_steps
    assert finetune.objective != "kto" or any(step[-1] > 0 for step in metrics_of_steps), "no KL"
    return tuned


def assert_near(ours: Tuned, other: Tuned) -> None:
    for name in ("losses", "norms", "metrics"):
        values, expected = (torch.tensor(getattr(tuned, name)) for tuned in (ours, other))
        torch.testing.assert_close(values, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert ours.trained.keys() == other.trained.keys()
    assert max(distance(tensor, other.trained[name]) for name, tensor in ours.trained.items()) <= TOLERANCE


KTO = "finetune.objective=kto"


@each_layout(__file__, "preference")
def test_dpo(ranks: int, layout: list[str], world: World, tmp_path: Path) -> None:
    changes = settings(tmp_path / "data", world, *layout)
    plan = make_plan(1, tmp_path, *(one for one in changes if not one.startswith("trainer.") or one == MICRO_1))
    other = run_ranks(theirs, 1, plan, world.base)[0]
    ours = tune(ranks, tmp_path / "run", *changes, steps=STEPS)
    assert ours.losses[0] == pytest.approx(other.losses[0])
    assert_near(ours, other)


@each_layout(__file__, "preference in exact mode")
def test_exact_mode(ranks: int, layout: list[str], world: World, tmp_path: Path) -> None:
    changes = settings(tmp_path / "data", world, "trainer.exact=true", *layout)
    one = [change for change in changes if not change.startswith("trainer.") or change == "trainer.exact=true"]
    tune(1, tmp_path / "inexact", *one, "trainer.exact=false", steps=0)  # its reference differs in bits
    expected = tune(1, tmp_path / "one", *one, f"data.cache_dir={tmp_path}", steps=2)
    other = tune(ranks, tmp_path / "other", *changes, steps=2)
    assert (other.losses, other.metrics) == (expected.losses, expected.metrics)
    assert all(torch.equal(tensor, expected.trained[name]) for name, tensor in other.trained.items())


def test_a_resumed_run_reads_the_reference(world: World, tmp_path: Path) -> None:
    changes = settings(tmp_path / "data", world)
    whole = tune(1, tmp_path / "whole", *changes, steps=STEPS)
    (file,) = (tmp_path / "data/index_cache").glob("reference-*.npy")
    changed = file.stat().st_mtime_ns
    tune(1, tmp_path / "run", *changes, steps=2)
    rest = tune(2, tmp_path / "run", *changes, "trainer.zero=3", MICRO_1, steps=STEPS)
    assert file.stat().st_mtime_ns == changed, "the runs share it"
    torch.testing.assert_close(rest.losses, whole.losses[2:], rtol=TOLERANCE, atol=0)
    np.savez(file.open("wb"), whole.losses)  # damaged: another kind of file
    with pytest.raises(RankFailed, match="the reference of this run's answers"):
        tune(1, tmp_path / "run", *changes, steps=STEPS + 1)


def test_lora_compares_with_its_base(world: World, tmp_path: Path) -> None:
    changes = settings(tmp_path / "data", world, *LORA, "finetune.frozen_dtype=fp32")
    one = tune(1, tmp_path / "one", *changes, steps=STEPS)
    assert one.losses[0] == pytest.approx(math.log(2))
    two = tune(2, tmp_path / "two", *changes, "trainer.tp=2", steps=STEPS)
    torch.testing.assert_close(two.metrics[1:], one.metrics[1:], rtol=TOLERANCE, atol=TOLERANCE)  # step 1: rounding


OTHER_DATA = [
    (write_pairs, ["finetune.objective=sft"], "has pairs of a chosen and a rejected answer", "dpo"),
    (write_labelled, ["finetune.objective=sft"], "has answers with labels", "kto"),
    (write_labelled, ["finetune.objective=dpo"], "has no pairs of answers", "kto"),
    (write_pairs, [KTO], "has no labels of answers", "dpo"),
]


@pytest.mark.parametrize(("write", "change", "message", "other"), OTHER_DATA)
def test_the_data_fits_the_objective(
    write: Any, change: list[str], message: str, other: str, world: World, tmp_path: Path
) -> None:
    changes = [one for one in settings(tmp_path / "data", world, *change) if "finetune.beta" not in one]
    write(tmp_path / "data/pairs", some_pairs(23, world.plan.model.vocab_size))
    (problem,) = check_data(make_plan(1, tmp_path, *changes).config)
    assert message in problem.rule and f"write finetune.objective={other}" in problem.instead


def test_a_batch_without_a_label_lacks_its_metrics() -> None:
    finetune = FinetuneConfig(objective="kto")
    both = {"rewards/chosen": 4.0, "logps/chosen": -8.0, "rewards/rejected": -2.0, "logps/rejected": -4.0, "kl": 0.5}
    assert named_metrics(finetune, (1, -1.5, -2, -3, 0.25, 0.75, 0.5)) == {**both, "rewards/margins": 6.0}
    assert named_metrics(finetune, (0, -2, 0, -4, 0, 1, 0.5)) == {k: v for k, v in both.items() if "chosen" not in k}
