"""The fitted numbers of the time model: constants.json, which `python -m benchmarks fit_planner` writes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("constants.json")


@functools.cache
def fitted() -> dict[str, float]:
    """Each constant by its name; SPECIFICATION in benchmarks/fit_planner.py says what they mean."""
    return {name: float(entry["value"]) for name, entry in provenance()["constants"].items()}


@functools.cache
def provenance() -> dict[str, Any]:
    """The whole file: constants with their meaning, the date, the data, and the errors on rows that were held out."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found
