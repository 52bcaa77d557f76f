"""``checkpoint.dir`` in an object store: bit-identical to a disk in any layout, through faults and damage."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_llama.checkpoint import rank_files, saving
from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.folder import begin_writing, find_checkpoint, saved_steps
from megatron_llama.checkpoint.manifest import NAME, read_manifest
from megatron_llama.system import object_store
from megatron_llama.system.object_store import RemotePath
from scripts import export_hf, verify_checkpoint
from tests.checkpoint.runner import assert_same, kill_in_each_part, losses, run, run_job, tensors_of
from tests.messages import raises_with_message
from tests.object_store import Store
from tests.ranks import RankFailed
from tests.rows import rows

LAYOUT, EVERY_STEP, NO_SAVE = ["trainer.tp=2"], "checkpoint.every_steps=1", "checkpoint.save_last=false"
Change = Callable[[bytes], bytes] | None


@pytest.fixture(autouse=True)
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the tensors of the small model into objects too, and retry at once."""
    monkeypatch.setattr(rank_files, "OBJECT_BYTES", 20_000)
    monkeypatch.setattr(object_store, "_DELAYS", (0.01, 0.02, 0.03))
    monkeypatch.setattr(saving, "_FIRST_DELAY", 1e-3)


def check_only_published(store: Store, steps: list[int]) -> None:
    """Check that the run's folder has the objects of these checkpoints, and no others."""
    checkpoints = RemotePath(store.url("run"))
    assert saved_steps(checkpoints) == steps
    names = {"latest", "writer.json"}
    for step in steps:
        manifest = read_manifest(checkpoints / f"step_{step:08d}")
        manifest.check_sizes()
        names |= {f"step_{step:08d}/{name}" for name in (NAME, *manifest.files)}
    assert checkpoints.files().keys() == names


@pytest.mark.parametrize(
    ("method", "match", "kinds"),
    [
        pytest.param("", "", [], id="no fault"),
        pytest.param("PUT", ".safetensors", ["slow down", "error", "reset"], id="uploads", marks=pytest.mark.slow),
        pytest.param("GET", "", ["truncated", "error"], id="downloads", marks=pytest.mark.slow),
    ],
)
def test_each_layout_resumes_with_the_same_bits(
    method: str, match: str, kinds: list[str], store: Store, tmp_path: Path
) -> None:
    remote, url = f"checkpoint.dir={store.url('run')}", RemotePath(store.url("run"))
    for number, kind in enumerate(kinds):
        store.fault(kind, match, method, count=3, skip=2 * number)
    first = run(2, tmp_path / "run", *LAYOUT, EVERY_STEP, remote, until=2)
    check_only_published(store, [2, 1])
    sizes = read_manifest(url / "step_00000002").files.values()
    assert len(sizes) > 8 and max(sizes) < 24_000, "tensors are divided; each file also has a header"
    whole = run(2, tmp_path / "whole", *LAYOUT, NO_SAVE, until=3)
    layouts = {"tp2": (2, LAYOUT)} | ({"pp2": (2, ["trainer.pp=2"]), "one": (1, [])} if kinds else {})
    for name, (ranks, layout) in layouts.items():
        for number, kind in enumerate(kinds):
            store.fault(kind, match, method, count=3, skip=2 * number)
        resumed = run(ranks, tmp_path / name, *layout, remote, NO_SAVE, until=3)  # no local file
        assert resumed.started_at == 2
        if layout == LAYOUT:
            assert {**first.losses, **resumed.losses} == whole.losses
            assert_same(resumed.tensors, whole.tensors)


@pytest.mark.slow
def test_retention_and_a_new_beginning(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    url, remote = RemotePath(store.url("run")), f"checkpoint.dir={store.url('run')}"
    run(1, tmp_path / "run", EVERY_STEP, remote, "checkpoint.keep=2", until=4)
    check_only_published(store, [4, 3])
    store.put("run/step_00000005/rank_00000.0badc0de.json", b"{}")  # of a start that was killed
    foreign = {"run/notes.txt", "run/other/step_00000001/checkpoint.json", "run/steps/x.bin"}
    for name in foreign:
        store.put(name, b"{}")
    assert run(1, tmp_path / "run", remote, NO_SAVE, "checkpoint.resume=never", until=1).started_at == 0
    assert foreign <= {*store.names()}
    assert saved_steps(url) == [] and saved_steps(url.with_name("run.1")) == [4, 3]
    assert run(1, tmp_path / "run", remote, f"checkpoint.resume={url}.1/latest", NO_SAVE).started_at == 4
    assert not [name for name in map(str, url.with_name("run.1").files()) if "0badc0de" in name]
    for path in (f"{url}.1", f"{url}.1/step_00000003"):
        assert _call(verify_checkpoint.main, ["verify_checkpoint.py", path]) == 0
    assert "step 4" in (text := capsys.readouterr().out) and "step 3" in text
    assert _call(export_hf.main, ["export_hf.py", f"{url}.1/step_00000004", str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()
    back = (f"checkpoint.dir={url}.1", f"checkpoint.resume={url}.1/step_00000003")
    assert run(1, tmp_path / "back", *back, NO_SAVE).started_at == 3
    assert saved_steps(url.with_name("run.1")) == [3] and saved_steps(url.with_name("run.1.1")) == [4]
    assert _call(verify_checkpoint.main, ["verify_checkpoint.py", store.url("other")]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err


def _call(main: Callable[[], int], arguments: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", arguments)
        return main()


def _flipped(content: bytes, at: int = -9) -> bytes:
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


DAMAGES: dict[str, tuple[str, Change, str]] = {
    "flipped": (".safetensors", _flipped, "wrong hash of .* from row "),
    "truncated": (".safetensors", lambda content: content[:-5], r"has \d+ of \d+ bytes"),
    "missing": (".safetensors", None, "there is no such"),
    "manifest": (NAME, lambda content: _flipped(content, 600), f"{NAME}: "),
    "empty manifest": (NAME, lambda content: b"", f"{NAME}: not JSON"),
    "no manifest": (NAME, None, ""),
}
"""End of the object's name, its damaged content (None: deleted), message."""


def _damage(store: Store, name: str, change: Change) -> None:
    if change is None:
        store.delete(name)
    else:
        store.put(name, change(store.get(name)))


@pytest.mark.parametrize(("ending", "change", "message"), rows(DAMAGES.items(), {"flipped", "no manifest"}))
def test_an_older_one_is_used(
    ending: str, change: Change, message: str, store: Store, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    remote = f"checkpoint.dir={store.url('run')}"
    run(1, tmp_path / "run", EVERY_STEP, remote, until=2)
    names = [each for each in store.names() if each.startswith("run/step_00000002") and each.endswith(ending)]
    _damage(store, names[-1], change)
    assert run(1, tmp_path / "other", remote, until=2).started_at == 1 and re.search(message, capfd.readouterr().err)
    check_only_published(store, [2, 1])  # the damaged one is replaced


def test_a_second_run_stops_the_first(store: Store, tmp_path: Path) -> None:
    remote = f"checkpoint.dir={store.url('run')}"

    def begin_another(checkpointer: Checkpointer) -> None:
        resume = checkpointer.resume

        def resume_then_begin() -> object:
            plan = resume()
            if checkpointer.topology.rank == 0:
                begin_writing(checkpointer.checkpoints, Path("/elsewhere"))
            return plan

        checkpointer.resume = resume_then_begin  # type: ignore[assignment,method-assign]

    with raises_with_message(RankFailed, "another run writes there: /elsewhere on "):
        run(2, tmp_path / "run", *LAYOUT, EVERY_STEP, remote, until=1, tamper=begin_another)
    assert saved_steps(RemotePath(store.url("run"))) == []
    assert json.loads(store.get("run/writer.json"))["run_dir"] == "/elsewhere"


@pytest.mark.slow
def test_a_save_that_fails_for_good_stops_the_run(store: Store, tmp_path: Path) -> None:
    store.fault("denied", "step_00000002", "PUT", count=1000)
    settings = [EVERY_STEP, "checkpoint.save_timeout_seconds=0.01", "checkpoint.max_failed_saves=2"]
    result = run(2, tmp_path / "run", *LAYOUT, *settings, f"checkpoint.dir={store.url('run')}", until=3)
    assert len(result.losses) == 3
    check_only_published(store, [3, 1])
    store.fault("denied", "step_0000000", "PUT", count=1000)
    settings += [f"checkpoint.dir={store.url('run')}", f"checkpoint.fallback_dir={tmp_path}/other"]
    step = "step_0000000[56]"  # the first failure may be known after step 6 only
    advice = f"First move step [56]: copy {tmp_path}/other/.*/{step} to {store.url('run')}/{step}, checkpoint.json last"
    with raises_with_message(RankFailed, f"step_00000005 .*the store denies the access.*{advice}"):
        run(2, tmp_path / "run", *LAYOUT, *settings, until=6)
    check_only_published(store, [3, 1])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://bucket/run", "needs a package that is not installed"),
        ("s3://user:secret@bucket/run", "must be the URL of a folder in an object store, without credentials"),
        ("s3://no-such-bucket/run", "there is no such bucket"),
    ],
)
def test_a_url_that_cannot_be_used(url: str, message: str, store: Store, tmp_path: Path) -> None:
    output = run_job(tmp_path / "run", f"checkpoint.dir={url}", "trainer.steps=1", status=2)
    text = " ".join(output.split())
    assert message in text and "checkpoint.dir" in text and "secret" not in text and "Traceback" not in text
    assert "secret" not in "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_run_of_the_command_line(store: Store, tmp_path: Path) -> None:
    output = run_job(tmp_path / "run", *LAYOUT, "trainer.steps=2", f"checkpoint.dir={store.url('run')}")
    assert store.url("run") in output
    assert find_checkpoint(tmp_path / "run").name == "step_00000002"
    output = run_job(tmp_path / "run", "trainer.steps=3", "checkpoint.export_hf=true")  # the rest is stored
    assert "step_00000002" in output, output
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3]
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()


@pytest.mark.slow
def test_kills_lose_no_step(store: Store, tmp_path: Path) -> None:
    settings = [*LAYOUT, EVERY_STEP, "trainer.steps=6", "checkpoint.keep=3"]
    remote = f"checkpoint.dir={store.url('run')}"
    kill_in_each_part(tmp_path / "run", random.Random(1), *settings, remote)
    for folder, more in ((tmp_path / "run", [remote]), (tmp_path / "whole", [])):
        run_job(folder, *settings, *more)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    newest = RemotePath(store.url("run/step_00000006"))
    assert_same(tensors_of(newest), tensors_of(find_checkpoint(tmp_path / "whole")))
    check_only_published(store, [6, 5, 4])
