"""train.py -m: expansion of a command to runs, errors before the first run, and resuming."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from megatron_llama.cli import CONF_DIR
from megatron_llama.config import ConfigError
from megatron_llama.system.files import locked_folder
from megatron_llama.tools.sweep import cli
from megatron_llama.tools.sweep.cli import main
from megatron_llama.tools.sweep.combinations import combinations
from megatron_llama.train.metrics_file import METRICS_FILE
from tests.golden import GoldenFiles
from tests.processes import Launcher, gone, losses, run_train_py, wait_until

TINY = (
    "model=llama_2m data=mock device=cpu data.seq_length=32 model.num_hidden_layers=1 model.hidden_size=32 "
    "model.intermediate_size=64 device.peak_tflops=0.01 logging.tensorboard=false trainer.steps=2"
).split()
TWO = [*TINY, "optim.lr=1e-3,1e-4"]
NAMES = ["optim.lr_0.001", "optim.lr_0.0001"]


def test_combinations() -> None:
    """Hydra's grammar; the last setting varies fastest. Values that cannot be listed are rejected."""
    page, hidden = "", {r"folder \S+-[0-9a-f]{6,}": "folder FROM_THE_COMMAND"}
    lines = [line.removeprefix("-m ") for line in GoldenFiles.commands("tools/sweep/combinations.txt")]
    for line in lines:
        page += f"$ -m {line}\n"
        try:
            sweep = combinations(line.split(), CONF_DIR)
        except ConfigError as error:
            page += f"{error}\n\n"
            continue
        page += f"folder {sweep.folder}\n"
        page += "".join(f"    {one.name}: {' '.join(one.overrides)}, {one.differing}\n" for one in sweep.combinations)
        assert sweep.varied == tuple(sweep.combinations[0].differing)
    GoldenFiles.check("tools/sweep/combinations.txt", page, hidden)
    command = lines[6].split()
    assert combinations(command, CONF_DIR).folder == combinations(command, CONF_DIR).folder
    assert combinations(command, CONF_DIR).folder != combinations(command[::-1], CONF_DIR).folder


class FakeTrain:
    """Replacement of train.py that records the started runs and returns given statuses."""

    def __init__(self, *statuses: int) -> None:
        self.statuses, self.started = list(statuses), list[str]()

    def __call__(self, arguments: Sequence[str]) -> int:
        self.started.append(Path(arguments[-1]).name)
        return self.statuses.pop(0)


def test_an_interrupted_sweep_resumes_and_failures_do_not_end_it(tmp_path: Path) -> None:
    line = ["-m", *TINY, "optim.lr=1,2,3,4", f"run.dir={tmp_path}/s"]
    runs = FakeTrain(0, 1, 75)
    assert main(line, runs) == 75
    assert runs.started == ["optim.lr_1", "optim.lr_2", "optim.lr_3"], "a failed run does not end the sweep"
    words = [row.split(" | ")[1] for row in (tmp_path / "s" / "sweep.md").read_text().splitlines()[2:]]
    assert words == ["done", "failed, status 1", "stopped, saved", "not started"]
    runs = FakeTrain(0, 0, 2)
    assert main(line, runs) == 1
    assert runs.started == ["optim.lr_2", "optim.lr_3", "optim.lr_4"], "finished runs are skipped"
    more = ["-m", *TINY, "optim.lr=4,5", f"run.dir={tmp_path}/s"]
    runs = FakeTrain(0, 0)
    assert main(more, runs) == 0
    states = json.loads((tmp_path / "s" / "sweep.json").read_text())["runs"]
    assert {name: run["status"] for name, run in states.items()} == {f"optim.lr_{value}": 0 for value in range(1, 6)}
    runs = FakeTrain(0, 0)
    main([*more, "optim.clip=2"], runs)
    assert runs.started == ["optim.lr_4", "optim.lr_5"], "other settings are a new run"


def test_a_folder_has_one_sweep_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid state file is reported."""
    runs = FakeTrain(0, 0)
    with locked_folder(tmp_path / "s"):
        assert main(["-m", *TWO, f"run.dir={tmp_path}/s"], runs) == 2
    assert "is in use by another process" in capsys.readouterr().err and not runs.started
    assert main(["-m", *TWO, f"run.dir={tmp_path}/s"], runs) == 0
    (tmp_path / "sweep.json").write_text('{"runs": [1]}')
    assert main(["-m", *TWO, f"run.dir={tmp_path}"], FakeTrain()) == 2
    assert "sweep.json" in capsys.readouterr().err
    (tmp_path / "s" / "sweep.md").unlink()
    (tmp_path / "s" / "sweep.md").mkdir()
    status, printed = run_train_py(tmp_path / "s", "-m", *TWO)
    assert status == 1 and printed.endswith("sweep.md:\n    Is a directory\n") and "Traceback" not in printed


def test_a_run_gets_signals_and_ends_with_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    (tmp_path / "train.py").write_text("trap 'exit 75' INT; ln -s $$ $2; while :; do sleep 0.1; done")
    for number, status in ((signal.SIGINT, 75), (signal.SIGKILL, -9)):
        pid = tmp_path / number.name
        sweep = Launcher(partial(cli.run_train_py, [str(pid)]), tmp_path)
        wait_until(pid.is_symlink)
        os.kill(sweep.pid, number)
        assert sweep.wait() == status and gone(int(os.readlink(pid)))


@pytest.mark.parametrize(
    ("value", "cells"), [(math.nan, ["nan", "nan"]), (3, ["3.0000", "3.0000"]), ("x", ["-", "2.0000"])]
)
def test_the_table_has_the_last_losses(value: object, cells: list[str], tmp_path: Path) -> None:
    """A diverged run shows NaN, and a text is no loss."""
    run = tmp_path / "s" / NAMES[0]
    run.mkdir(parents=True)
    records = [{"step": 1, "reduced_train_loss": 2.0, "val_loss": 2.0, "consumed_tokens": 9}]
    records.append(records[0] | {"step": 2, "reduced_train_loss": value, "val_loss": value})
    (run / METRICS_FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["-m", *TWO, f"run.dir={tmp_path}/s"], FakeTrain(0, 0)) == 0
    assert (tmp_path / "s" / "sweep.md").read_text().splitlines()[2].split(" | ")[2:5] == ["2", *cells]


def test_two_real_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", *TWO, "trainer.val_every_steps=1", f"run.dir={tmp_path}/s"]) == 0
    ends = [losses(tmp_path / "s" / name)[-1] for name in NAMES]
    assert ends[0] != ends[1]
    rows = [row.split(" | ") for row in (tmp_path / "s" / "sweep.md").read_text().splitlines()]
    assert rows[0][1:] == ["status", "step", "loss", "val loss", "tokens/s |"]
    assert [row[1:4] for row in rows[2:]] == [["done", "2", f"{loss:.4f}"] for loss in ends]
    assert all(float(row[4]) > 0 for row in rows[2:])
    assert (tmp_path / "s" / "curves.png").read_bytes().startswith(b"\x89PNG")
    printed = capfd.readouterr().out
    assert f"{ends[1]:.4f}" in printed and "rank grid" not in printed
    for plan in (tmp_path / "s" / name / "plan.txt" for name in NAMES):
        assert f"plan: {plan}\n" in printed and "rank grid" in plan.read_text()


SBATCH = """#!/bin/sh
# Records its arguments and acts as a job that has ended with the status of the test.
printf '%s\\n' "$@" >{folder}/words-$$
mkdir -p {folder}/logs/$$/0
echo "$(cat {folder}/status)" >{folder}/logs/$$/0/status
echo $$
"""


def test_slurm_jobs_are_submitted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"sbatch": "#!/bin/sh\nexit 1\n", "squeue": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(cli, "BATCH_FOLDER", tmp_path)
    line = ["-m", "--slurm=--nodes 2 --time 1:00:00", *TWO, f"run.dir={tmp_path}/s"]
    assert main(line, FakeTrain()) == 2 and not (tmp_path / "s").exists(), "a rejected job leaves no folder"
    (tmp_path / "sbatch").write_text(SBATCH.format(folder=tmp_path))
    assert main(["-m", "--slurm=--comment 'x", *TWO], FakeTrain()) == 2
    (tmp_path / "status").write_text("75")
    assert main(line, FakeTrain()) == 1
    submitted = [path.read_text().splitlines() for path in tmp_path.glob("words-*")]
    assert len(submitted) == 2
    begin = ["--parsable", "--nodes", "2", "--time", "1:00:00", "run.slurm", *TINY]
    for words in submitted:
        assert words[:-2] == begin and words[-1] == f"run.dir={tmp_path}/s/{words[-2].replace('=', '_')}"
    (tmp_path / "status").write_text("0")
    assert main(line, FakeTrain()) == 0
    assert len(list(tmp_path.glob("words-*"))) == 4, "stopped jobs are submitted again"
    assert main(line, FakeTrain()) == 0
    assert len(list(tmp_path.glob("words-*"))) == 4, "finished jobs are not"
