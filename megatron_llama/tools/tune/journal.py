"""The trials of a search, in a file that is whole after each of them: a search that was interrupted goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_llama.config.problems import ConfigError, Problem
from megatron_llama.system.files import read_json, write_atomically
from megatron_llama.tools.tune.candidates import Candidate
from megatron_llama.tools.tune.trial import Outcome

FILE = "trials.json"


class Journal:
    """``trials.json`` in the folder of a search."""

    def __init__(self, folder: Path, asked: Mapping[str, Any]) -> None:
        """Reads what is there. ``asked`` is what trials depend on: those of another search are refused with a
        ConfigError, as is a file that can't be read."""
        self.path, self.asked = folder / FILE, dict(asked)
        self._trials: dict[str, Outcome] = {}
        if not self.path.exists():
            return
        advice = "write another tune.dir=PATH, or remove that folder to begin again"
        try:
            found = read_json(self.path)
            self._trials = {each["settings"]: Outcome(**each["outcome"]) for each in found["trials"]}
            before = found["asked"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError([Problem("tune.dir", str(folder), f"{FILE} can't be read: {error}", advice)]) from error
        if before != self.asked:
            differ = ", ".join(name for name in self.asked if before.get(name) != self.asked[name]) or "what was asked"
            rule = f"has the trials of another search, which differs in {differ}"
            raise ConfigError([Problem("tune.dir", str(folder), rule, advice)])

    def known(self, candidates: Sequence[Candidate]) -> list[tuple[Candidate, Outcome]]:
        """Trials of earlier starts, in their order."""
        by_key = {each.key: each for each in candidates}
        return [(by_key[key], outcome) for key, outcome in self._trials.items() if key in by_key]

    def add(self, candidate: Candidate, outcome: Outcome) -> None:
        """Adds a trial. Raises OSError."""
        self._trials[candidate.key] = outcome
        trials = [{"settings": key, "outcome": asdict(each)} for key, each in self._trials.items()]
        write_atomically(self.path, json.dumps({"asked": self.asked, "trials": trials}, indent=1) + "\n")
