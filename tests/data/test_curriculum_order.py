"""A curriculum's samples: never more difficult than the step allows, all allowed samples equally often, and the same in
each layout and after a resume."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep import analyze
from megatron_llama.config import ConfigError
from megatron_llama.corpus.difficulty_index import open_difficulty_index
from megatron_llama.corpus.splits import planned_timeline
from megatron_llama.data.batches import Batches
from megatron_llama.data.curriculum_order import GroupSchedule, cut_sample, group_seed, levels_of
from megatron_llama.data.pretraining_samples import EndlessDataset, SampleStream
from megatron_llama.plan import Plan
from megatron_llama.plan.data_schedules import SequenceCut
from tests.data.files import data_plan, numbered, read, text, write_indexed
from tests.oracle import CPU

LENGTH, GLOBAL_BATCH = 32, 8  # data_plan's
Settings = dict[str, Any]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset whose samples are as difficult as their first token is large, and an index of it."""
    written = write_indexed(tmp_path_factory.mktemp("graded") / "a", numbered(200))
    for name in ("first", "last_digit"):
        metric = f"tests.data.test_curriculum_order.{name}"
        analyze.main([written, "--metric", metric, "--seq-length", "32", "--workers", "1"])
    return written


def first(ids: np.ndarray) -> float:
    """A metric: the place in the file."""
    return 2 + int(ids[0]) / 10


def last_digit(ids: np.ndarray) -> int:
    """A metric that has nothing to do with the other one."""
    return 1 + int(ids[0]) // LENGTH * 7 % 10


BY_VALUE: Settings = {"metric": "first", "min_difficulty": 100, "max_difficulty": 400, "difficulty_step": 50}
BY_VALUE |= {"total_curriculum_step": 20}
BY_SHARE: Settings = {"metric": "last_digit", "difficulty_type": "percentile", "schedule_type": "fixed_root"}
BY_SHARE |= {"min_difficulty": 20, "max_difficulty": 100, "total_curriculum_step": 30}
STEPS = {"trainer.steps": 60}


def graded_plan(prefix: str, *metrics: Settings, world: int = 1, **changes: Any) -> Plan:
    return data_plan([prefix], world, **{"data.curriculum": list(metrics), **STEPS, **changes})


def stream_of(plan: Plan) -> SampleStream:
    """A plan's training samples, without ranks."""
    timeline, levels = planned_timeline(plan.config.data), levels_of(plan)
    (prefix,) = timeline.segments[0].weights
    firsts = [timeline.before(level.samples)[prefix] for level in levels]
    return SampleStream(timeline, {prefix: EndlessDataset(plan, prefix, 0).graded(levels, firsts)})


def test_no_sample_is_above_its_step(prefix: str) -> None:
    plan = graded_plan(prefix, BY_VALUE, BY_SHARE)
    stream, metrics = stream_of(plan), levels_of(plan)
    assert len(metrics) > 10
    units = [text(stream[number]) for number in range(60 * GLOBAL_BATCH)]
    order = open_difficulty_index(Path(f"{prefix}_metrics/last_digit-32"), prefix).order
    in_split = [unit for unit in order if unit * LENGTH + LENGTH < 4950]  # of the split
    for number, unit in enumerate(units):
        step = number // GLOBAL_BATCH + 1
        # The published arithmetic, by hand.
        by_value = min(400, int(step / 20 * 300 + 100) // 50 * 50)
        by_share = min(100, int((step / 30) ** 0.5 * 80 + 20))
        assert 2 + unit[0] / 10 <= by_value, f"sample {number}"
        assert len(unit) == LENGTH + 1 and (unit[0] - 1) % LENGTH == 0, "a unit is a stretch of the file"
        assert in_split.index((unit[0] - 1) // LENGTH) < by_share / 100 * len(in_split), f"sample {number}"
    assert max(unit[0] for unit in units) > 3500
    dataset, order = stream.datasets[prefix]._dataset, stream.datasets[prefix]._graded
    document, token = order.place(dataset, 7, 9)
    assert dataset.sequence(document)[token] == order.text(dataset, 7)[0][9]
    assert all(sum(order.text(dataset, number)[1]) == LENGTH + 1 for number in range(len(units)))


def test_after_the_curriculum_every_sample_is_seen(prefix: str) -> None:
    # 150 of 154 samples are at most 480: all of these are drawn from step 20 on.
    plan = graded_plan(prefix, {**BY_VALUE, "max_difficulty": 480}, **{"trainer.steps": 400})
    stream, begin = stream_of(plan), 25 * GLOBAL_BATCH
    count = len(stream)
    allowed = {unit * LENGTH + 1 for unit in range(10**4) if unit * LENGTH + 1 <= 4780 and (unit + 1) * LENGTH < 4950}
    assert count == len(allowed)
    for first_sample in (begin, begin + 3 * count):
        seen = Counter(text(stream[number])[0] for number in range(first_sample, first_sample + 2 * count))
        assert seen.keys() == allowed and max(seen.values()) <= 3


def test_turns_are_fair_however_short_the_levels() -> None:
    chooser = random.Random(1)
    for _ in range(30):
        levels = chooser.randint(1, 40)
        sizes = [chooser.randint(1, 50)] + [chooser.choice([0, 1, 5, 90]) for _ in range(levels - 1)]
        firsts = [0, *sorted(chooser.randint(0, 300) for _ in range(levels - 1))]
        schedule, due, drawn = GroupSchedule(firsts, sizes), np.zeros(levels), np.zeros(levels, dtype=int)
        for draw in range(400):
            group, number = schedule.at(draw)
            now = max(level for level in range(levels) if firsts[level] <= draw)
            assert group <= now and sizes[group] and number == drawn[group], "groups continue at their positions"
            drawn[group] += 1
            allowed = np.array([size if level <= now else 0 for level, size in enumerate(sizes)])
            due += allowed / allowed.sum()
            assert abs(drawn - due).max() < 1 + levels / 2
        assert (schedule.drawn(400) == drawn).all()
    sizes, firsts = [1] * 100, [0] + [400 + 3 * level for level in range(99)]
    schedule, due = GroupSchedule(firsts, sizes), np.zeros(100)
    for level, first in enumerate(firsts[:-1]):
        due[: level + 1] += (firsts[level + 1] - first) / (level + 1)
    drawn = schedule.drawn(firsts[-1])
    assert abs(drawn - due).max() < 3, "what a short level could not give is given in the next ones"
    drawn = schedule.drawn(5000)
    assert drawn[50:99].min() > 20, "the last groups wait for ever where each level begins with the first one"


def test_groups_are_shuffled_unlike_each_other(prefix: str) -> None:
    stream = stream_of(graded_plan(prefix, BY_VALUE))
    other_seed = stream_of(graded_plan(prefix, BY_VALUE, **{"trainer.seed": 5}))
    firsts = [[text(samples[number])[0] for number in range(60)] for samples in (stream, other_seed)]
    assert firsts[0] != sorted(firsts[0]) and firsts[0] != firsts[1]
    assert len({group_seed(1234, group) for group in range(1000)}) == 1000


def test_batches_are_the_same_in_every_layout(prefix: str) -> None:
    cut = {"metric": "seqlen_reshape", "schedule_type": "fixed_discrete", "difficulty": [8, 32], "max_step": [4]}
    seen: dict[int, list[list[int]]] = {}
    for world, changes in ((1, {}), (4, {"trainer.tp": 2}), (4, {"trainer.pp": 2, "trainer.micro_batch_size": 2})):
        plan = graded_plan(prefix, cut, BY_VALUE, world=world, **changes)
        for step in (3, 5):
            rows = []
            for rank in range(world):
                topology = plan.topology(rank)
                if topology.place["tp"] == topology.place["pp"] == 0:
                    batches = Batches(stream_of(plan), plan, topology, CPU, plan.batches, levels=levels_of(plan))
                    for batch in batches.on_host((step - 1) * GLOBAL_BATCH):
                        assert batch.tokens.shape[1] == (8 if step < 5 else 32)
                        assert batch.tokens.numel() == LENGTH * plan.config.trainer.micro_batch_size
                        assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
                        rows += batch.tokens.tolist()
            assert seen.setdefault(step, sorted(rows)) == sorted(rows)


def test_cut_samples() -> None:
    sample = {"tokens": torch.arange(10), "documents": torch.tensor([0] * 7 + [-1] * 3), "num_tokens": torch.tensor(7)}
    (short,) = cut_sample(sample, SequenceCut(8, 1))
    assert short["tokens"].tolist() == [*range(8)] and short["num_tokens"] == 7
    chunks = cut_sample(sample, SequenceCut(4, 2))
    assert [chunk["tokens"].tolist() for chunk in chunks] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [int(chunk["num_tokens"]) for chunk in chunks] == [4, 3]
    assert chunks[1]["documents"].tolist() == [0, 0, 0, -1]
    assert cut_sample(sample, None) == [sample]


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_a_run_resumes_at_any_sample(prefix: str, kind: str, tmp_path: Path) -> None:
    metrics, changes = [BY_VALUE, BY_SHARE], {}
    if kind == "sft":
        examples = [document for document in numbered(200) if 2 <= len(document) <= LENGTH]
        prefix = write_indexed(tmp_path / "a", examples)
        write_indexed(tmp_path / "a_mask", [[1] * len(example) for example in examples], kind="B")
        analyze.main([prefix, "--metric", "length", "--workers", "1"])
        metrics = [{**BY_VALUE, "metric": "length", "min_difficulty": 8, "max_difficulty": 32, "difficulty_step": 4}]
        changes = {"data.kind": "sft", "data.pack": True}
    plan = graded_plan(prefix, *metrics, **changes)
    other = graded_plan(prefix, *metrics, world=4, **changes, **{"trainer.steps": 45, "trainer.tp": 2})
    # Twice the batch from the 96th sample on: the same samples in half the steps. Earlier draws do not change.
    larger = graded_plan(prefix, *metrics, **changes, **{"trainer.global_batch_size": 16})
    whole, begun = read((plan, None, 0, 240), (other, None, 0, 96))
    assert begun.samples == whole.samples[:96]
    repeated, faster = read((plan, begun.record, 96, 144), (larger, begun.record, 96, 96))
    assert repeated[:3] == (whole.samples[96:], whole.levels, whole.record)
    past = [level for level in whole.levels if level[0] <= 96]
    assert faster.samples != whole.samples[96:192] and faster.levels[: len(past)] == past
    assert faster.levels != whole.levels
    assert faster.samples[:8] == whole.samples[96:104], "the current level continues at its position"


def test_a_curriculum_that_begins_later_begins_at_its_start(prefix: str) -> None:
    plain, graded = data_plan([prefix], **STEPS), graded_plan(prefix, BY_VALUE)
    record = read((plain, None, 0, 40))[0].record
    record.pop("curriculum")  # a checkpoint of before there was one
    first, whole = read((graded, record, 40, 80), (graded, record, 40, 88))
    assert first.levels[0] == (40, {"first": 150}) and first.record["levels"][0] == [40, {"first": 150}]
    assert all(2 + sample[0] / 10 <= 400 for sample in first.samples)
    (rest,) = read((graded, first.record, 120, 8))
    assert [*first.samples, *rest.samples] == whole.samples


def test_an_index_that_does_not_fit_is_refused(prefix: str, tmp_path: Path) -> None:
    for metric, message in (
        ({**BY_VALUE, "metric": "unknown"}, "there is no index in .*unknown-32.*data_prep/analyze.py"),
        ({**BY_VALUE, "index": str(tmp_path)}, "there is no index"),
        (
            {"metric": "first", "schedule_type": "fixed_discrete", "difficulty": [2, 400], "max_step": [5]},
            "no sample .* first is 2.1 or more",
        ),
    ):
        with pytest.raises(ConfigError, match="(?s)" + message.replace(" ", r"\s+")):
            stream_of(graded_plan(prefix, metric))
    write_indexed(tmp_path / "b", numbered(100))
    (tmp_path / "b_metrics").symlink_to(f"{prefix}_metrics")
    with pytest.raises(ConfigError, match="another"):
        stream_of(graded_plan(str(tmp_path / "b"), BY_VALUE))
