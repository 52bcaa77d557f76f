"""The plan states the same samples and epochs per dataset as the sample stream reads; its hash is of all bytes."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.corpus import content_hash as module
from megatron_llama.corpus.content_hash import content_hash, file_hash
from megatron_llama.corpus.indexed_format import dataset_facts
from megatron_llama.corpus.splits import planned_timeline, split_range
from megatron_llama.plan import Plan, format_plan, resolve
from tests.config.helpers import make
from tests.data.files import data_plan, numbered, write_indexed

FEW_EPOCHS = {"trainer.steps": 10}


@pytest.fixture
def sets(tmp_path: Path) -> tuple[str, str]:
    small, large = (write_indexed(tmp_path / name, numbered(size)) for name, size in (("small", 50), ("large", 500)))
    return small, large


def page_rows(plan: Plan) -> list[list[str]]:
    """The cells of the plan's table of datasets."""
    lines = format_plan(plan).splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith("  dataset")]
    end = next(number for number in range(start, len(lines) + 1) if number == len(lines) or not lines[number])
    assert max(map(len, lines[start:end])) < 80
    return [re.split(" {2,}", line.strip()) for line in lines[start + 2 : end]]


def test_a_blend(sets: tuple[str, str]) -> None:
    small, large = sets
    schedule = [{"samples": 300, "prefixes": [large]}, {"samples": 10_000, "prefixes": [small]}]
    plan = data_plan([0.25, small, 0.75, large], **{"trainer.steps": 60, "data.schedule": schedule})
    total, timeline = 60 * 8, planned_timeline(plan.config.data)
    counted = Counter(timeline.at(number)[0] for number in range(total))
    tokens = {
        prefix: sum(map(len, numbered(count)[: count * 8 // 10])) for prefix, count in ((small, 50), (large, 500))
    }
    for reading in plan.dataset_usage:
        assert reading.read == counted[reading.prefix]
        assert reading.sequences == (tokens[reading.prefix] - 1) // 32
        assert reading.tokens == 32 * reading.sequences
        assert reading.epochs == reading.read / reading.sequences
        assert reading.share == reading.read / total
    assert sum(reading.read for reading in plan.dataset_usage) == total
    first, second = page_rows(plan)
    assert first[0].endswith("small") and second[0].endswith("large")
    assert first[1:] == ["37", "1.184 k", "15.6 %", "75", "2.4 k", "2.03"]


def test_datasets_without_weights_and_without_files(sets: tuple[str, str]) -> None:
    """A note states the weights by size; data that is missing has no row."""
    plan = data_plan(list(sets), **FEW_EPOCHS)
    assert [note for note in plan.notes if "no weights" in note] == [
        "data.prefixes has no weights: datasets are weighted by size, so that an epoch reads each sequence once"
    ]
    assert len({round(reading.epochs, 1) for reading in plan.dataset_usage}) == 1
    assert not data_plan([sets[0]], **FEW_EPOCHS).notes
    assert not data_plan([1, sets[0], 1, sets[1]], **FEW_EPOCHS).notes
    changes: dict[str, Any] = {"data.mock": False, "data.prefixes": ["nowhere/a", "nowhere/b"]}
    plan = resolve(make(**changes), 1, exists=lambda path: True)
    assert plan.dataset_usage == () and "epochs" not in format_plan(plan)
    assert resolve(make(), 1).dataset_usage == ()


def test_many_datasets_are_abbreviated(sets: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / ("long" * 20)).mkdir()
    many: list[Any] = []
    for number in range(30):
        many += [1, write_indexed(tmp_path / ("long" * 20) / f"set{number}", numbered(5))]
    plan = data_plan(many, **{"trainer.steps": 10**10})
    rows = page_rows(plan)
    assert len(rows) < 20 and rows[-2] == ["…"]
    assert [row[0] for row in (rows[0], rows[-1])] == ["…set0", "…set29"]
    assert rows[0][-3:] == ["2.667 B", "85.33 B", "889 M"]
    (note,) = [note for note in plan.notes if "epochs" in note]
    assert note.startswith("more than 4 epochs of set0 (888,888,889.0), set1 (") and ") and 27 more: " in note


def test_fine_tuning_sets_are_read_equally_often(sets: tuple[str, str]) -> None:
    changes: dict[str, Any] = {"data.kind": "sft", "trainer.steps": 100}
    for prefix in sets:
        masks = [[1] * len(document) for document in numbered(50 if prefix.endswith("small") else 500)]
        write_indexed(Path(prefix + "_mask"), masks, "B")
    plan = data_plan(list(sets), **changes)
    small, large = plan.dataset_usage
    assert (small.sequences, large.sequences) == (40, 400)
    assert (small.read, large.read) == (73, 727) and small.epochs == pytest.approx(large.epochs, rel=0.01)
    assert small.tokens == sum(map(len, numbered(50)[:40]))
    page = format_plan(plan)
    assert "dataset (examples)" in page and max(map(len, page.splitlines())) < 80


@pytest.mark.parametrize("count", [1, 7, 10, 99, 1000, 12345])
@pytest.mark.parametrize("split", ["969,30,1", "1,1,0", "0.5,0.25,0.25", "80,20,0"])
def test_splits_are_rounded_as_megatron_does(split: str, count: int) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import convert_split_vector_to_split_matrix
    from megatron.core.datasets.utils import normalize

    matrix = convert_split_vector_to_split_matrix(normalize([float(share) for share in split.split(",")]))
    for number, part in enumerate(matrix):
        first, last = split_range(split, number, count)
        if part is not None and first != last:
            assert (first, last) == (round(part[0] * count), round(part[1] * count))


OLD = 1_000_000_000


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def age(path: Path, seconds: int = OLD) -> None:
    os.utime(path, (seconds, seconds))


def change_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (old,) = file.read(1)
        file.seek(offset)
        file.write(bytes([old ^ 1]))


def caches() -> list[Path]:
    return sorted((Path(os.environ["XDG_CACHE_HOME"]) / "megatron_llama" / "hashes").glob("*"))


@pytest.mark.parametrize("suffix", [".bin", ".idx", "_mask.bin", "_mask.idx"])
def test_every_byte_counts(tmp_path: Path, suffix: str) -> None:
    """In the middle too, with equal size and modification time, which a sample of the ends misses."""
    documents = [[1] * 5000 for _ in range(600)]
    prefix = write_indexed(tmp_path / "a", documents)
    write_indexed(tmp_path / "a_mask", [[1]], "B")
    path = Path(prefix + suffix)
    age(path)
    facts, hashes = dataset_facts(prefix), {content_hash(prefix)}
    for offset in {0, path.stat().st_size // 2, path.stat().st_size - 1}:
        change_byte(path, offset)
        age(path)
        hashes.add(content_hash(prefix))
        change_byte(path, offset)
    assert len(hashes) == (4 if path.stat().st_size > 1 else 2)
    if suffix == ".bin":
        change_byte(path, path.stat().st_size // 2)
        assert dataset_facts(prefix) == facts, "the sampled fingerprint misses this change"


def test_a_moved_copy_has_the_same_hash(tmp_path: Path) -> None:
    one = write_indexed(tmp_path / "one", numbered(30))
    other = write_indexed(tmp_path / "other", numbered(30))
    assert content_hash(one) == content_hash(other) != content_hash(write_indexed(tmp_path / "c", numbered(31)))


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(write_indexed(tmp_path / "a", numbered(30)) + ".bin")
    young = file_hash(path)
    assert not caches(), "a young file may change within the resolution of its time"
    age(path)
    assert file_hash(path) == young and len(caches()) == 1
    (cache,) = caches()
    assert json.loads(cache.read_text())["path"] == str(path)
    with monkeypatch.context() as patched:
        patched.setattr(module, "_hash_blocks", lambda *_: pytest.fail("the file is read again"))
        assert file_hash(path) == young
    change_byte(path, 7)
    age(path)  # size, inode and modification time are equal
    assert file_hash(path) != young


@pytest.mark.parametrize("harm", ["writable", "folder", "link", "bad digest", "not JSON", "a list"])
def test_a_cache_that_is_not_safe_is_not_used(tmp_path: Path, harm: str) -> None:
    path = Path(write_indexed(tmp_path / "a", numbered(30)) + ".bin")
    age(path)
    digest = file_hash(path)
    (cache,) = caches()
    forged = {**json.loads(cache.read_text()), "digest": "0" * 32}
    cache.write_text(json.dumps(forged))
    assert file_hash(path) == "0" * 32, "so a forged cache is noticed below"
    if harm == "writable":
        cache.chmod(0o666)
    elif harm == "folder":
        cache.parent.chmod(0o777)
    elif harm == "link":
        cache.rename(tmp_path / "elsewhere")
        cache.symlink_to(tmp_path / "elsewhere")
    else:
        text = {"bad digest": json.dumps({**forged, "digest": 5}), "not JSON": "{", "a list": "[]"}[harm]
        cache.write_text(text)
    assert file_hash(path) == digest


def test_without_a_writable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(write_indexed(tmp_path / "a", numbered(30)) + ".bin")
    age(path)
    digest = file_hash(path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert file_hash(path) == digest


def test_blocks_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 8)
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    whole = file_hash(path)
    monkeypatch.setattr(module, "THREADS", 1)
    assert file_hash(path) == whole
    assert module._blocks(100, 40) == [(0, 8), (23, 8), (46, 8), (69, 8), (92, 8)]
    assert [size for _, size in module._blocks(100, 100)] == [8] * 12 + [4]


def test_the_files_of_a_run_share_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small dataset has the same hash in each run. A part of a large one is compared with the same part only."""
    small, *large = (write_indexed(tmp_path / str(size), [[1] * 4000] * size) for size in (2, 50, 60))
    monkeypatch.setattr(module, "BLOCK", 1 << 12)
    monkeypatch.setattr(module, "WHOLE_BYTES", 1 << 19)
    read: list[list[tuple[int, int]]] = []
    monkeypatch.setattr(
        module, "_hash_blocks", lambda _, path, *sizes: read.append(module._blocks(*sizes)) or path.name
    )
    facts = module.content_facts([small, *large])
    assert 1 << 18 < sum(size for blocks in read for _, size in blocks) <= 1 << 19
    assert [*facts[small]] == ["content"] and [*facts[large[0]]] == [*facts[large[1]]] == ["content_0"]
    assert module.content_facts([small]) == {small: facts[small]}
    assert [*module.content_facts(large[:1])[large[0]]] == ["content"]
