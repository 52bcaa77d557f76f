"""The data record of a checkpoint, and a stream that resumes from it."""

from __future__ import annotations

import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.config import ConfigError
from megatron_llama.corpus.indexed_format import read_index
from megatron_llama.data.megatron_order import build_megatron
from megatron_llama.data.resume_record import Record, differences, make_record
from megatron_llama.plan import Plan
from tests.data.files import data_plan, megatron_record, numbered, read, run_texts, write_indexed
from tests.ranks import run_ranks

GLOBAL_BATCH = 8  # data_plan's
Changes = dict[str, Any]


@pytest.fixture
def sets(tmp_path: Path) -> list[str]:
    """Three datasets of 31, 20 and 13 training sequences."""
    sizes = {"a": 40, "b": 25, "c": 18}
    return [
        write_indexed(tmp_path / name, numbered(size, 1 + 5000 * number))
        for number, (name, size) in enumerate(sizes.items())
    ]


def test_a_stream_resumes_at_any_sample(sets: list[str]) -> None:
    chooser = random.Random(3)
    blend: list[Any] = [0.2, sets[0], 0.5, sets[1], 0.3, sets[2]]
    schedule = [{"samples": 100, "prefixes": [sets[2], sets[0]]}]
    (whole,) = read((data_plan(blend, **{"data.schedule": schedule}), None, 0, 200))
    record = whole.record
    assert len(record["segments"]) == 2 and record["order"] == "epochs"
    stops = [0, *sorted(chooser.sample(range(1, 200), 4)), 200]
    stopped: Record | None = None
    for first, last in zip(stops, stops[1:], strict=False):
        another = data_plan(blend, 4, **{"data.schedule": schedule, "trainer.steps": 1 + 9 * last, "trainer.tp": 2})
        (part,) = read((another, stopped, first, last - first))
        stopped = part.record
        assert part.samples == whole.samples[first:last]
    assert stopped == record


VALIDATE: Changes = {"trainer.val_every_steps": 1, "trainer.val_steps": 1}


@pytest.mark.parametrize("kind", ["one", "blend", "unweighted"])
def test_a_run_in_megatrons_order_resumes_in_that_order(sets: list[str], tmp_path: Path, kind: str) -> None:
    """Through all its epochs; its validation too. Then it stops and resumes."""
    prefixes: list[Any] = {"one": sets[:1], "blend": [0.25, sets[0], 0.75, sets[1]], "unweighted": sets[:2]}[kind]
    shares = {"one": {}, "blend": dict(zip(sets, (0.25, 0.75), strict=False))}.get(kind)
    if shares is None:
        shares = {prefix: float(read_index(prefix).tokens()) for prefix in prefixes}
    plan = data_plan(prefixes, **{"trainer.steps": 20, **VALIDATE})
    count = 20 * GLOBAL_BATCH
    before, held_out = run_texts(plan, shares, count, 8, tmp_path / "theirs")
    assert read((plan, None, 0, count))[0].samples != before, "the orders are the same here: nothing is shown"
    first, second = read(*((plan, megatron_record(plan, at), at, size) for at, size in ((40, 50), (90, 70))))
    assert first.samples == before[40:90] and second.samples == before[90:]
    assert first.validation == second.validation == held_out
    assert first.record["order"] == "megatron" and first.record["segments"][0]["shuffled"] == count
    (rest,) = read((data_plan(prefixes, **{"trainer.steps": 30, **VALIDATE}), first.record, 90, 150))
    assert rest.samples[:70] == before[90:] and rest.validation == held_out
    assert rest.record["order"] == "epochs" and [s["first"] for s in rest.record["segments"]] == [0, count]
    # Then each dataset continues in the new order, at its position, up to the sample by which blends differ; without
    # weights, tokens and whole sequences are shares that differ by a sample an epoch.
    of_each = read(*((data_plan([prefix]), None, 0, 240) for prefix in sets[:2]))
    stood = rest.record["segments"][1]["starts"]
    for number, prefix in enumerate(sets[: 1 if kind == "one" else 2]):
        assert abs(stood[prefix] - sum(sample[0] // 5000 == number for sample in before)) <= (
            4 if kind == "unweighted" else 1
        )
        of_this = [sample for sample in rest.samples[70:] if sample[0] // 5000 == number]
        assert of_this == of_each[number].samples[stood[prefix] : stood[prefix] + len(of_this)]


def test_a_longer_run_in_megatrons_order_begins_with_the_same_samples(sets: list[str]) -> None:
    plan, longer = (data_plan([0.25, sets[0], 0.75, sets[1]], **{"trainer.steps": steps}) for steps in (20, 50))
    record, unweighted = megatron_record(plan, 90), data_plan(sets)
    resumed, same = read((longer, record, 90, 70), (plan, record, 90, 70))
    assert resumed.samples == same.samples
    assert differences(record, make_record(longer)) == []
    assert differences(megatron_record(unweighted, 8), make_record(unweighted)) == []


def test_a_pickle_in_megatrons_index_files_is_rejected(tmp_path: Path) -> None:
    """The files are next to the dataset, which another user may have written; numpy would read a pickle as an array."""
    prefixes = [write_indexed(tmp_path / name, [list(range(1, 40))] * 8) for name in ("a", "b")]
    plan = data_plan(prefixes, **{"data.seq_length": 16, "data.split": "1,0,0"})
    messages = run_ranks(_build_with_pickles, 1, plan, tmp_path / "index_cache")[0]
    assert len(messages) == 2 * 3 + 2, "three for each dataset, two for the blend"
    assert all("pickled" in message for message in messages), messages


def _build_with_pickles(rank: int, plan: Plan, cache: Path) -> list[str]:
    """Return the errors when each of the files is a pickle."""
    build_megatron(plan, 16, 0)
    messages = []
    for file in sorted(cache.glob("*.npy")):
        content = file.read_bytes()
        file.write_bytes(pickle.dumps([1, 2]))
        with pytest.raises(ConfigError) as caught:
            build_megatron(plan, 16, 0)
        messages.append(str(caught.value))
        file.write_bytes(content)
    return messages


def test_a_dataset_that_was_moved_is_the_same(sets: list[str], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    plan = data_plan([0.5, sets[0], 0.5, sets[1]])
    whole, begun = read((plan, None, 0, 100), (plan, None, 0, 60))
    for suffix in (".bin", ".idx"):
        shutil.move(sets[0] + suffix, tmp_path / "elsewhere" / ("z" + suffix))
    moved = str(tmp_path / "elsewhere" / "z")
    after = data_plan([0.5, moved, 0.5, sets[1]])
    assert differences(begun.record, make_record(after)) == [("data.prefixes", sets[0], moved, "moved")]
    (rest,) = read((after, begun.record, 60, 40))
    assert rest.samples == whole.samples[60:] and len(rest.record["segments"]) == 1


def test_kinds_of_differences(sets: list[str], tmp_path: Path) -> None:
    a, b, c = sets
    blend: list[Any] = [0.5, a, 0.5, b]
    record = make_record(data_plan(blend))

    def reported(prefixes: list[Any] = blend, **changes: Any) -> list[tuple[str, str]]:
        actual = differences(record, make_record(data_plan(prefixes, **changes)))
        assert all(saved != now for _, saved, now, _ in actual)
        return [(name, kind) for name, _, _, kind in actual]

    assert reported() == reported([1, b, 1, a]) == []
    assert reported([0.5, a, 0.5, c]) == reported([0.4, a, 0.5, b]) == reported([a]) == [("data.prefixes", "blend")]
    assert reported(**{"data.split": "1,1,0"}) == [("data.split", "reading")]
    seed_and_length: Changes = {"trainer.seed": 3, "data.seq_length": 16}
    assert reported(**seed_and_length) == [("trainer.seed", "reading"), ("data.seq_length", "reading")]
    assert reported(**{"data.schedule": [{"samples": 9, "prefixes": [c]}]}) == [], "it has not begun"
    record["consumed_samples"] = 9
    assert reported(**{"data.schedule": [{"samples": 9, "prefixes": [c]}]}) == [("data.prefixes", "blend")]
    write_indexed(Path(b), numbered(26, 5001))  # a document was added
    assert reported() == [("data.prefixes", "content")]
    documents = numbered(26, 5001)
    documents[3], documents[4] = documents[4], documents[3]
    write_indexed(Path(b), documents)
    record = make_record(data_plan(blend))
    write_indexed(Path(b), numbered(26, 5001))  # equal numbers of tokens and documents
    assert reported() == [("data.prefixes", "content")]
    record = make_record(data_plan(blend, **{"data.validation_prefixes": [c]}))
    write_indexed(Path(c), numbered(9, 1))
    assert reported(**{"data.validation_prefixes": [c]}) == [("data.validation_prefixes", "content")]


def test_one_changed_token_between_the_sampled_ends_is_another_dataset(tmp_path: Path) -> None:
    """A record of an older version has only the hash of the ends, and still resumes."""
    tokens = [[1 + number % 50 for number in range(4000)] for _ in range(400)]  # 3 MiB
    prefix = write_indexed(tmp_path / "set", tokens)
    record = make_record(data_plan([prefix]))
    old = {**record, "datasets": {prefix: {k: v for k, v in record["datasets"][prefix].items() if k != "content"}}}
    assert differences(record, make_record(data_plan([prefix]))) == []
    tokens[200][2000] += 1
    write_indexed(Path(prefix), tokens)
    now = make_record(data_plan([prefix]))
    assert [(name, kind) for name, _, _, kind in differences(record, now)] == [("data.prefixes", "content")]
    assert differences(old, now) == []
