"""Checkpoints that a run saves, deletes, marks as best, resumes from and exports with a model card."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_llama.checkpoint import checkpointer as checkpointer_module
from megatron_llama.checkpoint import folder
from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import best_checkpoint, find_checkpoint, read_pointer, saved_steps
from megatron_llama.checkpoint.manifest import State, read_manifest
from megatron_llama.checkpoint.model_card import base_license, model_card
from megatron_llama.config import ConfigError, FinetuneConfig, ModelConfig
from megatron_llama.config.settings import CheckpointConfig
from megatron_llama.plan import format_plan
from megatron_llama.system.files import atomic_folder
from tests.checkpoint.runner import Tamper, make_plan, run, run_job
from tests.golden import GoldenFiles
from tests.messages import raises_with_message
from tests.ranks import RankFailed

EVERY = "checkpoint.every_steps=1"
KEEP = [EVERY, "checkpoint.keep=1", "checkpoint.keep_best=true", "trainer.val_every_steps=1"]
LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.0, 6: math.nan, 8: 2.0}
"""By step; the others are not validated."""


def validating(losses: Mapping[int, float] = LOSSES, *, exports: bool = False) -> Tamper:
    """Make a run report these validation losses, and export at its end."""

    def tamper(checkpointer: Checkpointer) -> None:
        after_step, finish = checkpointer.after_step, checkpointer.finish

        def noted(step: int, stop: bool = False, *_: object) -> bool:
            return after_step(step, stop, losses.get(step))

        def then_export(step: int) -> None:
            finish(step)
            checkpointer.export()

        checkpointer.after_step = noted  # type: ignore[method-assign]
        if exports:
            checkpointer.finish = then_export  # type: ignore[method-assign]

    return tamper


def best(run_dir: Path) -> str:
    return (run_dir / "checkpoints" / "best").read_text()


def test_a_resumed_run_keeps_the_best_until_a_better_one(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    run(1, tmp_path, *KEEP, until=5, tamper=validating())
    for marker in ("step_00000077\n", "../../elsewhere\n", "\n", None):  # invalid or missing: mended at the start
        (checkpoints / "best").unlink() if marker is None else (checkpoints / "best").write_text(marker)
        folder.resume_candidates(checkpoints, CheckpointConfig(keep_best=True))
        assert best(tmp_path) == "step_00000002\n"
    assert run(2, tmp_path, *KEEP, until=7, tamper=validating()).started_at == 5
    assert saved_steps(checkpoints) == [7, 2]  # the first of two that are equal
    assert find_checkpoint(tmp_path).name == "step_00000007"
    assert read_manifest(find_checkpoint(checkpoints / "best")).state.val_loss == 3.0
    run(1, tmp_path, *KEEP, until=9, tamper=validating())
    assert saved_steps(checkpoints) == [9, 8]
    assert best(tmp_path) == "step_00000008\n"
    back = f"checkpoint.resume={checkpoints}/best"
    assert run(1, tmp_path, *KEEP, back, until=8, tamper=validating()).started_at == 8


def test_without_a_loss_there_is_no_best(tmp_path: Path) -> None:
    for name, settings, losses in (("unvalidated", KEEP, {}), ("without keep_best", KEEP[:2], LOSSES)):
        run(1, tmp_path / name, *settings, until=3, tamper=validating(losses))
        assert saved_steps(tmp_path / name / "checkpoints") == [3]
        assert not (tmp_path / name / "checkpoints" / "best").exists()


@pytest.mark.parametrize(
    ("losses", "step", "message"),
    [(LOSSES, 2, "step_00000002 (best validation loss) "), ({}, 3, "step_00000003 (last) ")],
    ids=["validated", "never"],
)
def test_the_best_is_exported(
    losses: dict[int, float], step: int, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(1, tmp_path, *KEEP, "checkpoint.export_hf=true", until=3, tamper=validating(losses, exports=True))
    assert f"exported {message}" in capfd.readouterr().err
    expected = export(tmp_path / "checkpoints" / f"step_{step:08d}", tmp_path / "expected").folder
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


def test_extended_run_keeps_its_first_export(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    exports = ("checkpoint.export_hf=true", "checkpoint.keep=2")
    for steps, message in ((2, "exported step_00000002"), (2, "hf exists"), (3, "hf_step_00000003"), (3, "hf exists")):
        run(1, tmp_path, f"trainer.steps={steps}", *exports, until=steps, tamper=validating({}, exports=True))
        assert message in capfd.readouterr().err
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "hf_step_00000003"))
    assert first != second and len([*tmp_path.glob("hf*")]) == 2


@pytest.mark.parametrize(
    ("function", "marked"), [("point_to_best", "step_00000002\n"), ("prune", "step_00000008\n")], ids=["mark", "prune"]
)
def test_killed_within_a_save(tmp_path: Path, function: str, marked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(1, tmp_path, *KEEP, until=7, tamper=validating())

    def killed(*arguments: object) -> None:
        raise OSError(5, "killed", "here")

    def kill(checkpointer: Checkpointer) -> None:
        validating()(checkpointer)
        resume = checkpointer.resume

        def resume_first() -> object:  # a resume calls point_to_best too
            plan = resume()
            monkeypatch.setattr(folder, function, killed)
            return plan

        checkpointer.resume = resume_first  # type: ignore[assignment,method-assign]

    with pytest.raises(RankFailed, match="killed"):
        run(1, tmp_path, *KEEP, "checkpoint.save_timeout_seconds=0", until=8, tamper=kill)
    assert (saved_steps(tmp_path / "checkpoints"), best(tmp_path)) == ([8, 7, 2], marked)
    run(1, tmp_path, *KEEP, until=9, tamper=validating())
    assert (saved_steps(tmp_path / "checkpoints"), best(tmp_path)) == ([9, 8], "step_00000008\n")


def test_the_loop_passes_its_validation_losses(tmp_path: Path) -> None:
    every = ["trainer.steps=9", "checkpoint.every_steps=2", "checkpoint.keep_best=true", "trainer.val_every_steps=3"]
    run_job(tmp_path / "run", *every, "trainer.val_steps=1", "optim.lr=0.05", "trainer.tp=2")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["val_loss"] for record in records if "val_loss" in record}
    checkpoints = tmp_path / "run" / "checkpoints"
    assert saved_steps(checkpoints) == [9, 8, 6, 4, 2] and sorted(losses) == [3, 6, 9]
    for step in saved_steps(checkpoints):
        assert read_manifest(checkpoints / f"step_{step:08d}").state.val_loss == losses.get(step)
    lowest = min((losses[step], step) for step in (6, 9))[1]
    assert read_pointer(checkpoints, "best") == best_checkpoint(checkpoints) == checkpoints / f"step_{lowest:08d}"


def ten_minutes_per_reading(checkpointer: Checkpointer) -> None:
    """Replace the clock: rank 0's advances by 10 minutes at each reading, the others' stand."""
    now = [0.0]

    def clock() -> float:
        now[0] += 600.0 * (checkpointer.topology.rank == 0)
        return now[0]

    setattr(checkpointer_module, "monotonic", clock)  # noqa: B010  in the process of a rank
    checkpointer._saved_at = 0.0


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], [7, 6]),
        (["checkpoint.keep=3"], [7, 6, 4]),
        (["checkpoint.keep_every=2"], [7, 6, 4, 2]),
        (["checkpoint.every_minutes=15"], [7, 6, 4, 2]),
        (["checkpoint.every_minutes=0"], [7]),
        (["checkpoint.every_steps=5"], [7, 5]),
        ([EVERY, "checkpoint.keep=2", "checkpoint.keep_every=3"], [7, 6, 3]),
        (["checkpoint=none"], []),
    ],
    ids=["default", "keep", "keep_every", "given", "off", "by steps", "by steps, keep", "none"],
)
def test_saved_steps(tmp_path: Path, overrides: list[str], steps: list[int]) -> None:
    run(1 if overrides else 2, tmp_path, "trainer.steps=7", *overrides, until=7, tamper=ten_minutes_per_reading)
    assert saved_steps(tmp_path / "checkpoints") == steps
    assert not list(tmp_path.glob("checkpoints/.*"))


def test_the_plan_names_the_policy_and_the_default_spares_other_checkpoints(tmp_path: Path) -> None:
    run(1, tmp_path, EVERY, "trainer.steps=3", until=3)
    run(1, tmp_path, "trainer.steps=9", until=9, tamper=ten_minutes_per_reading)
    assert saved_steps(tmp_path / "checkpoints") == [9, 7, 3, 2, 1]
    page = ""
    for words in GoldenFiles.commands("checkpoint/policies.txt"):
        shown = format_plan(make_plan(1, tmp_path, *words.split())).splitlines()
        first = next(number for number, line in enumerate(shown) if "  checkpoints  " in line)
        page += "\n".join([f"$ {words}", *shown[first : first + 2], ""])
    GoldenFiles.check("checkpoint/policies.txt", page, {r"run folder +.*": "run folder"})


def test_which_checkpoint_a_run_resumes_from(tmp_path: Path) -> None:
    checkpoints, other = tmp_path / "run" / "checkpoints", tmp_path / "other" / "checkpoints"

    def candidates(run_checkpoints: Path, resume: object) -> list[str]:
        paths = folder.resume_candidates(run_checkpoints, CheckpointConfig(resume=str(resume)))
        return [str(path.relative_to(tmp_path)) for path in paths]

    run(1, tmp_path / "run", "checkpoint.every_steps=2", until=5)
    assert (checkpoints / "latest").read_text() == "step_00000005\n"
    newest_first = [f"run/checkpoints/step_0000000{step}" for step in (5, 4, 2)]
    assert candidates(checkpoints, "auto") == newest_first
    second = checkpoints / "step_00000002"
    assert candidates(checkpoints, second) == candidates(other, second) == newest_first[2:]
    assert run(1, tmp_path / "other", f"checkpoint.resume={second}", until=3).started_at == 2
    # A restart with the same command resumes from the newest checkpoint of its run.
    assert candidates(other, second) == ["other/checkpoints/step_00000003"]
    assert candidates(checkpoints, "never") == []
    for resume, step, saved in ((second, 2, [3, 2]), ("never", 0, [1])):
        assert run(1, tmp_path / "run", f"checkpoint.resume={resume}", until=step + 1).started_at == step
        assert saved_steps(checkpoints) == saved
    moved = [saved_steps(tmp_path / "run" / f"checkpoints.{number}") for number in (1, 2)]
    assert moved == [[5, 4], [3, 2]], "nothing is lost"


def test_card_of_an_exported_run(tmp_path: Path) -> None:
    run(2, tmp_path / "run", "trainer.tp=2", "model.vocab_size=61", "model.tie_word_embeddings=true", until=3)
    folder = export(find_checkpoint(tmp_path / "run"), tmp_path / "hf", "bfloat16").folder
    card = (folder / "README.md").read_text()
    GoldenFiles.check("checkpoint/card_of_a_run.md", card)
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert f"| Parameters | {stored:,} (" in card
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is a development dependency")
    assert hub.ModelCard.load(folder / "README.md").data.library_name == "transformers"


def test_no_file_of_the_user_is_replaced(tmp_path: Path) -> None:
    run(1, tmp_path / "run", until=1)
    checkpoint, target = find_checkpoint(tmp_path / "run"), tmp_path / "hf"
    with atomic_folder(target) as folder:
        (folder / "README.md").write_text("# Mine\n")
        with raises_with_message(ConfigError, "OUT = .* another process is writing this folder"):
            export(checkpoint, target)
    with raises_with_message(ConfigError, "OUT = .* the folder exists and is not empty"):
        export(checkpoint, target)
    assert (target / "README.md").read_text() == "# Mine\n"
    link, empty = tmp_path / "link", tmp_path / "empty"
    empty.mkdir()
    for linked in (empty, tmp_path / "missing", link):
        link.symlink_to(linked)
        with raises_with_message(ConfigError, f"is a link.*remove {link}"):
            export(checkpoint, link)
        link.unlink()
    export(checkpoint, empty)
    assert "| Training tokens | 128 in 1 step |" in (empty / "README.md").read_text()


def make_card(state: dict[str, Any], **options: Any) -> str:
    complete = State(7, 56, "adamw", 7, 1, {"data": {"seq_length": 16, **state.pop("data", {})}}, **state)
    options = {"adapter": True, "dtype": "float32", "tokenizer": False, **options}
    return model_card([complete], ModelConfig(name="hf"), FinetuneConfig(method="lora"), **options)


def test_cards_of_fine_tuned_models(tmp_path: Path) -> None:
    """Only a model of the hub is the base_model: the hub rejects other names. No card has a path."""
    base = tmp_path / "models--org--Base-1.1B" / "snapshots" / "0123abc"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en]\n---\n# Base\n")
    data = {"name": "chat", "prefixes": ["0.5", "/secret/a b|c_sft"], "add_special_tokens": ["<|a b|>"]}
    GoldenFiles.check("checkpoint/card_of_an_adapter.md", make_card({"hf_folder": str(base), "data": data}))
    local = make_card({"hf_folder": "/home/someone/my model<: |x"}, adapter=False, tokenizer=True)
    GoldenFiles.check("checkpoint/card_of_a_fine_tuned_model.md", local)


def test_unknown_licenses(tmp_path: Path) -> None:
    assert base_license(tmp_path / "missing") == "unknown"
    os.mkfifo(tmp_path / "README.md")
    assert base_license(tmp_path) == "unknown"
    (tmp_path / "README.md").unlink()
    cards = (b"", b"# Base\n", b"---\nlicense: mit\n", b"---\n- x\n---\n")
    values = (b"[a]", b"a b", b"\xff", b"[" * 100_000)
    for content in (*cards, *(b"---\nlicense: %b\n---\n" % value for value in values)):
        (tmp_path / "README.md").write_bytes(content)
        assert base_license(tmp_path) == "unknown", content[:40]
