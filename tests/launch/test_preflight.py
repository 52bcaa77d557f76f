"""A run that cannot be saved, or has no account, ends before its first step."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_llama.launch import preflight
from tests.processes import plan_of, run_train_py

SMALL = ["data=mock", "device=cpu", "data.seq_length=32", "model.num_hidden_layers=1", "device.peak_tflops=0.01"]


def test_a_full_disk_is_noticed_before_step_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has both sizes and a remedy. The same disk is large enough without checkpoints."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4 << 20))
    status, output = run_train_py(tmp_path / "run", *SMALL, "trainer.steps=1")
    assert status == 2 and "its disk has 4 MiB free" in output and "1 x 6.33 MiB" in output, output
    assert ", 1 MiB for logs" in " ".join(output.split()), output
    assert "write another run.dir=PATH" in output and "step 1/" not in output and "Traceback" not in output
    plan = plan_of(1)
    plan.config.checkpoint.save_last, plan.config.checkpoint.every_minutes = False, 0.0
    assert "4 MiB free" in preflight.check_start(plan, tmp_path)


@pytest.mark.parametrize(
    ("kind", "limit", "field", "remedy"),
    [
        (resource.RLIMIT_NOFILE, 20, "ulimit -n = 20\n", "ulimit -n 65536"),  # gloo would abort or hang
        (resource.RLIMIT_FSIZE, 100_000, "ulimit -f = 100000 bytes\n", "ulimit -f unlimited"),
    ],
)
def test_a_limit_of_the_shell_ends_the_run_before_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, limit: int, field: str, remedy: str
) -> None:
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (limit, limit) if asked == kind else real(asked))
    status, output = run_train_py(tmp_path / "run", *SMALL, "trainer.tp=2", "trainer.steps=1")
    assert status == 2 and field in output and remedy in output and "Traceback" not in output, output
    assert "step 1/" not in output


@pytest.mark.parametrize(
    ("variables", "netrc", "accepted"),
    [
        ({}, "", False),
        ({"WANDB_API_KEY": "k"}, "", True),
        ({"WANDB_MODE": "offline"}, "", True),
        ({}, "machine api.wandb.ai login user password k", True),
        ({}, "machine example.org login user password k", False),
        ({"WANDB_BASE_URL": "https://w.example.org"}, "machine w.example.org login user password k", True),
        ({}, "machine", False),
    ],
)
def test_wandb_without_a_key(tmp_path: Path, variables: dict[str, str], netrc: str, accepted: bool) -> None:
    plan = plan_of(1)
    assert not [*preflight.check_wandb(plan, {"HOME": str(tmp_path)})], "wandb is off"
    plan.config.logging.wandb = "online"
    if netrc:
        (tmp_path / ".netrc").write_text(netrc)
    problems = [*preflight.check_wandb(plan, {"HOME": str(tmp_path), **variables})]
    assert (not problems) == accepted
    for problem in problems:
        assert all(remedy in problem.instead for remedy in ("wandb login", "WANDB_API_KEY", "WANDB_MODE", "wandb=off"))
