"""Tables of layouts as pytest's parameters: some rows run with `make test`, the others with `make test-slow`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import fields
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from megatron_llama.config.settings import TrainerConfig


def rows(table: Iterable[tuple[str, Any]], quick: Container[str]) -> list[ParameterSet]:
    """One parameter set a (name, values) of ``table``, in its order. Those not in ``quick`` are marked slow."""
    return [pytest.param(*values, id=name, marks=[] if name in quick else [pytest.mark.slow]) for name, values in table]


TRAINER = {field.name for field in fields(TrainerConfig)}


def overrides(text: str) -> list[str]:
    """Split settings of a table: ``tp=2 optim.lr=1`` is ``trainer.tp=2`` and ``optim.lr=1``."""
    return [f"trainer.{word}" if word.partition("=")[0] in TRAINER else word for word in text.split()]
