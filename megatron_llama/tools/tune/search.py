"""The search: candidates by forecast, then trials of the most promising, each of which corrects the forecast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_llama.config import ConfigError
from megatron_llama.system.units import gib
from megatron_llama.tools.bar import Bar, bar
from megatron_llama.tools.settings import TuneConfig
from megatron_llama.tools.tune.candidates import Candidate, Space, Tuned
from megatron_llama.tools.tune.journal import Journal
from megatron_llama.tools.tune.knowledge import Knowledge
from megatron_llama.tools.tune.target import Target
from megatron_llama.tools.tune.trial import DONE, MEMORY, Outcome, run_trial

AGAIN = 2
Try = Callable[[Candidate, float | None], Outcome]
"""Tries a candidate; the second argument are the seconds of the fastest step so far."""


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    target: Target
    space: Space
    knowledge: Knowledge
    order: list[Candidate]
    """The candidates, the best first: those that were tried and ended well by what was measured, then the others by
    the corrected forecast."""

    @property
    def best(self) -> Candidate | None:
        """The settings to take; None where nothing fits."""
        return self.order[0] if self.order else None


def forecast_space(tuned: Tuned) -> Space:
    """All candidates of a target. Raises ConfigError where every one of them breaks a rule."""
    # Only trials may find out whether what is close to the limit fits.
    sure = {} if tuned.target.here else {"sure": 1.0}
    with bar("forecast", "settings") as shown:
        space = tuned.space(progress=shown.show, **sure)
    if not space.candidates and not space.dropped["does not fit"]:
        if not space.looked_at:  # what is given makes no grid of these devices: the rules say why
            tuned.plan({"trainer.dp": None, **tuned.kept}, tuned.target.ranks)
        if space.broken:
            raise ConfigError(space.broken)
    return space


def search(tuned: Tuned, space: Space, trials: int, journal: Journal | None, attempt: Try) -> Found:
    """Makes ``trials`` trials that take a time, those of the journal included; as many others may run out of memory."""
    knowledge = Knowledge(tuned.target)
    if trials and journal is not None:
        for candidate, outcome in journal.known(space.candidates):
            knowledge.add(candidate, outcome)
        with bar("trials", "trials", trials) as shown:
            shown.start_at(min(trials, knowledge.timed))
            _try(knowledge, space.candidates, trials, journal, attempt, shown)
        with bar("the best again", "trials") as shown:
            _try_again(knowledge, journal, attempt, shown)
    return Found(tuned.target, space, knowledge, ranked(knowledge, space.candidates))


def _try(
    knowledge: Knowledge, candidates: Sequence[Candidate], trials: int, journal: Journal, attempt: Try, shown: Bar
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
        shown.say(f"trial {number + 1}: {candidate.key}: {in_words(outcome)}")
        shown.show(knowledge.timed)


def _try_again(knowledge: Knowledge, journal: Journal, attempt: Try, shown: Bar) -> None:
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
            shown.say(f"again: {candidate.key}: {in_words(found)}")


def in_words(outcome: Outcome) -> str:
    """How a trial ended, in a line."""
    words = outcome.status if outcome.status != DONE else ""
    if outcome.seconds and outcome.status != MEMORY:
        words = f"{words + ', ' if words else ''}{outcome.seconds:.4g} s a step"
    if outcome.memory and outcome.status == DONE:
        words += f", {gib(outcome.memory)}"
    if outcome.said:
        words += f": {outcome.said}"
    return words


def ranked(knowledge: Knowledge, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best first."""
    done = [(out.seconds or 0.0, each) for each, out in knowledge.tried.values() if out.status == DONE]
    left = [each for each in candidates if each.key not in knowledge.tried and knowledge.may_fit(each)]
    rest = [(round(seconds, 6), each) for seconds, each in zip(knowledge.seconds(left), left, strict=True)]
    rest.sort(key=lambda pair: (pair[0], pair[1].order[1:]))
    return [each for _, each in [*sorted(done, key=lambda pair: pair[0]), *rest]]


def attempt_with(words: Sequence[str], tune: TuneConfig, folder: Path, nodes: int) -> Try:
    """Trials of the real program, in folders below ``folder``."""

    def attempt(candidate: Candidate, best: float | None) -> Outcome:
        name = candidate.key.replace("trainer.", "").replace("=", "").replace(" ", "-")
        return run_trial(candidate, words, tune, folder / name, best, nodes)

    return attempt
