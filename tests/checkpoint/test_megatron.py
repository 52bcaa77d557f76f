"""Megatron's checkpoints, written by megatron-core: logits, moments, the position in the data, and the next losses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from megatron_llama.checkpoint.foreign import megatron
from megatron_llama.checkpoint.foreign.describe import describe
from megatron_llama.checkpoint.foreign.detect import open_foreign
from megatron_llama.checkpoint.tensor_source import CorruptFile
from megatron_llama.config import ConfigError
from megatron_llama.plan import Plan
from tests.checkpoint.megatron_source import SETTINGS, Source, Trained, train_source
from tests.checkpoint.runner import assert_same, make_plan, run
from tests.checkpoint.source_settings import LAYOUTS, VOCAB, check_initial_weights
from tests.data.files import write_indexed
from tests.messages import raises_with_message, unwrap
from tests.ranks import RankFailed

pytest.importorskip("transformers", reason="transformers is a dev dependency: the oracle of the logits")

SOURCES = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2 pp2": (2, 2)}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def _run_on(folder: Path, source: Trained, dataset: Path, tmp_path: Path) -> Any:
    """Continue for five steps in two layouts, compare with the source's losses, and return the run of one process."""
    runs = {}
    for name in ("one", "tp2 pp2"):
        world, layout = LAYOUTS[name]
        settings = (*SETTINGS, *_data(dataset), *layout, f"checkpoint.resume={folder}")
        runs[name] = run(world, tmp_path / name, *settings, until=8)
        assert runs[name].started_at == 3 and runs[name].updates == 8
        assert [*runs[name].losses.values()] == pytest.approx(source.losses, abs=1e-4), name
    return runs["one"]


def test_a_run_continues_in_megatrons_order(trained: tuple[Path, Trained], dataset: Path, tmp_path: Path) -> None:
    folder, source = trained
    first = _run_on(folder, source, dataset, tmp_path)
    resumed = run(1, tmp_path / "one", *SETTINGS, *_data(dataset), until=8)
    assert resumed.started_at == 8
    assert_same(resumed.tensors, first.tensors)


@pytest.mark.parametrize(("tp", "dp"), [(2, 2), pytest.param(1, 1, marks=pytest.mark.slow)], ids=["tp2 dp2", "tp1"])
def test_the_distributed_optimizer(tp: int, dp: int, dataset: Path, tmp_path: Path) -> None:
    """megatron-core's DistributedOptimizer, with moments by tensor: the next five losses are the source's."""
    folder = tmp_path / "source"
    plan = _plan(dataset, tmp_path / "plan")
    source = train_source(Source(tp, 1, folder, plan=plan, dp=dp, sharding="fully_reshardable"))
    _run_on(folder, source, dataset, tmp_path)


def test_moments_by_buffers_are_rejected(dataset: Path, tmp_path: Path) -> None:
    """dp_reshardable: the weights load, and the error names the option that stores moments by tensor."""
    folder = tmp_path / "source"
    source = train_source(Source(2, 1, folder, further=0, dp=2, sharding="dp_reshardable"))
    check_initial_weights(folder, source.logits, tmp_path, layouts=["one"])
    with raises_with_message(RankFailed, r"by buffers \(dp_reshardable\).*--dist-ckpt-optim-fully-reshardable"):
        run(1, tmp_path / "resumed", *SETTINGS, f"checkpoint.resume={folder}", until=4)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    """Megatron's older files of four ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, train_source(Source(2, 2, folder, further=0, files="ranks"))


def test_older_files_of_ranks(ranks: tuple[Path, Trained], tmp_path: Path) -> None:
    """Their weights load; they are not resumed."""
    folder, source = ranks
    check_initial_weights(folder, source.logits, tmp_path, layouts=["one", "tp2 pp2"])
    description = describe(folder)
    assert dict(description.rows)["weights"].endswith("in 4 files")
    assert "Adam's moments" in "; ".join(description.missing)
    with raises_with_message(ConfigError, "which is read for its weights only"):
        make_plan(1, tmp_path / "resumed", *SETTINGS, f"checkpoint.resume={folder}")


def test_malicious_arguments_are_rejected(ranks: tuple[Path, Trained], tmp_path: Path) -> None:
    """Namespaces and Megatron's enums are loaded, functions are not."""
    copy = Path(shutil.copytree(ranks[0], tmp_path / "copy"))
    path = copy / "iter_0000003" / "mp_rank_01_001" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    content["args"].attention_backend = AttnBackend.flash
    torch.save(content, path)
    run(1, tmp_path / "enum", f"init_from={copy}", "trainer.steps=0")
    content["args"].hook = print
    torch.save(content, path)
    model = make_plan(1, tmp_path / "plan").model
    with raises_with_message(CorruptFile, "model_optim_rng.pt: is rejected: it contains .*print"):
        open_foreign(copy, model)
    path.unlink()
    with raises_with_message(CorruptFile, "has no file of tensor-parallel rank 1, stage 1"):
        open_foreign(copy, model)


def test_oddparameter_groups_are_no_groups() -> None:
    group = {"lr": 0.1}
    for content in ({"param_groups": 3}, {"param_groups": {"lr": 1}}, [{"param_groups": ["x"]}]):
        assert list(megatron.parameter_groups([content, {"optimizer": {"param_groups": [group]}}])) == [group]


def test_layouts_of_bridge_and_nemo(trained: tuple[Path, Trained], tmp_path: Path) -> None:
    """Megatron-Bridge adds run_config.yaml and train_state.pt; NeMo 2 has weights/ and context/."""
    (iteration,) = trained[0].glob("iter_*")
    bridge = Path(shutil.copytree(trained[0], tmp_path / "bridge"))
    common = torch.load(bridge / iteration.name / "common.pt", weights_only=False)
    samples = common.pop("args").consumed_train_samples
    torch.save(common, bridge / iteration.name / "common.pt")
    state = {"step": torch.tensor(3), "consumed_train_samples": torch.tensor(samples)}
    torch.save(state, bridge / iteration.name / "train_state.pt")
    settings = "{model: {num_layers: 4, rotary_base: 10000}, train: {train_iters: 150, global_batch_size: 8}"
    settings += ", dataset: {random_seed: 5, sequence_length: 16, split: '969,30,1'}}"
    (bridge / iteration.name / "run_config.yaml").write_text(settings)
    nemo = tmp_path / "nemo"
    shutil.copytree(iteration, nemo / "weights")
    (nemo / "context").mkdir()
    model = make_plan(1, tmp_path / "plan").model
    assert not describe(trained[0]).missing
    assert not describe(bridge).missing
    foreign = open_foreign(bridge, model, resumes=True)
    assert (foreign.step, foreign.samples, foreign.shuffled, foreign.has_moments) == (3, samples, 1200, True)
    assert (foreign.facts["trainer.seed"], foreign.facts["data.seq_length"]) == (5, 16)
    name = "model.layers.3.self_attn.k_proj.weight"
    assert torch.equal(open_foreign(nemo, model).tensors.rows(name), foreign.tensors.rows(name))


def test_other_settings_are_rejected(trained: tuple[Path, Trained], dataset: Path, tmp_path: Path) -> None:
    """The arguments in the checkpoint are compared with the config; checkpoint.allow accepts differences."""
    resume = (*SETTINGS, *_data(dataset), f"checkpoint.resume={trained[0]}")
    with pytest.raises(RankFailed) as caught:
        run(1, tmp_path / "run", *resume, "trainer.seed=6", "optim.eps=1e-7", until=4)
    message = unwrap(str(caught.value))
    assert "trainer.seed" in message and "optim.eps" in message
    with raises_with_message(RankFailed, "model.rope_theta.*was trained with 10000"):
        run(1, tmp_path / "run", *resume, "model.rope_theta=20000.0", until=4)
    assert run(1, tmp_path / "run", *resume, "trainer.seed=6", "checkpoint.allow=[data]", until=4).started_at == 3
