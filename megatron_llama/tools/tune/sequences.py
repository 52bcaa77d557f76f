"""The longest sequences that fit: for each layout by bisecting the forecast of memory, and as a table of ZeRO stages by
device counts, of full fine-tuning and of LoRA."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_llama.config import Config, ConfigError
from megatron_llama.config.fields import get
from megatron_llama.system.text_table import text_table
from megatron_llama.tools.tune.candidates import TUNED, Candidate, Tuned
from megatron_llama.tools.tune.target import Target
from megatron_llama.topology import Grid

STEP = 64
"""Lengths are multiples of this many tokens."""
LONGEST = 1 << 24
LENGTH, POSITIONS, BATCH = "data.seq_length", "model.max_position_embeddings", "trainer.global_batch_size"
METHODS = {"full": "every weight trained", "lora": "LoRA"}
SAVING = {"trainer.micro_batch_size": 1, "trainer.recompute": "full", "trainer.vpp": 1}
"""What a sequence is longest with, where the user does not say otherwise."""

Fits = Callable[[Candidate], bool]


@dataclass(frozen=True)
class Cell:
    """One number of the table."""

    method: str
    zero: int
    ranks: int
    tokens: int
    """Tokens in the longest sequence; 0 where not even the shortest fits."""


def longest(tuned: Tuned, settings: Mapping[str, Any], ranks: int, fits: Fits) -> int:
    """The most tokens in a sequence with which ``settings`` fit, a multiple of 64; 0 where none do.

    Raises ConfigError where the settings break a rule.
    """
    unit = math.lcm(STEP, settings["trainer.tp"])

    def fit(count: int) -> bool:
        return fits(tuned.candidate({**settings, **of_length(tuned.config, count * unit)}, ranks))

    low, high = 0, 1
    while high * unit <= LONGEST and fit(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low * unit


def of_length(config: Config, tokens: int) -> dict[str, int]:
    """Settings for sequences of so many tokens, with positions for all of them."""
    more = {POSITIONS: tokens} if tokens > config.model.max_position_embeddings else {}
    return {LENGTH: tokens, **more}


def longest_of_all(tuned: Tuned, fits: Fits, progress: Callable[[int], None]) -> int:
    """The most tokens that any layout of the target takes; 0 where none fits. Raises ConfigError where all break a
    rule."""
    saving = Tuned(tuned.config, {**SAVING, **tuned.kept}, tuned.target)
    found, broken, done = [], None, 0
    for ranks in tuned.target.worlds():
        for layout in saving.layouts(ranks):
            size = saving.kept["trainer.micro_batch_size"]
            try:
                found.append(longest(saving, {**layout, "trainer.micro_batch_size": size}, ranks, fits))
            except ConfigError as error:
                broken = error
            done += 1
            progress(done)
    if not found and broken is not None:
        raise broken
    return max(found, default=0)


def stage_table(config: Config, kept: Mapping[str, Any], target: Target, progress: Callable[[int], None]) -> list[Cell]:
    """The longest sequence by method, ZeRO stage and number of data-parallel ranks: 1, 2, 4, ... as many as there are.

    A global batch that does not divide by the ranks is taken larger.
    """
    found = []
    tp, pp = kept.get("trainer.tp", 1), kept.get("trainer.pp", 1)
    grid = Grid.of(config.trainer).resized(tp=tp, pp=pp)
    for method in METHODS:
        changed = deepcopy(config)
        changed.finetune.method = method
        tuned = Tuned(changed, kept, target)
        for zero in [kept["trainer.zero"]] if "trainer.zero" in kept else range(4):
            for ranks in counts(target, grid.block):
                settings = _plain(config, kept, tp, pp, grid.with_world(ranks).sizes["dp"], zero)
                tokens = longest(tuned, settings, ranks, partial(_fits_on, target.part(ranks)))
                found.append(Cell(method, zero, ranks, tokens))
                progress(len(found))
    return found


def _fits_on(target: Target, each: Candidate) -> bool:
    return target.needs(each.peak, each.ranks) <= target.room


def counts(target: Target, block: int) -> list[int]:
    """``block``, twice, four times as many ranks, up to all of the target."""
    return [block << power for power in range(target.ranks.bit_length()) if block << power <= target.ranks]


def _plain(config: Config, kept: Mapping[str, Any], tp: int, pp: int, dp: int, zero: int) -> dict[str, Any]:
    """Settings of one cell, with all that ``Tuned.candidate`` wants."""
    values = {**dict.fromkeys(TUNED), **SAVING, **kept, "trainer.tp": tp, "trainer.pp": pp}
    unit = dp * values["trainer.micro_batch_size"]
    batch = -(-get(config, BATCH) // unit) * unit
    return {**values, "trainer.dp": dp, "trainer.zero": zero, "trainer.shard_group": None, BATCH: batch}


def table_lines(cells: list[Cell], config: Config) -> Iterator[str]:
    """The table: a row for each method and stage, a column for each number of devices."""
    ranks = sorted({cell.ranks for cell in cells})
    tokens = {(cell.method, cell.zero, cell.ranks): cell.tokens for cell in cells}
    rows = [["longest data.seq_length", "zero", *(f"{n} device{'s' * (n > 1)}" for n in ranks)]]
    for method, words in METHODS.items():
        for zero in sorted({cell.zero for cell in cells}):
            first = words if zero == min(cell.zero for cell in cells) else ""
            rows.append([first, str(zero), *(_shown(tokens[method, zero, n]) for n in ranks)])
    yield from text_table(rows, left=1)
    positions = config.model.max_position_embeddings
    if any(cell.tokens > positions for cell in cells):
        yield f"  {config.model.name} has {positions:,} positions; longer sequences need model.max_position_embeddings"


def _shown(tokens: int) -> str:
    return f"{tokens:,}" if tokens else "-"
