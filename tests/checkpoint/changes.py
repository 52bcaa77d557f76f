"""A changed value for each setting, applied to a run that resumes from a checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from megatron_llama.checkpoint.changed_settings import Difference, check_allowed, find_differences
from megatron_llama.checkpoint.manifest import State
from megatron_llama.config import ConfigError
from megatron_llama.data.resume_record import make_record
from megatron_llama.plan import Plan, resolve
from megatron_llama.topology import AXIS_NAMES
from tests.config.helpers import everything_exists, make
from tests.data.files import numbered, write_indexed

STEP = 3


@dataclass(frozen=True)
class Change:
    now: Any
    """New value. For prefixes: names in the datasets' folder."""
    base: dict[str, Any] = field(default_factory=dict)
    """Other settings of the first run."""
    also: dict[str, Any] = field(default_factory=dict)
    """Other settings that the new value requires."""
    world: int = 1
    becomes: dict[str, Any] = field(default_factory=dict)
    """Dataset that the launcher substitutes for raw data files."""

    @property
    def world_before(self) -> int:
        """Ranks of the first run."""
        return math.prod(self.base.get(f"trainer.{name}", 1) for name in AXIS_NAMES)


CHANGES = {
    name: Change(**change if isinstance(change, dict) else {"now": change})
    for name, change in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))[
        "changes"
    ].items()
}


def write_datasets(folder: Path) -> None:
    """Write the datasets a and b."""
    for name, count, first_id in (("a", 200, 1), ("b", 100, 10000)):
        examples = [document for document in numbered(count, first_id) if 2 <= len(document) <= 32]
        write_indexed(folder / name, examples)
        write_indexed(folder / f"{name}_mask", [[1] * len(document) for document in examples], kind="B")


def plan_in(folder: Path, world: int, settings: dict[str, Any]) -> Plan:
    """Plan a small run on the datasets in ``folder``."""
    defaults = {
        "data.mock": False,
        "data.prefixes": [0.5, "a", 0.5, "b"],
        "data.split": "80,20,0",
        "data.seq_length": 32,
        "model.vocab_size": 20000,
        "model.hidden_size": 240,
        "model.head_dim": 60,
    }
    settings = _placed(folder, {**defaults, **settings})
    with patch("megatron_llama.plan.rules.data.find_spec", lambda name: name):  # every extra is installed
        return resolve(make(**settings), world, exists=everything_exists)


def _placed(folder: Path, value: Any) -> Any:
    """Replace dataset names by paths in ``folder``."""
    if isinstance(value, dict):
        return {key: _placed(folder, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_placed(folder, item) for item in value]
    return str(folder / value) if value in ("a", "b", "moved") else value


def checkpoint_of(plan: Plan, step: int = STEP) -> State:
    """Return the state of a checkpoint of the plan, after a JSON round trip."""
    position = plan.batches.after(step)
    state = State(
        step=step,
        consumed_samples=position.samples,
        optimizer=plan.config.optim.name,
        updates=step,
        world_size=plan.world_size,
        settings=asdict(plan.config),
        consumed_tokens=position.tokens,
        data=make_record(plan),
    )
    return State(**json.loads(json.dumps(asdict(state))))


@cache
def differences_of(name: str, folder: Path, step: int = STEP) -> list[Difference]:
    """Return all differences of a resumed run with the changed setting."""
    change = CHANGES[name]
    before = plan_in(folder, change.world_before, change.base)
    changed = change.becomes or {**change.also, name: change.now}
    after = plan_in(folder, change.world, {**change.base, **changed})
    return find_differences(after, checkpoint_of(before, step), make_record(after))


def outcome(differences: list[Difference]) -> str:
    """Return the effect of the differences on a resumed run."""
    for allow in ([], ["data"], ["batch"], ["optim"]):
        try:
            check_allowed(differences, allow, Path("step_00000003"))
        except ConfigError:
            continue
        return f"allow=[{allow[0]}]" if allow else "logged" if differences else "free"
    return "fixed"
