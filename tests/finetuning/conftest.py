"""Shared fixtures: a base model, a peft adapter, and the reference results of transformers and peft."""

from __future__ import annotations

import pytest

from tests.finetuning import runner
from tests.finetuning.runner import Tuned, World
from tests.ranks import run_ranks


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    # Imported before any rank is forked: it takes seconds.
    pytest.importorskip("transformers", reason="transformers, the oracle, is a development dependency")
    pytest.importorskip("peft", reason="peft, the oracle, is a development dependency")
    return runner.make_world(tmp_path_factory.mktemp("finetuning"))


@pytest.fixture(scope="session")
def theirs_full(world: World) -> Tuned:
    """Full fine-tuning by transformers and torch.optim."""
    return run_ranks(runner.run_full, 1, world.plan, world.base, runner.STEPS)[0]


@pytest.fixture(scope="session")
def theirs_lora(world: World) -> Tuned:
    """LoRA by peft."""
    return run_ranks(runner.run_lora, 1, world.plan, world.base, world.adapter, runner.STEPS)[0]
