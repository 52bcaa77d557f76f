"""``objective=max_seq_len``: the longest sequence that fits, by a bisection of the memory forecast for each layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from megatron_llama.config import Config, ConfigError
from megatron_llama.config.settings_table import get
from megatron_llama.system.tables import text_table
from megatron_llama.tools.tune.candidates import TUNED, Candidate, Tuner
from megatron_llama.tools.tune.target import Target
from megatron_llama.topology import Grid

STEP = 64
"""Sequence lengths are multiples of this number of tokens."""
LONGEST = 1 << 24
LENGTH, POSITIONS, BATCH = "data.seq_length", "model.max_position_embeddings", "trainer.global_batch_size"
RECOMPUTE, OFFLOAD = "trainer.recompute", "trainer.offload"
METHODS = {"full": "full", "lora": "LoRA"}
SAVING = {"trainer.micro_batch_size": 1, RECOMPUTE: "full", "trainer.vpp": 1}
"""Settings of least memory, unless the user sets others."""
MLP_CHUNKS = 8  # chunks of the longest sequence in any layout
LAYOUTS = ("1", "all")  # sizes of context parallelism in the table: none, or all ranks that tp and pp leave

Fits = Callable[[Candidate], bool]
SequenceTable = dict[tuple[str, str, str, int], dict[int, int]]
"""Longest sequences that fit, in tokens, by number of ranks; 0 if none fits. A row is (finetuning method, recomputation
and offload, cp, ZeRO stage); cp is ``all`` for all ranks that tp and pp leave."""


def longest_sequence(tuned: Tuner, settings: Mapping[str, Any], ranks: int, fits: Fits) -> int:
    """Return the longest sequence with which ``settings`` fit, a multiple of STEP tokens; 0 if none fits.

    Raises ConfigError if the settings break a rule.
    """
    grid = Grid.of(tuned.config.trainer).resized(tp=settings["trainer.tp"], cp=settings["trainer.cp"])
    unit = math.lcm(STEP, grid.sequence_unit(sp=True))

    def fit(count: int) -> bool:
        return fits(tuned.candidate({**settings, **length_settings(tuned.config, count * unit)}, ranks))

    low, high = 0, 1
    while high * unit <= LONGEST and fit(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low * unit


def length_settings(config: Config, tokens: int) -> dict[str, int]:
    """Return the settings for sequences of ``tokens`` tokens, with enough positions."""
    more = {POSITIONS: tokens} if tokens > config.model.max_position_embeddings else {}
    return {LENGTH: tokens, **more}


def longest_in_any_layout(tuned: Tuner, fits: Fits, progress: Callable[[int], None]) -> tuple[int, dict[str, int]]:
    """Return the longest sequence of any layout of the target, 0 if none fits, and the settings that it needs.

    The feed-forward network runs in chunks if the model has positions for the longer sequence.

    Raises ConfigError if all layouts break a rule.
    """
    tokens = _longest_in_any_layout(tuned, fits, progress)
    trainer, positions = tuned.config.trainer, tuned.config.model.max_position_embeddings
    excluded = trainer.compile or trainer.float8 or tuned.config.finetune.lora_dropout
    if tokens >= positions or trainer.mlp_chunks > 1 or excluded:
        return tokens, {}
    changed = deepcopy(tuned.config)
    changed.trainer.mlp_chunks = MLP_CHUNKS
    in_chunks = _longest_in_any_layout(Tuner(changed, tuned.fixed, tuned.target), fits, progress)
    return (in_chunks, {"trainer.mlp_chunks": MLP_CHUNKS}) if in_chunks > tokens else (tokens, {})


def _longest_in_any_layout(tuned: Tuner, fits: Fits, progress: Callable[[int], None]) -> int:
    saving = Tuner(tuned.config, {**SAVING, **tuned.fixed}, tuned.target, context=True)
    lengths, problem, done = [], None, 0
    for ranks in tuned.target.world_sizes():
        for layout in saving.layouts(ranks):
            size = saving.fixed["trainer.micro_batch_size"]
            try:
                lengths.append(longest_sequence(saving, {**layout, "trainer.micro_batch_size": size}, ranks, fits))
            except ConfigError as error:
                problem = error
            done += 1
            progress(done)
    if not lengths and problem is not None:
        raise problem
    return max(lengths, default=0)


def savings(config: Config, fixed: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return settings by label: without and with recomputation, then with offloaded activations (ZeRO 3 only)."""
    kinds = [fixed[RECOMPUTE]] if RECOMPUTE in fixed else ["none", "full"]
    rows: dict[str, dict[str, Any]] = {kind: {RECOMPUTE: kind} for kind in kinds}
    if RECOMPUTE not in fixed and not config.trainer.offload:
        rows["full, offload"] = {RECOMPUTE: "full", OFFLOAD: ["activations"]}
    return rows


def sequence_table(
    config: Config, fixed: Mapping[str, Any], target: Target, progress: Callable[[int], None]
) -> SequenceTable:
    """Return the longest sequences by method, recomputation, cp, ZeRO stage and number of ranks (1, 2, 4, ...).

    A global batch that does not divide by the ranks is rounded up.
    """
    table: SequenceTable = {}
    done = itertools.count(1)
    tp, pp = fixed.get("trainer.tp", 1), fixed.get("trainer.pp", 1)
    for method in METHODS:
        changed = deepcopy(config)
        changed.finetune.method = method
        tuned = Tuner(changed, fixed, target)
        for saving, more, cp, zero in _table_rows(config, fixed):
            block = tp * pp * (1 if cp == "all" else int(cp))
            for ranks in (block << power for power in range((target.ranks // block).bit_length())):
                size = ranks // (tp * pp) if cp == "all" else int(cp)
                grid = Grid.of(config.trainer).resized(tp=tp, pp=pp, cp=size).with_world(ranks)
                settings = {**_cell_settings(config, fixed, grid, zero), **more}
                fits = partial(Candidate.fits_on, target=target.subset(ranks))
                try:
                    tokens = longest_sequence(tuned, settings, ranks, fits)
                except ConfigError:  # a rule rejects the combination with context parallelism or offload
                    if size == 1 and OFFLOAD not in settings:
                        raise
                    tokens = 0
                table.setdefault((method, saving, cp, zero), {})[ranks] = tokens
                progress(next(done))
    return table


def _table_rows(config: Config, fixed: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], str, int]]:
    """Yield (label of the savings, their settings, cp, ZeRO stage) of each row of a method."""
    zeros = [fixed["trainer.zero"]] if "trainer.zero" in fixed else list(range(4))
    contexts = [str(fixed["trainer.cp"])] if "trainer.cp" in fixed else list(LAYOUTS)
    for (saving, more), cp in itertools.product(savings(config, fixed).items(), contexts):
        for zero in zeros[-1:] if OFFLOAD in more else zeros:
            yield saving, more, cp, zero


def _cell_settings(config: Config, fixed: Mapping[str, Any], grid: Grid, zero: int) -> dict[str, Any]:
    """Return the settings of one cell, with all names that ``Tuner.candidate`` requires."""
    sizes = {f"trainer.{name}": grid.sizes[name] for name in ("tp", "cp", "pp", "dp")}
    values = {**dict.fromkeys(TUNED), **SAVING, **fixed, **sizes}
    unit = grid.sizes["dp"] * values["trainer.micro_batch_size"]
    batch = -(-get(config, BATCH) // unit) * unit
    return {**values, "trainer.zero": zero, "trainer.shard_group": None, BATCH: batch}


def sequence_lines(table: SequenceTable, config: Config) -> Iterator[str]:
    """Yield the table: one row per method, recomputation, cp and ZeRO stage, one column per number of devices."""
    yield "longest data.seq_length that fits, by number of devices"
    yield from text_table(sequence_rows(table), left=3)
    positions = config.model.max_position_embeddings
    if any(tokens > positions for row in table.values() for tokens in row.values()):
        yield f"  more than {positions:,} tokens need a larger model.max_position_embeddings"


def sequence_rows(table: SequenceTable) -> list[list[str]]:
    """Return the rows of the table, the head first."""
    ranks = sorted({number for row in table.values() for number in row})
    rows = [["finetune", "recompute", "cp", "zero", *map(str, ranks)]]
    for (method, saving, cp, zero), row in table.items():
        shown = [f"{row[number]:,}" if row.get(number) else "-" for number in ranks]
        rows.append([METHODS[method], saving, cp, str(zero), *shown])
    return rows
