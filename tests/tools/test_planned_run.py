"""Hardware, batch, length and precision of a plan: all tools agree on one command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megatron_llama import cli
from megatron_llama.config import ConfigError
from megatron_llama.tools.pipeline.cli import plan_picture
from megatron_llama.tools.plan.forecast_run import forecast_run, report_lines
from megatron_llama.tools.planned_run import BATCH, PlannedRun, read_planned_run
from megatron_llama.tools.rehearse.cli import read_rehearsal
from megatron_llama.tools.traffic import cli as traffic
from megatron_llama.tools.tune import cli as tune
from megatron_llama.tools.tune.objectives import read_request
from tests.golden import GoldenFiles

README = ["model=llama70b", "data=mock", "trainer.tp=8", "trainer.pp=4", "trainer.dp=2"]
TITLE = "batch 1,024 x 4,096 tokens, bf16"
RECIPES = sorted((cli.CONF_DIR / "experiment").glob("pretrain_*.yaml"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def planned(*words: str) -> PlannedRun:
    return read_planned_run(words, ["data.mock=true", "dry_run=true"])


@pytest.mark.parametrize("device", [["device=cuda"], [], ["cluster.device=h100"], ["device=cuda", "cluster.nodes=8"]])
def test_all_tools_agree_on_one_command(device: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*README, *device, f"{BATCH}=1024"]
    configs = [
        forecast_run([*words, "data.mock=true", "dry_run=true"]).plan.config,
        read_rehearsal(words)[0].config,
        plan_picture(words, measure=False)[0].config,
        planned(*words).world.plan().config,
    ]
    for config in configs:
        batch = config.trainer.global_batch_size, config.data.length, config.trainer.precision
        assert batch == (1024, 4096, "bf16") and config.device.name == "cuda"
    request = read_request(words)
    assert request.target.ranks == 64 and request.target.name == "h100"
    assert traffic.main(words) == 0 and tune.main(words) == 0
    printed = [capsys.readouterr().out, "\n".join(report_lines(forecast_run(words)))]
    assert [text.count(TITLE) for text in printed] == [2, 1]
    if not any("cluster.device" in word for word in device):
        assert [text.count("planned for h100") for text in printed] == [2, 1], "stated, since no chip is named"
    assert not list(tmp_path.iterdir()), "nothing is written without a request"


@pytest.mark.parametrize("read", [forecast_run, read_rehearsal, lambda words: planned(*words), read_request])
def test_a_recipes_model_needs_a_batch(read: Callable[[list[str]], object]) -> None:
    with pytest.raises(ConfigError) as raised:
        read([*README, "device=cuda"])
    (problem,) = raised.value.problems
    assert problem.field == BATCH and f"write {BATCH}=1024" in problem.instead
    assert "experiment=pretrain_llama70b" in problem.instead


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_defaults_equal_the_recipe(recipe: Path) -> None:
    """Without a batch each recipe's model is rejected; length and precision have the recipe's values by default."""
    content = yaml.safe_load(recipe.read_text())
    model = next(entry["override /model"] for entry in content["defaults"] if "override /model" in entry)
    batch = content["trainer"]["global_batch_size"]
    with pytest.raises(ConfigError, match=f"{BATCH}={batch}"):
        planned(f"model={model}")
    config = planned(f"model={model}", f"{BATCH}={batch}").world.plan().config
    assert config.data.length == content["data"]["seq_length"]
    assert config.trainer.precision == content["trainer"]["precision"]
    assert planned(f"+experiment={recipe.stem}").world.config.trainer.global_batch_size == batch


def test_the_planned_hardware() -> None:
    """Chip, device, note and batch of each command line."""
    page = ""
    for line in GoldenFiles.commands("tools/plan/hardware.txt"):
        page += f"$ {line}\n"
        try:
            run = planned(*line.split())
        except ConfigError as error:
            page += f"{error}\n\n"
            continue
        config, spec = run.world.plan().config, run.hardware.spec
        page += f"    {spec and spec.name} on {config.device.name}, batch {config.trainer.global_batch_size} x "
        page += f"{config.data.length}, {config.trainer.precision}\n    {run.hardware.note}\n"
    GoldenFiles.check("tools/plan/hardware.txt", page)
