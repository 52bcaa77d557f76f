"""Corrupt and hostile folders: one clear message, the last good checkpoint is used, no code is run, and nothing is
written outside of the folder."""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_llama.checkpoint import saving
from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.folder import find_checkpoint, partial_folder, saved_steps
from megatron_llama.checkpoint.foreign.describe import describe
from megatron_llama.checkpoint.hf_folder import SafetensorsFiles, list_tensors, open_hf_folder
from megatron_llama.checkpoint.manifest import NAME, State, _checksum, merge, read_manifest
from megatron_llama.checkpoint.rank_files import STATES, save_part
from megatron_llama.checkpoint.tensor_source import CorruptFile, Rectangles
from megatron_llama.config import ConfigError, ModelConfig
from tests.checkpoint.runner import Bomb, Run, assert_same, flip, run
from tests.messages import raises_with_message
from tests.ranks import RankFailed

SHARD = "rank_00001.safetensors"
LAYOUT, NO_SAVE = ["trainer.tp=2"], "checkpoint.save_last=false"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Train a run with checkpoints of steps 1 and 2; return it with its result at step 1."""
    folder = tmp_path_factory.mktemp("trained")
    first = run(2, folder, *LAYOUT, until=1)
    run(2, folder, *LAYOUT, until=2)
    return folder, first


@pytest.fixture
def copy(trained: tuple[Path, Run], tmp_path: Path) -> Path:
    """A copy of that run to damage."""
    return Path(shutil.copytree(trained[0], tmp_path / "run", dirs_exist_ok=True))


def _truncate(folder: Path) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 5)


def _replace_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (_truncate, rf"{SHARD}: has \d+ of \d+ bytes"),
    "flipped": (lambda folder: flip(folder / SHARD), f"{SHARD}: wrong hash of .* from row "),
    "missing": (lambda folder: (folder / SHARD).unlink(), f"{SHARD}: No such file"),
    "manifest": (lambda folder: flip(folder / NAME, 600), f"{NAME}: "),
    "no_manifest": (lambda folder: (folder / NAME).unlink(), f"{NAME}: No such file"),
    "empty_manifest": (lambda folder: (folder / NAME).write_bytes(b""), f"{NAME}: not JSON"),
    "unreadable": (_replace_by_a_file, f"{NAME}: Not a directory"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_one_before_a_damaged_one_is_used(
    copy: Path, trained: tuple[Path, Run], name: str, capfd: pytest.CaptureFixture
) -> None:
    damage, message = DAMAGES[name]
    damage(copy / "checkpoints" / "step_00000002")
    ranks, layout = (2, LAYOUT) if name == "flipped" else (1, [])  # only rank 1 reads the flipped value
    after = run(ranks, copy, *layout, NO_SAVE)
    assert after.started_at == 1
    assert_same(after.tensors, trained[1].tensors)
    assert re.search(message, capfd.readouterr().err)


def test_a_damaged_checkpoint_is_replaced(copy: Path) -> None:
    _truncate(copy / "checkpoints" / "step_00000002")
    assert run(2, copy, *LAYOUT, until=2).started_at == 1
    assert run(1, copy, NO_SAVE).started_at == 2


def test_damage_that_only_another_layout_reads(copy: Path) -> None:
    flip(copy / "checkpoints" / "step_00000002" / SHARD, -6000)  # before the random state, which only two ranks read
    assert run(1, copy, NO_SAVE).started_at == 1
    assert run(2, copy, "trainer.pp=2", NO_SAVE).started_at == 1


def test_without_an_intact_one_a_run_does_not_start(copy: Path) -> None:
    for step in (1, 2):
        _truncate(copy / "checkpoints" / f"step_{step:08d}")
    with raises_with_message(CorruptFile, "bytes"):
        describe(copy)
    with raises_with_message(RankFailed, "ConfigError.*all checkpoints are damaged.*checkpoint.resume=never"):
        run(2, copy, *LAYOUT)
    assert saved_steps(copy / "checkpoints") == [2, 1]
    assert run(2, copy, *LAYOUT, "checkpoint.resume=never", NO_SAVE).started_at == 0


def test_verify_reads_every_byte(copy: Path) -> None:
    folder = copy / "checkpoints" / "step_00000002"
    manifest = read_manifest(folder)
    for file in manifest.files:
        manifest.stored.verify_file(file)
    for position in (-1, 3000):  # in the values, and in the head, which loading does not need
        flip(folder / SHARD, position)
        with pytest.raises(CorruptFile, match=SHARD):
            manifest.stored.verify_file(SHARD)
        flip(folder / SHARD, position)
    manifest.stored.verify_file(SHARD)


ALWAYS = 9
"""More failures than there are tries."""
FAILED_SAVES = {
    "tried again": ({(2, "write"): [errno.ENOSPC, errno.EIO], (3, "publish"): [errno.ESTALE]}, [4, 3, 2, 1], ""),
    "given up": ({(2, "write"): [errno.EACCES] * ALWAYS, (3, "publish"): [errno.EDQUOT] * ALWAYS}, [4, 1], ""),
    "in a row": ({(step, "write"): [errno.EFBIG] * ALWAYS for step in (2, 3, 4)}, [1], "rank 1: File too large"),
    "the last": ({(4, "publish"): [errno.ETIMEDOUT] * ALWAYS}, [3, 2, 1], "rank 0: Connection timed out"),
}


def _fail_saves(faults: dict[tuple[int, str], list[int]], checkpointer: Checkpointer) -> None:
    """Let rank 1's writing, or rank 0's publishing, fail with these numbers of errors."""
    saver, start = checkpointer.saver, saving.run_in_thread

    def run_with_faults(name: str, work: Callable[[], None]) -> Future[None]:
        assert saver._state is not None
        step = saver._state.step
        numbers = faults.get((step, "publish" if saver._publishing else "write"), [])

        def attempt() -> None:
            if numbers and saver.rank == (0 if saver._publishing else 1):
                half = partial_folder(saver.checkpoints, step) / "half"
                half.parent.mkdir(parents=True, exist_ok=True)
                half.touch()
                raise OSError(number := numbers.pop(), os.strerror(number))
            work()

        return start(name, attempt)

    saving.run_in_thread = run_with_faults


@pytest.mark.parametrize("name", FAILED_SAVES)
def test_a_failed_save(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run continues with whole checkpoints, or stops on all ranks with the cause."""
    faults, saved, cause = FAILED_SAVES[name]
    monkeypatch.setattr(saving, "_FIRST_DELAY", 1e-3)
    settings = ["checkpoint.every_steps=1", f"checkpoint.asynchronous={name != 'in a row'}"]
    settings += ["checkpoint.save_timeout_seconds=0.01"]
    with pytest.raises(RankFailed) if cause else nullcontext() as failed:
        run(2, tmp_path, *LAYOUT, *settings, until=4, tamper=partial(_fail_saves, faults))
    if failed is not None:
        assert str(failed.value).count("SaveFailed") >= 2 and cause in str(failed.value)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"latest", *(f"step_{step:08d}" for step in saved)}
    assert run(2, tmp_path, *LAYOUT, NO_SAVE).started_at == saved[0]


def test_the_fallback_folder_has_the_last_step(tmp_path: Path) -> None:
    other = tmp_path / "other"
    settings = ["checkpoint.every_steps=1", "checkpoint.save_timeout_seconds=0", "checkpoint.max_failed_saves=1"]
    faults = {(2, "write"): [errno.ENOSPC]}
    (other / "step_00000001").mkdir(parents=True)  # of another run
    with raises_with_message(RankFailed, rf"First move step 2: mv {other}/run-\w{{8}}/step_00000002 {tmp_path}/run"):
        tamper = partial(_fail_saves, faults)
        run(2, tmp_path / "run", *LAYOUT, *settings, f"checkpoint.fallback_dir={other}", until=3, tamper=tamper)
    (saved,) = other.glob("run-*")
    assert saved_steps(tmp_path / "run" / "checkpoints") == [1] == saved_steps(other) and saved_steps(saved) == [2]
    shutil.move(saved / "step_00000002", tmp_path / "run" / "checkpoints")
    (saved / ".step_00000003.partial").mkdir()  # of a killed save
    resumed = run(2, tmp_path / "run", *LAYOUT, NO_SAVE, f"checkpoint.fallback_dir={other}", until=3)
    assert resumed.started_at == 2 and [path.name for path in saved.iterdir()] == ["latest"]
    with raises_with_message(RankFailed, "checkpoint.fallback_dir.*cannot be written"):
        run(1, tmp_path / "new", "checkpoint.fallback_dir=/proc/x")
    assert resumed.losses == {3: run(2, tmp_path / "whole", *LAYOUT, NO_SAVE, until=3).losses[3]}


def test_a_pickle_is_never_read(copy: Path, tmp_path: Path) -> None:
    folder, trace = copy / "checkpoints" / "step_00000002", tmp_path / "trace"
    bomb = pickle.dumps(Bomb(trace))
    pickle.loads(bomb)
    assert trace.exists(), "the bomb works"
    trace.unlink()
    (folder / ".metadata").write_bytes(bomb)  # where torch's own reader would look
    (folder / "__0_0.distcp").write_bytes(bomb)
    assert run(1, copy, NO_SAVE).started_at == 2
    (folder / NAME).write_bytes(bomb)
    (folder / SHARD).write_bytes(bomb)
    assert run(1, copy, NO_SAVE).started_at == 1
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "pytorch_model.bin").write_bytes(bomb)
    with raises_with_message(ConfigError, "pickle"):
        open_hf_folder(hf, ModelConfig())
    (hf / "model.safetensors").write_bytes(bomb)
    with pytest.raises(CorruptFile):
        open_hf_folder(hf, ModelConfig())
    assert not trace.exists()


def test_a_kill_before_the_pointer_was_written(copy: Path) -> None:
    """Exports find the newest checkpoint; a resume writes ``latest``, as the run may have nothing more to save."""
    latest, newest = copy / "checkpoints" / "latest", copy / "checkpoints" / "step_00000002"
    latest.unlink()
    assert find_checkpoint(copy) == find_checkpoint(copy / "checkpoints") == newest
    latest.write_text("step_00000001\n")
    run(1, copy, NO_SAVE)
    assert find_checkpoint(copy) == newest
    shutil.rmtree(copy / "checkpoints")
    with raises_with_message(ConfigError, "is not a checkpoint"):
        find_checkpoint(copy)


def _write_body(folder: Path, body: dict[str, Any]) -> None:
    """Write a manifest with a correct checksum."""
    body = {key: value for key, value in body.items() if key != "checksum"}
    (folder / NAME).write_text(json.dumps({**body, "checksum": _checksum(body)}))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 7])
def test_no_name_leads_out_of_the_folder(copy: Path, tmp_path: Path, name: object) -> None:
    folder = copy / "checkpoints" / "step_00000002"
    text = (folder / NAME).read_text().replace(json.dumps(SHARD), json.dumps(name) if name != 7 else '"7/"')
    _write_body(folder, json.loads(text))
    with pytest.raises(CorruptFile, match="invalid file name"):
        read_manifest(folder)
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CorruptFile, match=r"model\.safetensors\.index\.json: has the invalid file name"):
        open_hf_folder(hf, ModelConfig())
    (copy / "checkpoints" / "latest").write_text(str(name))
    with pytest.raises(ConfigError):
        find_checkpoint(copy / "checkpoints" if name != 7 else tmp_path)


MANIFESTS: dict[str, Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], None]] = {
    "shape": lambda _, norm, chunk: norm.update(shape=[]),
    "scalar": lambda _, norm, chunk: norm.update(shape=[], chunks=[{**chunk, "offset": [], "size": []}]),
    "dtype": lambda _, norm, chunk: norm.update(dtype="F8"),
    "no hashes": lambda _, norm, chunk: chunk.update(hashes=[]),
    "short hash": lambda _, norm, chunk: chunk.update(hashes=["ab"]),
    "overlap": lambda _, norm, chunk: norm.update(chunks=[{**chunk, "offset": [n], "size": [16]} for n in (0, 1)]),
    **{
        f"{name} {value}": lambda body, *_, n=name, to=value: body["state"]["settings"]["data"].update({n: to})
        for name, value in (("seq_length", None), ("seq_length", "8"), ("tokenizer", 3))
    },
    **{
        f"settings {value}": lambda body, *_, to=value: body["state"].update(settings=to)
        for value in (None, [], "x", {"data": None}, {"model": 1}, {"finetune": []})
    },
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
def test_invalid_manifests_are_refused(trained: tuple[Path, Run], tmp_path: Path, change: Callable) -> None:
    """With a correct checksum: another program wrote the manifest."""
    body = json.loads((trained[0] / "checkpoints" / "step_00000002" / NAME).read_text())
    _write_body(tmp_path, body)
    read_manifest(tmp_path)
    change(body, body["tensors"][NORM], body["tensors"][NORM]["chunks"][0])
    _write_body(tmp_path, body)
    with pytest.raises(CorruptFile, match=NAME):
        read_manifest(tmp_path)


def test_a_planted_link_is_not_followed(copy: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    checkpoints = copy / "checkpoints"
    for name in (".step_00000003.partial", ".step_00000001.removed", "step_00000003"):
        (checkpoints / name).symlink_to(outside)
    run(2, copy, *LAYOUT, "checkpoint.keep=1", until=3)
    assert saved_steps(checkpoints) == [3] and not (checkpoints / "step_00000003").is_symlink()
    assert [path.name for path in outside.iterdir()] == ["precious"]


def _safetensors(path: Path, head: bytes, values: int = 24) -> Path:
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(values))
    return path


def _entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}


ENTRIES: list[object] = [
    _entry(data_offsets=[0, 2400]),
    _entry(data_offsets=[-24, 0]),
    _entry(data_offsets=[24, 48]),
    _entry(shape=[2, -3]),
    _entry(shape=[2, 3.5]),
    _entry(shape="23"),
    _entry(dtype=["F32"]),
    {"dtype": "F32"},
    [],
]
NOT_SAFETENSORS = [b"", b"1234567", (1 << 62).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"[]"]


def test_invalid_safetensors_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    assert list_tensors(_safetensors(path, json.dumps({"x": _entry()}).encode()))["x"].shape == (2, 3)
    for entry in ENTRIES:
        _safetensors(path, json.dumps({"x": entry}).encode())
        with pytest.raises(CorruptFile, match="f.safetensors"):
            list_tensors(path)
    for content in NOT_SAFETENSORS:
        path.write_bytes(content)
        with pytest.raises(CorruptFile, match="f.safetensors"):
            list_tensors(path)


@pytest.mark.parametrize("dtype", ["I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_dtypes_that_no_llama_has_are_rejected(tmp_path: Path, dtype: str) -> None:
    entry = {"dtype": dtype, "shape": [{"I64": 3, "I32": 6, "I16": 12}.get(dtype, 24)], "data_offsets": [0, 24]}
    head = json.dumps({"q.weight": entry, "k.weight": {**entry, "data_offsets": [24, 48]}}).encode()
    path = _safetensors(tmp_path / "f.safetensors", head, 48)
    with raises_with_message(ConfigError, rf"{path}.*weight has dtype {dtype}.*and 1 more"):
        list_tensors(path)


def _spoiled(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix with one such value, at [5, 1]."""
    matrix = torch.arange(24.0).reshape(8, 3).to(dtype)
    matrix[5, 1] = value
    return matrix


def _rows(first: int) -> Rectangles:
    """A target of four rows from ``first`` on."""
    return Rectangles((8, 3), [((first, 0), torch.empty(4, 3))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_weights_of_a_hugging_face_folder(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    save_file({NORM: _spoiled(value, dtype), "b": torch.full((3, 3), math.nan)}, path)
    stored = SafetensorsFiles(tmp_path, list_tensors(path))
    with pytest.raises(CorruptFile, match=rf"model.safetensors: {NORM} has {value} at \[5, 1\]"):
        stored.load_into({NORM: _rows(4)})
    stored.load_into({NORM: _rows(0)})  # a rank checks only its own rectangle
    assert [stored.read(NORM, (0, 0), (1, 3), to).dtype for to in (None, torch.float32)] == [dtype, torch.float32]
    with pytest.raises(CorruptFile, match=r"b has nan at \[0, 0\] and 8 more non-finite values"):
        stored.rows("b")


def test_non_finite_values_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite exp_avg_sq, as after a large gradient, does not prevent a resume. Hashed blocks have three rows."""
    for module in ("rank_files", "manifest"):
        monkeypatch.setattr(f"megatron_llama.checkpoint.{module}.BLOCK_BYTES", 36)
    state = f"{STATES}exp_avg_sq.{NORM}"
    tensors = {NORM: _spoiled(math.nan), state: _spoiled(math.inf)}
    save_part({name: Rectangles(tuple(t.shape), [((0, 0), t)]) for name, t in tensors.items()}, tmp_path, 0)
    (tmp_path / NAME).write_text(merge(tmp_path, State(1, 1, "adamw", 1, 1, {})).text)
    stored = read_manifest(tmp_path).stored
    with pytest.raises(CorruptFile, match=rf"rank_00000.safetensors: {NORM} has nan at \[5, 1\]"):
        stored.load_into({NORM: _rows(2)})
    assert all(torch.equal(stored.rows(state, first, 8), tensors[state][first:]) for first in range(8))


@pytest.mark.parametrize("script", ["export_hf", "verify_checkpoint"])
def test_the_scripts_statuses(
    copy: Path, tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    main = importlib.import_module(f"scripts.{script}").main

    def status(checkpoint: Path, out: str) -> int:
        argv = [script, str(checkpoint), *([str(tmp_path / out)] if script == "export_hf" else [])]
        monkeypatch.setattr("sys.argv", argv)
        return main()

    assert status(copy, "good") == 0  # a run's folder means its newest checkpoint
    assert "step_00000002" in capsys.readouterr().out
    assert status(tmp_path, "none") == 2
    assert "is not a checkpoint" in capsys.readouterr().err
    if script == "export_hf":
        assert status(copy, "good") == 2  # there already
        assert "the folder exists" in capsys.readouterr().err
        with monkeypatch.context() as patch:

            def full(*_: object, **__: object) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            patch.setattr("megatron_llama.checkpoint.export.export", full)  # a write to an open file has no name
            assert status(copy, "full") == 1
        assert capsys.readouterr().err == f"{tmp_path}/full: No space left on device\n"
    shard = copy / "checkpoints" / "step_00000002" / SHARD
    flip(shard, 8 + int.from_bytes(shard.read_bytes()[:8], "little") + 40)  # in a weight, which both read
    assert status(copy, "bad") == 1
    assert SHARD in capsys.readouterr().err
    assert not (tmp_path / "bad").exists() and not (tmp_path / ".bad.partial").exists()
