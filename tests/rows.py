"""Tables of layouts as pytest's parameters: some rows run with `make test`, the others with `make test-slow`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def rows(table: Iterable[tuple[str, Any]], quick: Container[str]) -> list[ParameterSet]:
    """One parameter set a (name, values) of ``table``, in its order. Those not in ``quick`` are marked slow."""
    return [pytest.param(*values, id=name, marks=[] if name in quick else [pytest.mark.slow]) for name, values in table]
