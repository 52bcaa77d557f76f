"""analyze.py: metric values, and byte-identical files for any split of the work and after kills."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_prep import analyze
from megatron_llama.corpus.difficulty_index import MANIFEST, open_difficulty_index
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import locked_folder
from tests.data.files import numbered, write_indexed

LENGTH = 16
DOCUMENTS = [[1 + (token * token) % 997 for token in document] for document in numbered(60)]
TEXT = [token for document in DOCUMENTS for token in document]
HOLD = "HOLD_ANALYSIS"


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyze, "SHARD_TOKENS", 10 * LENGTH)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_indexed(tmp_path / "a", DOCUMENTS)


def held(ids: np.ndarray) -> float:
    """A metric that blocks at sample 50 while HOLD is set in the environment."""
    if HOLD in os.environ and np.array_equal(ids, TEXT[50 * LENGTH : 51 * LENGTH + 1]):
        signal.pause()
    return float(ids.sum())


def measure(prefix: str, metric: str, *more: str) -> None:
    assert analyze.main([prefix, "--metric", metric, "--seq-length", str(LENGTH), "--workers", "1", *more]) == 0


def written(prefix: str, name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(f"{prefix}_metrics/{name}-{LENGTH}").iterdir()}


def test_values_match_definitions(prefix: str) -> None:
    for metric in ("vocab_rarity", "length", "tests.data_prep.test_analyze.held"):
        measure(prefix, metric)
    count = (len(TEXT) - 1) // LENGTH
    units = [TEXT[unit * LENGTH : (unit + 1) * LENGTH + 1] for unit in range(count)]
    counts = Counter(TEXT[: count * LENGTH])
    rarities = [int(sum(-math.log(counts[id] / (count * LENGTH)) for id in unit)) for unit in units]
    owners = [len(document) for document in DOCUMENTS for _ in document]
    lengths = [float(np.mean(owners[unit * LENGTH : (unit + 1) * LENGTH + 1])) for unit in range(count)]
    for name, values in (("vocab_rarity", rarities), ("length", lengths), ("held", list(map(sum, units)))):
        measured = open_difficulty_index(Path(f"{prefix}_metrics/{name}-{LENGTH}"), prefix)
        np.testing.assert_allclose(measured.values, values, rtol=1e-12)
        assert measured.order.tolist() == sorted(range(count), key=lambda unit: (measured.values[unit], unit))
        assert measured.ranks[measured.order].tolist() == list(range(count))


def test_workers_and_parts_give_identical_files(prefix: str, tmp_path: Path) -> None:
    measure(prefix, "vocab_rarity")
    whole = written(prefix, "vocab_rarity")
    assert set(whole) == {"values.npy", "order.npy", "index.json"}
    output = tmp_path / "elsewhere"
    measure(prefix, "vocab_rarity", "--workers", "3", "--output", str(output))
    shared = Path(output / "a_metrics" / f"vocab_rarity-{LENGTH}")
    assert {path.name: path.read_bytes() for path in shared.iterdir()} == whole
    # Each part runs twice, in any order: counts, then values.
    other = write_indexed(tmp_path / "b", DOCUMENTS)
    for part in ("3/3", "1/3", "2/3", "1/3", "3/3"):
        measure(other, "vocab_rarity", "--part", part)
    assert written(other, "vocab_rarity") == whole


def test_resumed_analysis_is_identical(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metric = "tests.data_prep.test_analyze.held"
    other = write_indexed(tmp_path / "b", DOCUMENTS)
    measure(other, metric)
    monkeypatch.setenv(HOLD, "1")
    child = multiprocessing.get_context("fork").Process(target=measure, args=(prefix, metric))
    child.start()
    work = Path(f"{prefix}_metrics/held-{LENGTH}/.partial")
    deadline = time.monotonic() + 120
    while len(done := sorted(work.glob("values-*.npy"))) < 5 and time.monotonic() < deadline and child.is_alive():
        time.sleep(0.01)
    child.kill()
    child.join()
    assert len(done) == 5 and not (work.parent / "index.json").exists()
    with pytest.raises(UserError, match="there is no index"):
        open_difficulty_index(work.parent, prefix)
    monkeypatch.delenv(HOLD)
    inodes = [path.stat().st_ino for path in done]
    assert [path.stat().st_ino for path in sorted(work.glob("values-*.npy"))[:5]] == inodes
    (work / done[0].name).write_bytes(b"")  # after a power failure, incomplete files must be detected
    with pytest.raises((ValueError, EOFError, OSError)):
        measure(prefix, metric)
    done[0].unlink()
    measure(prefix, metric)
    assert written(prefix, "held") == written(other, "held")


def test_other_analysis_needs_overwrite(prefix: str) -> None:
    measure(prefix, "length")
    before = written(prefix, "length")
    measure(prefix, "length")  # already complete
    with pytest.raises(UserError, match="--overwrite"):
        measure(prefix, "tests.data_prep.test_analyze.held", "--name", "length")
    write_indexed(Path(prefix), DOCUMENTS[1:])
    with pytest.raises(UserError, match="another version of"):
        measure(prefix, "length")
    assert written(prefix, "length") == before
    measure(prefix, "length", "--overwrite")
    assert written(prefix, "length") != before


def test_overwrite_waits_for_running_parts(prefix: str) -> None:
    measure(prefix, "length")
    before = written(prefix, "length")
    write_indexed(Path(prefix), DOCUMENTS[1:])
    folder = Path(f"{prefix}_metrics/length-{LENGTH}")
    with locked_folder(folder, shared=True), pytest.raises(UserError, match="another process"):
        measure(prefix, "length", "--overwrite")
    assert written(prefix, "length") == before
    write_indexed(Path(prefix), DOCUMENTS)
    (folder / MANIFEST).unlink()
    with locked_folder(folder), pytest.raises(UserError, match="another process"):
        measure(prefix, "length")
