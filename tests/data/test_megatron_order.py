"""megatron-core's sample order: its index files cannot run code."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_llama.config import ConfigError
from megatron_llama.data.megatron_order import build_megatron
from megatron_llama.plan import Plan
from tests.data.files import data_plan, write_indexed
from tests.ranks import run_ranks


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.trace,)


def test_a_pickle_in_the_index_files_is_rejected(tmp_path: Path) -> None:
    """The files are next to the dataset, which another user may have written; numpy would read a pickle as an array."""
    prefixes = [write_indexed(tmp_path / name, [list(range(1, 40))] * 8) for name in ("a", "b")]
    plan = data_plan(prefixes, **{"data.seq_length": 16, "data.split": "1,0,0"})
    run_ranks(_build, 1, plan)
    files = sorted((tmp_path / "index_cache").glob("*.npy"))
    assert len(files) == 2 * 3 + 2, "three for each dataset, two for the blend"
    messages = run_ranks(_build_with_a_pickle, 1, plan, files, trace := tmp_path / "trace")[0]
    assert all("pickled" in message for message in messages) and not trace.exists(), messages


def _build(rank: int, plan: Plan) -> None:
    build_megatron(plan, 16, 0)


def _build_with_a_pickle(rank: int, plan: Plan, files: list[Path], trace: Path) -> list[str]:
    """Return the errors when each of the files is a pickle."""
    messages = []
    for file in files:
        content = file.read_bytes()
        file.write_bytes(pickle.dumps(Bomb(trace)))
        with pytest.raises(ConfigError) as caught:
            build_megatron(plan, 16, 0)
        messages.append(str(caught.value))
        file.write_bytes(content)
    return messages
