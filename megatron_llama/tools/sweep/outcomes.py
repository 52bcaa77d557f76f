"""What has become of a sweep's runs, in ``<folder>/sweep.json``: a sweep that was interrupted goes on from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from megatron_llama.config import ConfigError, Problem
from megatron_llama.system.exit_status import EXIT_RESTART, EXIT_USER
from megatron_llama.system.files import read_json, write_atomically
from megatron_llama.tools.sweep.combinations import Combination, Sweep

FILE = "sweep.json"


@dataclass(frozen=True)
class Outcome:
    """What is known of one run."""

    overrides: tuple[str, ...]
    status: int | None = None
    """Its exit status; None before its end."""
    job: str | None = None
    """The number of its Slurm job."""

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.status == 0

    @property
    def in_words(self) -> str:
        """For the table."""
        if self.status is None:
            return f"job {self.job}" if self.job else "not started"
        words = {0: "done", EXIT_USER: "refused", EXIT_RESTART: "stopped, saved"}
        return words.get(self.status, f"failed, status {self.status}")


class Record:
    """The outcomes of a sweep's runs, kept on disk."""

    def __init__(self, sweep: Sweep) -> None:
        """Reads what an earlier start has left. A run whose command line has changed begins its life anew; its folder,
        with its checkpoints, is as the run itself finds it. Raises ConfigError."""
        self._path = sweep.folder / FILE
        known = self._read()
        self._outcomes = {
            one.name: known[one.name]
            if one.name in known and known[one.name].overrides == one.overrides
            else Outcome(one.overrides)
            for one in sweep.combinations
        }
        self._others = {name: outcome for name, outcome in known.items() if name not in self._outcomes}

    def __getitem__(self, run: Combination) -> Outcome:
        return self._outcomes[run.name]

    def note(self, run: Combination, *, status: int | None = None, job: str | None = None) -> None:
        """Keeps what has become of a run."""
        self._outcomes[run.name] = replace(self._outcomes[run.name], status=status, job=job)
        runs = {name: asdict(outcome) for name, outcome in {**self._others, **self._outcomes}.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps({"runs": runs}, indent=1) + "\n")

    def _read(self) -> dict[str, Outcome]:
        if not self._path.exists():
            return {}
        try:
            found: Mapping[str, Mapping] = read_json(self._path)["runs"]
            return {
                name: Outcome(tuple(map(str, run["overrides"])), run["status"], run["job"])
                for name, run in found.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            rule = f"can't be read as the record of a sweep: {error}"
            raise ConfigError(
                [Problem(str(self._path), None, rule, "remove it: each run then looks for itself")]
            ) from None
