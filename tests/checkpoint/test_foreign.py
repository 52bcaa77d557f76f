"""Checkpoints of torchtitan, accelerate and the Trainer: logits, moments, next losses, damage, and exports."""

from __future__ import annotations

import json
import pickle
import re
import resource
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing

from megatron_llama.arch.foreign_tensor_layouts import megatron_names
from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.foreign.describe import describe
from megatron_llama.checkpoint.foreign.detect import open_foreign, resumed_state
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.config import ConfigError, load_config
from megatron_llama.data.mock import MockDataset
from megatron_llama.plan import resolve
from megatron_llama.tools.compare.logs import first_common_loss
from scripts import inspect_checkpoint
from tests.checkpoint.megatron_source import Source, build_source, logits_of
from tests.checkpoint.runner import SMALL, Bomb, Run, make_plan, rejection, run
from tests.checkpoint.source_settings import (
    BATCH,
    LAYOUTS,
    LENGTH,
    UNTIED,
    VOCAB,
    check_initial_weights,
    logits_of_weights,
)
from tests.checkpoint.torch_sources import SETTINGS, Trained, titan_name, titan_rows, train_source
from tests.messages import raises_with_message, unwrap
from tests.paths import CONF
from tests.ranks import run_ranks

pytest.importorskip("transformers", reason="transformers is a dev dependency: the model of these sources")
pytest.importorskip("accelerate", reason="accelerate is a dev dependency: a writer of these sources")
KINDS = ("torchtitan", pytest.param("accelerate", marks=pytest.mark.slow), "trainer")


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    """A source's checkpoint, and its continuation on the mock samples of our run."""
    folder = tmp_path_factory.mktemp("source") / "run"
    samples = MockDataset(1000, LENGTH, VOCAB, seed=1234)
    rows = [torch.cat([samples[i]["tokens"], samples[i]["labels"][-1:]]) for i in range(5 * BATCH)]
    return folder, train_source(request.param, folder, [*torch.stack(rows).split(BATCH)])


@pytest.mark.parametrize("layouts", [("tp2 pp2",), pytest.param(("one", "zero 3", "pp2"), marks=pytest.mark.slow)])
def test_a_run_continues(trained: tuple[Path, Trained], layouts: tuple[str, ...], tmp_path: Path) -> None:
    """Weights, moments and steps are the source's. These formats have no position: the data starts at sample 0."""
    folder, source = trained
    for name in layouts:
        world, layout = LAYOUTS[name]
        ours = run(world, tmp_path / name, *SETTINGS, *layout, f"checkpoint.resume={folder}", until=8)
        assert ours.started_at == 3 and ours.updates == 8
        assert [*ours.losses.values()] == pytest.approx(source.losses, abs=1e-4), name


@pytest.mark.slow
def test_initial_weights(trained: tuple[Path, Trained], tmp_path: Path) -> None:
    folder, source = trained
    check_initial_weights(folder, source.logits, tmp_path, *SETTINGS)


@pytest.fixture
def copy(trained: tuple[Path, Trained], tmp_path: Path) -> Path:
    """A copy of a source's checkpoint, which a test damages."""
    return Path(shutil.copytree(trained[0], tmp_path / "copy"))


def _pickles(folder: Path) -> list[Path]:
    """Files that are read; training_args.bin and rng_state.pth are not."""
    files = [p for p in sorted(folder.rglob("*")) if p.suffix in (".pt", ".bin") or p.name == ".metadata"]
    return [path for path in files if path.name != "training_args.bin"]


def test_malicious_pickles_are_rejected(copy: Path, tmp_path: Path) -> None:
    """No file of any format can execute code, and the message names the file and the object."""
    model = make_plan(1, tmp_path, *SETTINGS).model
    for path in _pickles(copy):
        before, victim = path.read_bytes(), tmp_path / "executed"
        if path.name == ".metadata":
            path.write_bytes(pickle.dumps(Bomb(victim)))
        else:
            torch.save({"state": Bomb(victim)}, path)
        message = rejection(copy, model)
        assert path.name in message and "is rejected" in message, message
        assert not victim.exists()
        path.write_bytes(before)


def test_damaged_files_are_rejected(copy: Path, tmp_path: Path) -> None:
    model = make_plan(1, tmp_path, *SETTINGS).model
    files = [*_pickles(copy), *sorted(copy.rglob("*.distcp"))[:1], *copy.rglob("*.safetensors")]
    for path in files:
        before = path.read_bytes()
        path.write_bytes(before[: len(before) // 2])
        message = rejection(copy, model)
        assert path.name in message, message
        path.write_bytes(before)
    for path in copy.rglob("*.distcp"):
        path.unlink()
        assert "is missing" in rejection(copy, model)
        break


def test_another_model_is_rejected(copy: Path, tmp_path: Path) -> None:
    for setting, words in (("model.hidden_size=64", "has shape"), ("model.num_hidden_layers=5", "are missing")):
        assert words in rejection(copy, make_plan(1, tmp_path, *SETTINGS, setting).model)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (("optim.name=muon",), "optim.name"),
        (("optim.name=onebit_adam", "trainer.zero=0"), "optim.name"),
        (("finetune.method=lora", "init_from=models/base"), "finetune.method"),
    ],
)
def test_missing_states(trained: tuple[Path, Trained], tmp_path: Path, settings: tuple[str, ...], field: str) -> None:
    config = load_config([*SMALL, *SETTINGS, f"run.dir={tmp_path}", *settings], CONF)
    plan = resolve(config, 1, exists=lambda path: True)
    foreign = open_foreign(trained[0], plan.model, resumes=True)
    with pytest.raises(ConfigError) as caught:
        resumed_state(plan, foreign, {"segments": []})
    assert caught.value.problems[0].field == field


def test_a_foreign_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty" in rejection(tmp_path / "empty", make_plan(1, tmp_path, *SETTINGS).model)


def test_missing_parts_are_described(copy: Path) -> None:
    for path in [*copy.rglob("optimizer.pt"), *copy.rglob("optimizer_0/.metadata")]:
        path.unlink()
        assert "Adam's moments" in "; ".join(describe(copy).missing)


def test_inspect_checkpoint(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    def inspect(path: Path) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["inspect_checkpoint", str(path)])
        status, printed = inspect_checkpoint.main(), capsys.readouterr()
        return status, printed.out + printed.err

    status, output = inspect(copy)
    assert status == 0 and re.search(r"step +3\n", output) and re.search(r"layers +4\n", output), output
    assert "39 tensors, 41,248 values of float32" in output and "Adam's moments of 39 of 39 tensors" in output
    assert output.count("moments") == 1 and "position in the data" in unwrap(output)
    assert all(len(line) <= 80 for line in output.splitlines() if str(copy) not in line)
    _pickles(copy)[0].write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    status, output = inspect(copy)
    assert status == 1 and "is rejected" in unwrap(output) and not (tmp_path / "executed").exists()
    assert inspect(tmp_path)[0] == 2


def test_the_first_loss_next_to_the_sources(tmp_path: Path) -> None:
    (tmp_path / "ours.jsonl").write_text('{"step": 4, "reduced_train_loss": 2.5}\n')
    theirs = {"log_history": [{"step": 3, "loss": 3.0}, {"step": 4, "loss": 2.25}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(theirs))
    assert first_common_loss(tmp_path / "ours.jsonl", tmp_path / "trainer_state.json") == (4, 2.5, 2.25)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A checkpoint of two ranks after a step."""
    folder = tmp_path_factory.mktemp("run")
    result = run(2, folder, "trainer.tp=2", UNTIED, until=1)
    return find_checkpoint(folder), result


def test_torch_loads_an_export_for_torchtitan(saved: tuple[Path, Run], tmp_path: Path) -> None:
    checkpoint, result = saved
    exported = export(checkpoint, tmp_path / "out", kind="dcp")
    weights = {name: values for name, values in result.tensors.items() if "/" not in name}
    expected = {titan_name(name): titan_rows(name, values) for name, values in weights.items()}
    state = {name: torch.zeros_like(values) for name, values in expected.items()}
    dcp.load(state, checkpoint_id=exported.folder, no_dist=True)
    for name, values in expected.items():
        assert torch.equal(state[name], values), name
    assert exported.bytes == sum(values.nbytes for values in weights.values())
    stored = open_foreign(exported.folder, make_plan(1, tmp_path / "plan", UNTIED).model).tensors
    for name, values in weights.items():
        assert torch.equal(stored.rows(name), values), name


def _load(rank: int, source: Source) -> torch.Tensor | None:
    """Load the export into megatron-core's model, and return the logits of this rank."""
    model = build_source(source)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict(prefix="")}, str(source.folder / "release"))
    model.load_state_dict(loaded["model"])
    return logits_of(model)


def test_megatron_core_loads_an_export(saved: tuple[Path, Run], tmp_path: Path) -> None:
    """Two tensor-parallel ranks of two stages load the folder that one process wrote."""
    checkpoint, result = saved
    export(checkpoint, tmp_path / "out", kind="torch_dist")
    parts = [part for part in run_ranks(_load, 4, Source(2, 2, tmp_path / "out")) if part is not None]
    (expected,) = run_ranks(logits_of_weights, 1, result.tensors)
    torch.testing.assert_close(torch.cat(parts, dim=-1), expected, rtol=0, atol=1e-5)


def test_a_full_disk_is_the_error_of_an_export(saved: tuple[Path, Run], tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ExitStack() as stack, pytest.raises(OSError, match="File too large"):
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        export(saved[0], tmp_path / "out", kind="dcp")
    assert list(tmp_path.iterdir()) == []


def test_refused_exports(saved: tuple[Path, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with raises_with_message(ConfigError, "exists and is not empty"):
        export(saved[0], tmp_path / "out", kind="dcp")
    model = make_plan(1, tmp_path, "model.model_type=olmo2").model
    with raises_with_message(ConfigError, "has no name in this format"):
        megatron_names(model)
    manifest = read_manifest(saved[0])
    monkeypatch.setattr("megatron_llama.checkpoint.export.read_manifest", lambda folder: manifest)
    for kind, section, changed, words in (
        ("dcp", "model", {"model_type": "olmo2"}, "writes torchtitan's Llama, and this model is a olmo2"),
        ("torch_dist", "finetune", {"method": "lora"}, "this format has no adapters"),
    ):
        manifest.state.settings[section] |= changed
        with raises_with_message(ConfigError, words):
            export(saved[0], tmp_path / "new", kind=kind)
