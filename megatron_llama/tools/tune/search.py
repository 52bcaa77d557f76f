"""Search: forecast all candidates, run trials of the fastest ones, and correct the forecast after each trial."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megatron_llama.config import ConfigError
from megatron_llama.plan.memory import SURE
from megatron_llama.system.progress import ProgressBar
from megatron_llama.system.tables import gib
from megatron_llama.system.wrapping import fill
from megatron_llama.tools.tune.candidates import TUNED, Candidate, CandidateSpace, Tuner
from megatron_llama.tools.tune.target import Target
from megatron_llama.tools.tune.trial import DONE, MEMORY, SLOW, Journal, TrialOutcome

if TYPE_CHECKING:
    import numpy as np


REPEATS = 2  # repeated trials of each finalist
TrialFunction = Callable[[Candidate, float | None], TrialOutcome]
"""Runs a trial of (candidate, seconds of the fastest step so far)."""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    target: Target
    space: CandidateSpace
    history: TrialHistory
    ranking: list[Candidate]
    """Candidates, fastest first: successful trials by measured time, then the others by corrected forecast."""

    @property
    def best(self) -> Candidate | None:
        """Fastest candidate; None if nothing fits or all trials failed."""
        return self.ranking[0] if self.ranking and (self.history.done or not self.history.tried) else None


def enumerate_candidates(tuned: Tuner) -> CandidateSpace:
    """Return all candidates of a target; raise ConfigError if all settings break a rule."""
    # Candidates close to the memory limit are tried only if trials run on this machine.
    memory_factor = {} if tuned.target.is_local else {"memory_factor": 1.0}
    with ProgressBar("forecast", "settings") as bar:
        space = tuned.enumerate(progress=bar.show, **memory_factor)
    if not space.candidates and not space.rejected["does not fit"]:
        if not space.total:  # no grid of these devices has the fixed settings: raise the rules' problems
            tuned.plan({"trainer.dp": None, **tuned.fixed}, tuned.target.ranks)
        if space.problems:
            raise ConfigError(space.problems)
    return space


def search(
    tuned: Tuner, space: CandidateSpace, trials: int, journal: Journal | None, attempt: TrialFunction
) -> SearchResult:
    """Run a search with at most ``trials`` timed trials, including the journal's.

    The same number of trials may run out of memory.
    """
    history = TrialHistory(tuned.target, journal)
    if trials and journal is not None:
        history.tried.update(journal.recorded(space.candidates))
        with ProgressBar("trials", "trials", trials) as bar:
            bar.start_at(min(trials, history.timed_count))
            _run_trials(history, space.candidates, trials, attempt, bar)
        with ProgressBar("repeat the fastest", "trials") as bar:
            _repeat_finalists(history, attempt, bar)
    return SearchResult(tuned.target, space, history, rank_candidates(history, space.candidates))


def _run_trials(
    history: TrialHistory, candidates: Sequence[Candidate], trials: int, attempt: TrialFunction, bar: ProgressBar
) -> None:
    """Run trials, the most promising candidate first."""
    while history.timed_count < trials and len(history.tried) < 2 * trials:
        candidate = history.choose_next(candidates)
        if candidate is None:
            return
        bar.show(history.timed_count, candidate.key)
        outcome = attempt(candidate, history.done[0][0] if history.done else None)
        history.add(candidate, outcome)
        _print_outcome(bar, f"trial {len(history.tried)}", candidate, outcome)
        bar.show(history.timed_count)


def _repeat_finalists(history: TrialHistory, attempt: TrialFunction, bar: ProgressBar) -> None:
    """Repeat the fastest trials, if close, REPEATS times, alternately so that other load affects all of them."""
    finalists, done = history.finalists(), 0
    for round_number in range(1, REPEATS + 1) if len(finalists) > 1 else ():
        for candidate in finalists:
            before = history.tried[candidate.key][1]
            if before.times > round_number or before.status != DONE:
                continue  # recorded before an interruption, or failed in the previous round
            bar.show(done, candidate.key)
            repeated = attempt(candidate, None)
            outcome = repeated  # a single failure excludes the candidate
            if repeated.status == DONE and repeated.seconds and before.seconds:
                outcome = replace(before, seconds=min(before.seconds, repeated.seconds), times=before.times + 1)
            history.add(candidate, outcome)
            done += 1
            _print_outcome(bar, "repeat", candidate, repeated)


def _print_outcome(bar: ProgressBar, title: str, candidate: Candidate, outcome: TrialOutcome) -> None:
    """Print the settings and the outcome of a trial above the bar."""
    text = fill("  ", f"{candidate.key}: {format_outcome(outcome)}")
    bar.print_line(f"{title}:\n{text}")


def format_outcome(outcome: TrialOutcome) -> str:
    """Format the outcome of a trial in one line."""
    text = outcome.status if outcome.status != DONE else ""
    if outcome.seconds and outcome.status != MEMORY:
        text = f"{text + ', ' if text else ''}{outcome.seconds:.4g} s/step"
    if outcome.memory and outcome.status == DONE:
        text += f", {gib(outcome.memory)}"
    if outcome.message:
        text += f": {outcome.message}"
    return text


def rank_candidates(history: TrialHistory, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort candidates, fastest first."""
    left = [each for each in candidates if each.key not in history.tried and history.can_fit(each)]
    rest = [(round(seconds, 6), each) for seconds, each in zip(history.predict_seconds(left), left, strict=True)]
    rest.sort(key=lambda pair: (pair[0], pair[1].sort_key[1:]))
    return [each for _, each in [*history.done, *rest]]


# Corrections of the memory and time forecasts by trials.
NOISE = 1.1  # ratio by which two trials of the same settings may differ
FINALISTS = 3  # maximum number of candidates whose trials are repeated
RIDGE = 1.0  # regularization of the time correction, in trials
UNKNOWN_LIMIT = 3.0
"""Memory corrections above this factor are ignored: a smaller limit than the device's memory caused the failure."""


@dataclass
class TrialHistory:
    """Trials, and the corrections of forecasts that follow from them."""

    target: Target
    journal: Journal | None = None
    tried: dict[str, tuple[Candidate, TrialOutcome]] = field(default_factory=dict)
    """Trials by ``Candidate.key``."""

    def add(self, candidate: Candidate, outcome: TrialOutcome) -> None:
        """Add a trial, also to the journal."""
        self.tried[candidate.key] = (candidate, outcome)
        if self.journal is not None:
            self.journal.add(candidate, outcome)

    @property
    def done(self) -> list[tuple[float, Candidate]]:
        """(seconds of a step, candidate) of the successful trials, fastest first."""
        done = [(out.seconds, each) for each, out in self.tried.values() if out.status == DONE and out.seconds]
        return sorted(done, key=lambda trial: trial[0])

    def finalists(self) -> list[Candidate]:
        """Return the fastest candidate, and others within the noise of a single trial."""
        return [each for seconds, each in self.done[:FINALISTS] if seconds <= NOISE * self.done[0][0]]

    @property
    def timed_count(self) -> int:
        """Number of trials with a measured time."""
        return sum(out.seconds is not None for _, out in self.tried.values())

    def smallest_failure(self, ranks: int) -> int | None:
        """Return the lowest corrected forecast, in bytes, that ran out of memory on ``ranks`` ranks.

        Other numbers of ranks are not compared, because the memory of a process without tensors is less certain.
        """
        failed = (each for each, out in self.tried.values() if out.status == MEMORY and each.ranks == ranks)
        return min(map(self.required_bytes, failed), default=None)

    @property
    def memory_scale(self) -> float:
        """Correction factor of the forecast of activations and buffers, at least 1.

        The factor is the median ratio of reported to forecast memory, raised so that failed trials do not fit.
        """
        target, scale = self.target, 1.0
        ratios, bounds = [], []
        for each, out in self.tried.values():
            baseline, sharing = target.baseline_bytes(each.ranks), target.ranks_sharing_memory(each.ranks)
            if out.status == DONE and out.memory:
                peak = (target.measured_bytes(out.memory, each.ranks) - baseline) / sharing
                ratios.append((peak - each.first_states) / max(1, each.first_peak - each.first_states))
            elif out.status == MEMORY:
                peak = (target.usable_bytes - baseline) / sharing
                bounds.append((peak - each.states) / max(1, each.peak - each.states))
        if ratios:
            scale = max(scale, statistics.median(ratios))
        return max([scale, *(bound for bound in bounds if bound < UNKNOWN_LIMIT)])

    def required_bytes(self, candidate: Candidate) -> int:
        """Return the corrected forecast, bytes on a device or host."""
        return self.target.required_bytes(candidate.grown_peak(self.memory_scale), candidate.ranks)

    def can_fit(self, candidate: Candidate) -> bool:
        """Whether a candidate may fit, by the corrected forecast and the failed trials."""
        failure = self.smallest_failure(candidate.ranks)
        required_bytes = self.required_bytes(candidate)
        return SURE * required_bytes <= self.target.usable_bytes and (failure is None or required_bytes < failure)

    def predict_seconds(self, candidates: Sequence[Candidate]) -> list[float]:
        """Return the corrected forecast of a step of each candidate.

        Ridge regression explains the log ratio of measured to forecast time by the settings' values. The mean is not
        regularized.
        """
        import numpy as np

        timed = [(each, out.seconds) for each, out in self.tried.values() if out.seconds and out.status in (DONE, SLOW)]
        forecast = np.log([each.seconds for each in candidates])
        if not timed:
            return [float(each) for each in np.exp(forecast)]
        errors = np.log([seconds / each.seconds for each, seconds in timed])
        columns = {value: number for number, value in enumerate(sorted(_values(each for each, _ in timed)))}
        inputs = _one_hot([each for each, _ in timed], columns)
        weights = np.linalg.solve(inputs.T @ inputs + RIDGE * np.eye(len(columns)), inputs.T @ (errors - errors.mean()))
        return [float(each) for each in np.exp(forecast + errors.mean() + _one_hot(candidates, columns) @ weights)]

    def choose_next(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the next candidate to try: the fastest by corrected forecast; None if no candidate is left.

        Every second trial explores a grid without a measured time, if there is one.
        """
        left = [each for each in candidates if each.key not in self.tried and self.can_fit(each)]
        if len(self.tried) % 2:
            grids = {each.grid for each, out in self.tried.values() if out.status != MEMORY}
            left = [each for each in left if each.grid not in grids] or left
        return min(zip(self.predict_seconds(left), left, strict=True), key=lambda pair: pair[0])[1] if left else None


def _values(candidates: Iterable[Candidate]) -> set[str]:
    return {f"{name}={each.settings[name]}" for each in candidates for name in TUNED}


def _one_hot(candidates: Sequence[Candidate], columns: dict[str, int]) -> np.ndarray:
    """Return the one-hot encoding [candidates, columns]; values of no trial have no column."""
    import numpy as np

    encoding = np.zeros((len(candidates), len(columns)))
    for row, each in enumerate(candidates):
        for value in _values([each]):
            if value in columns:
                encoding[row, columns[value]] = 1.0
    return encoding
