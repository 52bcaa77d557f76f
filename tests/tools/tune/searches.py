"""Searches with simulated trials."""

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
from megatron_llama.tools.tune.trial import DONE, MEMORY, SLOW, SLOW_FACTOR, Journal, TrialOutcome

WORDS = ("model=llama_15m", "data=mock", "device=cpu", "trainer.global_batch_size=8", "data.seq_length=256")


@functools.cache
def tuned(*words: str, cores: int = 2, memory: int = 0) -> Tuner:
    """Return the tuner of a command line on a host of ``cores`` cores and, unless 0, ``memory`` bytes."""
    from megatron_llama.tools.cluster_settings import ClusterConfig

    config = parse_overrides([*WORDS, *words, *NO_FILES, "dry_run=true"])
    target, problems = find_target(config, ClusterConfig(devices_per_node=cores), ())
    assert target is not None and not problems
    target = replace(target, memory_bytes=memory or target.memory_bytes, calibration=None)
    return Tuner(config, fixed_settings(config, list(words)), target)


@functools.cache
def space_of(tuner: Tuner, **options: float) -> CandidateSpace:
    """Return the candidates of a tuner, cached."""
    return tuner.enumerate(**options)


class SimulatedMachine:
    """Machine whose step times and activations are the forecast times known factors.

    ``factors`` has a factor of the step time per setting value; ``memory`` is the factor of activations.
    """

    def __init__(self, target: Target, factors: Mapping[str, float], memory: float = 1.0) -> None:
        self.target, self.factors, self.memory = target, factors, memory
        self.tried: list[Candidate] = []

    def seconds(self, each: Candidate) -> float:
        """Return the true seconds of a step."""
        seconds = each.seconds
        for value in each.key.replace("trainer.", "").split():
            seconds *= self.factors.get(value, 1.0)
        return seconds

    def fits(self, each: Candidate) -> bool:
        """Whether a run does not run out of memory."""
        return self.target.required_bytes(each.grown_peak(self.memory), each.ranks) <= self.target.usable_bytes

    def attempt(self, each: Candidate, best: float | None) -> TrialOutcome:
        """Simulate a trial."""
        self.tried.append(each)
        if not self.fits(each):
            return TrialOutcome(MEMORY)
        seconds = self.seconds(each)
        first = each.first_states + self.memory * (each.first_peak - each.first_states)
        reported = round(first) + (365 << 20)
        return TrialOutcome(SLOW if best and seconds > SLOW_FACTOR * best else DONE, seconds, reported)


def search_on(machine: SimulatedMachine, tuner: Tuner, trials: int, folder: Path) -> SearchResult:
    """Search with the trials of ``machine``."""
    return search(tuner, space_of(tuner), trials, Journal(folder, {"words": list(WORDS)}), machine.attempt)


def exhaustive_best(machine: SimulatedMachine, tuner: Tuner) -> float:
    """Return the seconds of the fastest candidate that runs, by an exhaustive search."""
    return min(machine.seconds(each) for each in space_of(tuner, memory_factor=0.0).candidates if machine.fits(each))
