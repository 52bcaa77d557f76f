"""What trials teach about those that were not made: how far the forecast of memory and time is off."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_llama.plan.memory import SURE
from megatron_llama.tools.tune.candidates import TUNED, Candidate
from megatron_llama.tools.tune.target import Target
from megatron_llama.tools.tune.trial import DONE, MEMORY, SLOW, Outcome

if TYPE_CHECKING:
    import numpy as np

NOISE = 1.1
"""Times of two trials of the same settings may differ by so much."""
FINALISTS = 3
DOUBT = 1.0
"""Trials' worth of belief that a setting's value needs no correction (the ridge of the regression)."""

UNKNOWN_LIMIT = 3.0


@dataclass
class Knowledge:
    """Trials and what follows from them."""

    target: Target
    tried: dict[str, tuple[Candidate, Outcome]] = field(default_factory=dict)
    """By the settings as they are typed."""

    def add(self, candidate: Candidate, outcome: Outcome) -> None:
        """Takes in a trial."""
        self.tried[candidate.key] = (candidate, outcome)

    @property
    def best(self) -> tuple[Candidate, Outcome] | None:
        """The fastest of those that came to an end."""
        done = [(each, out) for each, out in self.tried.values() if out.status == DONE and out.seconds]
        return min(done, key=lambda trial: trial[1].seconds or 0.0, default=None)

    def close(self) -> list[Candidate]:
        """The fastest, and others that may be as fast, as far as one trial of each can tell: to be tried again."""
        done = [(out.seconds, each) for each, out in self.tried.values() if out.status == DONE and out.seconds]
        done.sort(key=lambda trial: trial[0])
        return [each for seconds, each in done[:FINALISTS] if seconds <= NOISE * done[0][0]]

    @property
    def timed(self) -> int:
        """Trials of which a time is known."""
        return sum(out.seconds is not None for _, out in self.tried.values())

    def smallest_failure(self, ranks: int) -> int | None:
        """Bytes, by the corrected forecast, of the least that ran out of memory with so many ranks. What a rank needs
        before it has a tensor is known less well than what its tensors need: other numbers are not compared."""
        failed = (each for each, out in self.tried.values() if out.status == MEMORY and each.ranks == ranks)
        return min(map(self.needs, failed), default=None)

    @property
    def memory_scale(self) -> float:
        """By what the forecast of a rank's activations and buffers is to be multiplied: the middle of what runs
        reported over it, and at least what it takes for those that ran out of memory not to fit. Never below 1: a peak
        may be missed."""
        target, scale = self.target, 1.0
        ratios, bounds = [], []
        for each, out in self.tried.values():
            beside, sharers = target.beside(each.ranks), target.sharers(each.ranks)
            if out.status == DONE and out.memory:
                peak = (target.measured(out.memory, each.ranks) - beside) / sharers
                ratios.append((peak - each.first_states) / max(1, each.first_peak - each.first_states))
            elif out.status == MEMORY:
                peak = (target.room - beside) / sharers
                bounds.append((peak - each.states) / max(1, each.peak - each.states))
        if ratios:
            scale = max(scale, statistics.median(ratios))
        # What fails at a third of what there is has met a limit of which nothing is known.
        return max([scale, *(bound for bound in bounds if bound < UNKNOWN_LIMIT)])

    def needs(self, candidate: Candidate) -> int:
        """The corrected forecast, bytes of a device or host."""
        return self.target.needs(candidate.grown_peak(self.memory_scale), candidate.ranks)

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether it is worth a trial: less than what ran out of memory, and not sure to be too much."""
        failure = self.smallest_failure(candidate.ranks)
        needs = self.needs(candidate)
        return SURE * needs <= self.target.room and (failure is None or needs < failure)

    def seconds(self, candidates: Sequence[Candidate]) -> list[float]:
        """Of a step of each: the forecast times what trials say about it.

        The logarithm of measured over forecast time is explained by the values of the settings, each of which is
        believed to need no correction until trials say so (ridge regression; the mean is free).
        """
        import numpy as np

        timed = [(each, out.seconds) for each, out in self.tried.values() if out.seconds and out.status in (DONE, SLOW)]
        forecast = np.log([each.seconds for each in candidates])
        if not timed:
            return [float(each) for each in np.exp(forecast)]
        off = np.log([seconds / each.seconds for each, seconds in timed])
        columns = {value: number for number, value in enumerate(sorted(_values(each for each, _ in timed)))}
        seen = _one_hot([each for each, _ in timed], columns)
        weights = np.linalg.solve(seen.T @ seen + DOUBT * np.eye(len(columns)), seen.T @ (off - off.mean()))
        return [float(each) for each in np.exp(forecast + off.mean() + _one_hot(candidates, columns) @ weights)]

    def next(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """What to try next: the fastest by what is known. Every second time the fastest of a grid of which no time is
        known yet, as long as there is one. None where nothing is left."""
        left = [each for each in candidates if each.key not in self.tried and self.may_fit(each)]
        if len(self.tried) % 2:
            grids = {each.grid for each, out in self.tried.values() if out.status != MEMORY}
            left = [each for each in left if each.grid not in grids] or left
        return min(zip(self.seconds(left), left, strict=True), key=lambda pair: pair[0])[1] if left else None


def _values(candidates: Iterable[Candidate]) -> set[str]:
    return {f"{name}={each.settings[name]}" for each in candidates for name in TUNED}


def _one_hot(candidates: Sequence[Candidate], columns: dict[str, int]) -> np.ndarray:
    """[candidates, columns]: which values each has; values that no trial had have no column."""
    import numpy as np

    found = np.zeros((len(candidates), len(columns)))
    for row, each in enumerate(candidates):
        for value in _values([each]):
            if value in columns:
                found[row, columns[value]] = 1.0
    return found
