"""Searches with trials that are computed, not run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megatron_llama.cli import parse_overrides
from megatron_llama.tools.common import NO_FILES
from megatron_llama.tools.tune.candidates import Candidate, CandidateSpace, Tuner, fixed_settings
from megatron_llama.tools.tune.search import SearchResult, search
from megatron_llama.tools.tune.target import Target, find_target
from megatron_llama.tools.tune.trial import DONE, MEMORY, SLOW, SLOWER, Journal, TrialOutcome

WORDS = ("model=llama_15m", "data=mock", "device=cpu", "trainer.global_batch_size=8", "data.seq_length=256")


@functools.cache
def tuned(*words: str, cores: int = 2, memory: int = 0) -> Tuner:
    """What a command line tunes on a host with so many cores and, unless 0, so much memory."""
    from megatron_llama.tools.settings import ClusterConfig

    config = parse_overrides([*WORDS, *words, *NO_FILES, "dry_run=true"])
    target, problems = find_target(config, ClusterConfig(devices_per_node=cores), ())
    assert target is not None and not problems
    return Tuner(config, fixed_settings(config, list(words)), with_memory(target, memory or target.memory_bytes))


@functools.cache
def space_of(of: Tuner, **options: float) -> CandidateSpace:
    """Its candidates."""
    return of.enumerate(**options)


def with_memory(target: Target, memory: int) -> Target:
    """The same with another memory."""
    return replace(target, memory_bytes=memory, machine=None)


class Machine:
    """A machine on which a step takes the forecast times a factor for each setting's value, and a rank's activations
    the forecast times ``memory``."""

    def __init__(self, target: Target, factors: Mapping[str, float], memory: float = 1.0) -> None:
        self.target, self.factors, self.memory = target, factors, memory
        self.tried: list[Candidate] = []

    def seconds(self, each: Candidate) -> float:
        """Of a step."""
        found = each.seconds
        for value in each.key.replace("trainer.", "").split():
            found *= self.factors.get(value, 1.0)
        return found

    def fits(self, each: Candidate) -> bool:
        """Whether a run comes to an end."""
        return self.target.needs(each.grown_peak(self.memory), each.ranks) <= self.target.room

    def attempt(self, each: Candidate, best: float | None) -> TrialOutcome:
        """A trial."""
        self.tried.append(each)
        if not self.fits(each):
            return TrialOutcome(MEMORY)
        seconds = self.seconds(each)
        first = each.first_states + self.memory * (each.first_peak - each.first_states)
        reported = round(first) + (365 << 20)
        return TrialOutcome(SLOW if best and seconds > SLOWER * best else DONE, seconds, reported)


def found_on(machine: Machine, of: Tuner, trials: int, folder: Path) -> SearchResult:
    """The search, with the trials of ``machine``."""
    return search(of, space_of(of), trials, Journal(folder, {"words": list(WORDS)}), machine.attempt)


def best_of_all(machine: Machine, of: Tuner) -> float:
    """Seconds of the fastest of all candidates that run: an exhaustive trial."""
    return min(machine.seconds(each) for each in space_of(of, memory_factor=0.0).candidates if machine.fits(each))
