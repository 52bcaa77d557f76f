"""Output and exit status of ``scripts/rehearse.py``."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_llama.tools.rehearse import cli
from tests.cpu import children_cpu_seconds
from tests.oracle import SHAPE
from tests.paths import ROOT
from tests.ranks import run_ranks

SMALL = (*SHAPE, "model.num_hidden_layers=2", "trainer.global_batch_size=2")


def rehearse(*arguments: str) -> tuple[int, str]:
    """Run the script in a fork of this process; return its status and output."""
    status, output = run_ranks(_main, 1, arguments)[0]
    return status, output


def _main(_: int, arguments: tuple[str, ...]) -> tuple[int, str]:
    dist.destroy_process_group()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        return cli.main(arguments), output.getvalue()


def test_help_is_quick() -> None:
    with children_cpu_seconds(2.0):
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "rehearse.py"), "--help"], capture_output=True, text=True
        )
    assert done.returncode == 0 and "--ranks" in done.stdout


def test_config_errors_are_reported_together(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["trainer.tp=3", "optim.lrr=1"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "optim.lrr" in output.err and "trainer.tp = 3" in output.err
    assert cli.main([*SHAPE, "trainer.tp=2", "--ranks", "0,2,x"]) == 2
    assert "--ranks" in (output := capsys.readouterr().err) and "'2', 'x'" in output and "0 to 1" in output


def test_each_stage_has_a_report_and_a_picture(tmp_path: Path) -> None:
    settings = ["trainer.pp=2", "trainer.tp=2", "trainer.precision=bf16", "device.memory_gib=0.0001"]
    status, output = rehearse(*SMALL, *settings, "--pictures", str(tmp_path))
    assert status == 1, "a rank does not fit"
    assert re.findall(r"^rank (\d): pipeline stage (\d) of 2", output, re.M) == [("0", "1"), ("2", "2")]
    assert "DOES NOT FIT" in output, "ranks that do not fit are rehearsed too"
    for word in ("gathered weights", "layers.*.mlp.gate_up_proj", "reduce_scatter", "read_scalars"):
        assert word in output
    pictures = sorted(tmp_path.iterdir())
    assert len(pictures) == 2 and all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


@pytest.mark.slow
def test_json() -> None:
    status, output = rehearse(*SMALL, "trainer.tp=2", "trainer.compile=true", "--ranks", "1", "--json")
    assert status == 0
    report = json.loads(output)
    assert "trainer.compile" in report["notes"][0]
    (rank,) = report["ranks"]
    assert rank["rank"] == rank["tp_rank"] == 1
    assert sum(rank["at_peak"].values()) == rank["peak"] == sum(holder["size"] for holder in rank["holders"])
