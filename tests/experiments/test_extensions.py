"""Recipes that extend the context of a published model: published numbers, data, memory, and a short run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from docs import generate
from megatron_llama.cli import CONF_DIR, main
from megatron_llama.config import load_config
from megatron_llama.launch.world import find_world
from megatron_llama.plan import Plan
from megatron_llama.plan.memory import USABLE, stage_footprints
from megatron_llama.system.tables import GIB
from tests.processes import run_train_py

NAME = "extend_llama3_8b_128k"
TEXT = (CONF_DIR / "experiment" / f"{NAME}.yaml").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a folder without datasets and weights."""
    monkeypatch.chdir(tmp_path)


def plan_of(*overrides: str) -> Plan:
    return find_world(load_config([f"+experiment={NAME}", "dry_run=true", *overrides], CONF_DIR), None).plan()


def test_each_extension_is_known_here() -> None:
    assert [path.stem for path in (CONF_DIR / "experiment").glob("extend_*.yaml")] == [NAME]


def test_the_numbers_are_the_published_ones() -> None:
    """Fu et al. 2024, sections 3 and 4; YaRN, section 4.1; the context of Llama 3."""
    assert all(source in TEXT for source in ("arXiv:2402.10171", "arXiv:2309.00071", "arXiv:2407.21783"))
    plan = plan_of()
    trainer, optim, scaling = plan.config.trainer, plan.config.optim, plan.model.rope_scaling
    assert plan.config.data.seq_length == plan.model.max_position_embeddings == 131_072
    assert scaling is not None and (scaling.rope_type, scaling.factor) == ("yarn", 131_072 / 8_192)
    assert plan.tokens_per_step == pytest.approx(4e6, rel=0.05)
    assert abs(trainer.steps * plan.tokens_per_step - 5e9) < plan.tokens_per_step
    assert (optim.lr, optim.min_lr, optim.warmup_steps) == (2e-5, 2e-5, 20)
    assert (optim.betas, optim.weight_decay, optim.clip) == ([0.9, 0.95], 0.0, 1.0)
    assert str(optim.schedule["_target_"]).endswith("Constant")
    assert not plan.config.data.document_mask and plan.precision.name == "bf16"
    assert plan.chosen == (), "a recipe leaves nothing open"


def test_long_documents_are_upsampled_in_each_source() -> None:
    """A source keeps its share of the pretraining; documents of 4,096 tokens or more are 70 % of it."""

    def shares(name: str) -> dict[str, float]:
        prefixes: list[Any] = yaml.safe_load((CONF_DIR / "data" / f"{name}.yaml").read_text())["prefixes"]
        names = [str(path).removeprefix("corpora/redpajama/") for path in prefixes[1::2]]
        return dict(zip(names, map(float, prefixes[::2]), strict=True))

    whole, parts = shares("redpajama"), shares("redpajama_long")
    for name, share in whole.items():
        source = name.removesuffix("_text_document")
        short, long = (parts.pop(f"{source}_{part}_4096_text_document") for part in ("below", "from"))
        assert short + long == pytest.approx(share, abs=2e-4) and long / share == pytest.approx(0.7, abs=5e-3)
    assert not parts


def test_a_dry_run_has_the_commands_of_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"+experiment={NAME}", "--dry-run"]) == 0
    page = capsys.readouterr().out
    assert " 32 ranks " in page and "data_prep/split_by_length.py" in page and "redpajama.py prepare" in page
    assert "init_from=models/Meta-Llama-3-8B" in page and "yarn x 16" in page


def test_it_fits_its_machines() -> None:
    plan = plan_of("device.memory_gib=79.1")
    assert max(stage.total for stage in stage_footprints(plan)) <= USABLE * 79.1 * GIB
    assert f" on {plan.world_size // 8} machines with 8 H100" in generate.experiment_summary(NAME)


def test_it_trains_scaled_down(tmp_path: Path) -> None:
    """Two context-parallel ranks, mock data and random weights of a small model."""
    model = "model=llama_2m model.max_position_embeddings=512 init_from=null finetune=none"
    trainer = "device=cpu trainer.cp=2 trainer.dp=1 trainer.global_batch_size=2 trainer.steps=2 trainer.compile=false"
    more = "data=mock data.seq_length=512 trainer.precision=fp32 trainer.val_every_steps=null optim.warmup_steps=1"
    saved = "checkpoint=none checkpoint.every_steps=null checkpoint.export_hf=false logging.tensorboard=false"
    words = f"{model} {trainer} {more} {saved}".split()
    status, output = run_train_py(tmp_path / "run", f"+experiment={NAME}", *words)
    assert status == 0, output
    assert "yarn x 16" in output
