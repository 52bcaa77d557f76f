"""The search: candidates by forecast, then trials of the most promising, each of which corrects the forecast."""
from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.config import ConfigError
from megatron_llama.plan.memory import SURE
from megatron_llama.system.tables import gib
from megatron_llama.tools.common import ProgressBar, progress_bar
from megatron_llama.tools.settings import TuneConfig
from megatron_llama.tools.tune.candidates import TUNED, Candidate, CandidateSpace, Tuner
from megatron_llama.tools.tune.target import Target
from megatron_llama.tools.tune.trial import DONE, MEMORY, SLOW, Journal, TrialOutcome, run_trial

if TYPE_CHECKING:
    import numpy as np


AGAIN = 2
Try = Callable[[Candidate, float | None], TrialOutcome]
"""Tries a candidate; the second argument are the seconds of the fastest step so far."""


@dataclass(frozen=True)
class SearchResult:
    """What a search came to."""

    target: Target
    space: CandidateSpace
    knowledge: TrialHistory
    order: list[Candidate]
    """The candidates, the best first: those that were tried and ended well by what was measured, then the others by
    the corrected forecast."""

    @property
    def best(self) -> Candidate | None:
        """The settings to take; None where nothing fits."""
        return self.order[0] if self.order else None


def forecast_space(tuned: Tuner) -> CandidateSpace:
    """All candidates of a target. Raises ConfigError where every one of them breaks a rule."""
    # Only trials may find out whether what is close to the limit fits.
    memory_factor = {} if tuned.target.here else {"memory_factor": 1.0}
    with progress_bar("forecast", "settings") as shown:
        space = tuned.enumerate(progress=shown.show, **memory_factor)
    if not space.candidates and not space.dropped["does not fit"]:
        if not space.looked_at:  # what is given makes no grid of these devices: the rules say why
            tuned.plan({"trainer.dp": None, **tuned.fixed}, tuned.target.ranks)
        if space.broken:
            raise ConfigError(space.broken)
    return space


def search(tuned: Tuner, space: CandidateSpace, trials: int, journal: Journal | None, attempt: Try) -> SearchResult:
    """Makes ``trials`` trials that take a time, those of the journal included; as many others may run out of memory."""
    knowledge = TrialHistory(tuned.target)
    if trials and journal is not None:
        for candidate, outcome in journal.known(space.candidates):
            knowledge.add(candidate, outcome)
        with progress_bar("trials", "trials", trials) as shown:
            shown.start_at(min(trials, knowledge.timed))
            _try(knowledge, space.candidates, trials, journal, attempt, shown)
        with progress_bar("the best again", "trials") as shown:
            _try_again(knowledge, journal, attempt, shown)
    return SearchResult(tuned.target, space, knowledge, ranked(knowledge, space.candidates))


def _try(
    knowledge: TrialHistory,
    candidates: Sequence[Candidate],
    trials: int,
    journal: Journal,
    attempt: Try,
    shown: ProgressBar,
) -> None:
    """Trial after trial, the one from which most is to be hoped next."""
    while knowledge.timed < trials and len(knowledge.tried) < 2 * trials:
        candidate = knowledge.next(candidates)
        if candidate is None:
            return
        number = len(knowledge.tried)
        shown.show(knowledge.timed, candidate.key)
        best = knowledge.best
        outcome = attempt(candidate, best[1].seconds if best else None)
        knowledge.add(candidate, outcome)
        journal.add(candidate, outcome)
        shown.print_line(f"trial {number + 1}: {candidate.key}: {in_words(outcome)}")
        shown.show(knowledge.timed)


def _try_again(knowledge: TrialHistory, journal: Journal, attempt: Try, shown: ProgressBar) -> None:
    """The fastest few, where they are close: AGAIN times more each, in turn, so that what else the machine does while
    one of them runs does not decide."""
    finalists, done = knowledge.close(), 0
    for round_number in range(1, AGAIN + 1) if len(finalists) > 1 else ():
        for candidate in finalists:
            before = knowledge.tried[candidate.key][1]
            if before.times > round_number or before.status != DONE:
                continue  # made before an interruption, or failed in the round before
            shown.show(done, candidate.key)
            found = attempt(candidate, None)
            outcome = found  # one that fails once is no choice
            if found.status == DONE and found.seconds and before.seconds:
                outcome = replace(before, seconds=min(before.seconds, found.seconds), times=before.times + 1)
            knowledge.add(candidate, outcome)
            journal.add(candidate, outcome)
            done += 1
            shown.print_line(f"again: {candidate.key}: {in_words(found)}")


def in_words(outcome: TrialOutcome) -> str:
    """How a trial ended, in a line."""
    words = outcome.status if outcome.status != DONE else ""
    if outcome.seconds and outcome.status != MEMORY:
        words = f"{words + ', ' if words else ''}{outcome.seconds:.4g} s a step"
    if outcome.memory and outcome.status == DONE:
        words += f", {gib(outcome.memory)}"
    if outcome.said:
        words += f": {outcome.said}"
    return words


def ranked(knowledge: TrialHistory, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best first."""
    done = [(out.seconds or 0.0, each) for each, out in knowledge.tried.values() if out.status == DONE]
    left = [each for each in candidates if each.key not in knowledge.tried and knowledge.may_fit(each)]
    rest = [(round(seconds, 6), each) for seconds, each in zip(knowledge.seconds(left), left, strict=True)]
    rest.sort(key=lambda pair: (pair[0], pair[1].order[1:]))
    return [each for _, each in [*sorted(done, key=lambda pair: pair[0]), *rest]]


def attempt_with(words: Sequence[str], tune: TuneConfig, folder: Path, nodes: int) -> Try:
    """Trials of the real program, in folders below ``folder``."""

    def attempt(candidate: Candidate, best: float | None) -> TrialOutcome:
        name = candidate.key.replace("trainer.", "").replace("=", "").replace(" ", "-")
        return run_trial(candidate, words, tune, folder / name, best, nodes)

    return attempt


# What trials teach about those that were not made: how far the forecast of memory and time is off.


NOISE = 1.1
"""Times of two trials of the same settings may differ by so much."""
FINALISTS = 3
DOUBT = 1.0
"""Trials' worth of belief that a setting's value needs no correction (the ridge of the regression)."""

UNKNOWN_LIMIT = 3.0


@dataclass
class TrialHistory:
    """Trials and what follows from them."""

    target: Target
    tried: dict[str, tuple[Candidate, TrialOutcome]] = field(default_factory=dict)
    """By the settings as they are typed."""

    def add(self, candidate: Candidate, outcome: TrialOutcome) -> None:
        """Takes in a trial."""
        self.tried[candidate.key] = (candidate, outcome)

    @property
    def best(self) -> tuple[Candidate, TrialOutcome] | None:
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
