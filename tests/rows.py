"""Tables of layouts as pytest's parameters: some rows run with `make test`, the others with `make test-slow`."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import fields
from pathlib import Path
from string import Template
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from megatron_llama.config.settings import TrainerConfig


def rows(table: Iterable[tuple[str, Any]], quick: Container[str]) -> list[ParameterSet]:
    """One parameter set a (name, values) of ``table``, in its order. Those not in ``quick`` are marked slow."""
    return [pytest.param(*values, id=name, marks=[] if name in quick else [pytest.mark.slow]) for name, values in table]


def read_table(file: str, section: str = "") -> tuple[dict[str, tuple[int, str]], set[str]]:
    """Return the rows in ``layouts.txt`` next to a file, ``NAME: NUMBER SETTINGS``, and the names of rows with a star.

    A line ``NAME = TEXT`` defines ``$NAME`` for the lines below it. A section begins with a line ``[SECTION]``.
    """
    defined: dict[str, str] = {}
    table: dict[str, tuple[int, str]] = {}
    text = Path(file).with_name("layouts.txt").read_text(encoding="utf-8")
    head, *parts = re.split(r"^\[(.*)\]\n", text, flags=re.MULTILINE)
    lines = (head + dict(zip(parts[::2], parts[1::2], strict=True)).get(section, "")).splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    for line in lines:
        name, equals, text = line.partition(" = ")
        if equals:
            defined[name] = Template(text).substitute(defined)
        else:
            name, _, row = line.removeprefix("* ").partition(": ")
            number, _, settings = Template(row).substitute(defined).partition(" ")
            table[name] = int(number), settings
    return table, {line[2:].partition(": ")[0] for line in lines if line.startswith("* ")}


def read_layouts(file: str, section: str = "") -> tuple[dict[str, tuple[int, list[str]]], set[str]]:
    """Return a table of ``layouts.txt`` as ranks and overrides by name, and the names of rows with a star."""
    table, stars = read_table(file, section)
    return {name: (ranks, overrides(settings)) for name, (ranks, settings) in table.items()}, stars


def each_layout(file: str, section: str = "", names: str = "ranks, layout") -> pytest.MarkDecorator:
    """Run a test with each row of a table of ``layouts.txt``; rows without a star are slow."""
    table, stars = read_layouts(file, section)
    return pytest.mark.parametrize(names, rows(table.items(), stars))


TRAINER = {field.name for field in fields(TrainerConfig)}


def overrides(text: str) -> list[str]:
    """Split settings of a table: ``tp=2 optim.lr=1`` is ``trainer.tp=2`` and ``optim.lr=1``."""
    words = re.findall(r"(?:\{.*?\}|\S)+", text)
    return [f"trainer.{word}" if word.partition("=")[0] in TRAINER else word for word in words]
