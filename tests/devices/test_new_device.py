"""A new device is one package, its name in a list and a choice in conf/. Nothing else changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT
from tests.processes import steps

PACKAGE = """\
from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_llama.devices.base import Device, Peak

if TYPE_CHECKING:
    import torch

    from megatron_llama.config import Config
    from megatron_llama.devices.kernels import Kernels


class NewChip(Device):
    name, backend, compiler, attention = "newchip", "gloo", "inductor", "mask"
    is_accelerator = forkable = True

    def probe(self) -> str | None:
        return None

    def count(self) -> int:
        return 1

    def memory_bytes(self) -> int:
        return 1 << 33

    def environment(self, config: Config) -> dict[str, str]:
        return {"NEWCHIP_SEED": str(config.trainer.seed)}

    def enter(self, local_rank: int, local_ranks: int) -> torch.device:
        import torch

        return torch.device("cpu")

    def kernel_type(self) -> type[Kernels]:
        from megatron_llama.devices.newchip.kernels import NewKernels

        return NewKernels

    def peak_flops(self, precision: str) -> Peak:
        return Peak(1e12, "a test")

    def peak_memory_bytes(self) -> int:
        return 1 << 20

    def synchronize(self) -> None:
        pass


DEVICE = NewChip()
"""
KERNELS = """\
import os
from pathlib import Path

from megatron_llama.devices.kernels import Kernels


class NewKernels(Kernels):
    def attend(self, q, k, v, visible=None):
        Path(os.environ["ATTENDED"]).write_text(f"{os.environ['NEWCHIP_SEED']} {tuple(visible.mask.shape)}")
        return super().attend(q, k, v, visible)
"""


def test_it_trains(tmp_path: Path) -> None:
    """``auto`` takes it, the plan reads its facts, and documents go through its kernels."""
    for name in ("megatron_llama", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", tmp_path)
    package = tmp_path / "megatron_llama/devices/newchip"
    package.mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    (package / "kernels.py").write_text(KERNELS)
    (tmp_path / "conf/device/newchip.yaml").write_text("name: newchip\n")
    settings = tmp_path / "megatron_llama/config/settings.py"
    text = settings.read_text()
    assert text.count('DEVICES = ("auto", ') == 1
    settings.write_text(text.replace('DEVICES = ("auto", ', 'DEVICES = ("auto", "newchip", '))
    overrides = ["data=mock", "data.document_mask=true", "data.seq_length=16", "trainer.global_batch_size=2"]
    overrides += ["trainer.micro_batch_size=1", "trainer.steps=2", "trainer.precision=bf16", "trainer.compile=false"]
    attended = tmp_path / "attended"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "ATTENDED": str(attended)}

    def train(*more: str) -> str:
        command = [sys.executable, "train.py", *overrides, f"run.dir={tmp_path / 'run'}", *more]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    plan = train("--dry-run", "device=newchip")
    assert "mask, all scores with a dense mask" in plan
    train()
    assert attended.read_text() == "1234 (1, 1, 16, 16)"
    assert steps(tmp_path / "run") == [1, 2]
