"""Megatron's checkpoints, written by megatron-core: logits, moments, the position in the data, and the next losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_llama.plan import Plan
from tests.checkpoint.megatron_source import SETTINGS, TOKENS, VOCAB, Source, Trained, train_source
from tests.checkpoint.runner import Run, assert_same, make_plan, run
from tests.data.files import write_indexed
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is a dev dependency: the oracle of the logits")

LAYOUTS = {
    "one": (1, ()),
    "tp2": (2, ("trainer.tp=2",)),
    "pp2": (2, ("trainer.pp=2",)),
    "zero 3": (2, ("trainer.dp=2", "trainer.zero=3")),
    "tp2 pp2": (4, ("trainer.tp=2", "trainer.pp=2")),
}
SOURCES = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2 pp2": (2, 2)}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of random documents."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(5, 60, (200,), generator=generator).tolist()
    folder = tmp_path_factory.mktemp("data")
    write_indexed(folder / "a", [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in sizes])
    return folder / "a"


def _data(dataset: Path) -> tuple[str, ...]:
    cache = f"data.cache_dir={dataset.parent}/cache"
    return ("data.mock=false", f"data.prefixes=[{dataset}]", cache, "data.split='969,30,1'")


def _plan(dataset: Path, run_dir: Path) -> Plan:
    return make_plan(1, run_dir, *SETTINGS, *_data(dataset))


@pytest.fixture(
    scope="module",
    params=[name if name == "tp2 pp2" else pytest.param(name, marks=pytest.mark.slow) for name in SOURCES],
)
def trained(
    request: pytest.FixtureRequest, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Trained]:
    """A source's checkpoint, and its continuation."""
    folder = tmp_path_factory.mktemp("source")
    tp, pp = SOURCES[request.param]
    return folder, train_source(Source(tp, pp, folder, plan=_plan(dataset, folder / "plan")))


def _logits(rank: int, run_result: Run) -> torch.Tensor:
    """Transformers' logits of the weights that we loaded."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    weights = {name: values for name, values in run_result.tensors.items() if "/" not in name}
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(TOKENS).logits


def test_a_run_continues_in_megatrons_order(trained: tuple[Path, Trained], dataset: Path, tmp_path: Path) -> None:
    """The next five losses are the source's: weights, moments, steps and samples are its own."""
    folder, source = trained
    first = None
    for name in ("one", "zero 3", "tp2 pp2"):
        world, layout = LAYOUTS[name]
        settings = (*SETTINGS, *_data(dataset), *layout, f"checkpoint.resume={folder}")
        ours = run(world, tmp_path / name, *settings, until=8)
        assert ours.started_at == 3 and ours.updates == 8
        assert [*ours.losses.values()] == pytest.approx(source.losses, abs=1e-4), name
        first = first or ours
    # The run's own checkpoint continues in the same order.
    again = run(1, tmp_path / "one", *SETTINGS, *_data(dataset), until=8)
    assert again.started_at == 8
    assert first is not None
    assert_same(again.tensors, first.tensors)


def test_logits_in_four_layouts(trained: tuple[Path, Trained], tmp_path: Path) -> None:
    folder, source = trained
    loaded = {
        name: run(LAYOUTS[name][0], tmp_path / name, *LAYOUTS[name][1], f"init_from={folder}", "trainer.steps=0")
        for name in ("one", "pp2", "zero 3", "tp2 pp2")
    }
    (logits,) = run_ranks(_logits, 1, loaded["one"])
    torch.testing.assert_close(logits, source.logits, rtol=0, atol=1e-5)
    for result in loaded.values():
        assert_same(result.tensors, loaded["one"].tensors)
