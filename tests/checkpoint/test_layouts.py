"""Save in layout A, load in layout B: weights and optimizer moments are bit-identical."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.manifest import read_manifest
from tests.checkpoint.runner import Run, assert_same, run
from tests.ranks import RankFailed
from tests.rows import rows

# name: ranks, overrides. All can hold each of the models below.
LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["trainer.tp=2"]),
    "pp2": (2, ["trainer.pp=2"]),
    "pp2, uneven": (2, ["trainer.pp=2", "trainer.pipeline_layers=[3,1]"]),
    "vpp": (2, ["trainer.pp=2", "trainer.vpp=2"]),
    "dp2, zero 0": (2, ["trainer.zero=0"]),
    "dp2, zero 1": (2, ["trainer.zero=1"]),
    "dp2, zero 2": (2, ["trainer.zero=2"]),
    "dp2, zero 3": (2, ["trainer.zero=3"]),
    "tp2·pp2": (4, ["trainer.tp=2", "trainer.pp=2"]),
    "tp4, kv heads < tp": (4, ["trainer.tp=4"]),
    "dp4, hybrid": (4, ["trainer.zero=3", "trainer.shard_group=2"]),
    "cp2·dp2, zero 3": (4, ["trainer.cp=2", "trainer.zero=3"]),
    "tp2·dp2, zero 3": (4, ["trainer.tp=2", "trainer.zero=3"]),
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MODELS = {"odd vocabulary": ["model.vocab_size=61"], "tied": ["model.tie_word_embeddings=true"]}
NAMES = list(LAYOUTS)
# The stored content does not depend on the layout: it is enough that each layout writes and each layout reads.
STEPS_BETWEEN = {"odd vocabulary": 5, "tied": 4}
PAIRS = {
    f"{model}: {saved} to {other}": (model, saved, other)
    for model, between in STEPS_BETWEEN.items()
    for index, saved in enumerate(NAMES)
    for other in [NAMES[(index + between) % len(NAMES)]]
    if model != "tied" or index % 3 == 1
}


Saved = Callable[[str, str], tuple[Path, Run]]
"""The folder and the result of a run, by the names of its model and layout."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Two steps of training in a layout, saved; made once each."""

    @cache
    def make(model: str, layout: str) -> tuple[Path, Run]:
        folder = tmp_path_factory.mktemp("run")
        ranks, overrides = LAYOUTS[layout]
        return folder, run(ranks, folder, *overrides, *MODELS[model], until=2)

    return make


@pytest.mark.parametrize(("model", "layout", "other"), rows(PAIRS.items(), list(PAIRS)[1::3]))
def test_any_layout_loads_into_any(saved: Saved, tmp_path: Path, model: str, layout: str, other: str) -> None:
    folder, before = saved(model, layout)
    ranks, overrides = LAYOUTS[other]
    checkpoint = f"checkpoint.resume={folder}/checkpoints/step_00000002"
    after = run(ranks, tmp_path, *overrides, *MODELS[model], checkpoint, "checkpoint.save_last=false")
    assert after.started_at == 2 and after.updates == 2
    assert after.lr == before.lr
    assert_same(after.tensors, before.tensors)


def test_a_run_resumes_with_other_context_parallel_sizes(tmp_path: Path) -> None:
    losses = run(1, tmp_path / "one", until=3).losses
    resumed: dict[int, float] = {}
    for until, ranks, overrides in (
        (1, 2, ["trainer.cp=2"]),
        (2, 2, ["trainer.cp=2", "trainer.cp_comm=ulysses"]),
        (3, 1, []),
    ):
        resumed |= run(ranks, tmp_path / "many", *overrides, until=until).losses
    assert [*resumed.values()] == pytest.approx([*losses.values()], rel=1e-6) and resumed.keys() == losses.keys()


def test_files_have_hugging_face_names_and_each_value_once(saved: Saved) -> None:
    folder, before = saved("odd vocabulary", "tp4, kv heads < tp")
    stored = read_manifest(folder / "checkpoints" / "step_00000002").stored
    assert stored.tensors["lm_head.weight"].shape == (61, 32)  # without the rows that pad it
    for name, tensor in before.tensors.items():
        kind, _, bare = name.rpartition("/")
        assert torch.equal(stored.rows(f"optimizer.{kind}.{bare}" if kind else name), tensor)
    for layout in ("dp2, zero 0", "tp4, kv heads < tp", "dp4, hybrid"):
        folder, before = saved("odd vocabulary", layout)
        manifest = read_manifest(folder / "checkpoints" / "step_00000002")
        values = sum(tensor.numel() for tensor in before.tensors.values())
        random = sum(t.shape[0] for name, t in manifest.stored.tensors.items() if name.startswith("random."))
        heads = sum(int.from_bytes((manifest.stored.folder / f).read_bytes()[:8], "little") + 8 for f in manifest.files)
        assert sum(manifest.files.values()) - heads - random == 4 * values


def _count_everything(checkpointer: Checkpointer) -> None:
    for shard in checkpointer.model.shards:
        shard.is_primary_replica = True


def test_a_value_written_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="has values of .* at .* twice"):
        run(2, tmp_path, "trainer.zero=0", until=1, tamper=_count_everything)
    assert list((tmp_path / "checkpoints").iterdir()) == []
