"""What a search found, as text: a table of settings with their forecast and what was measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from megatron_llama.config.settings import Config
from megatron_llama.system.text_table import text_table
from megatron_llama.system.units import gib, plural
from megatron_llama.tools.tune.candidates import TUNED, Candidate
from megatron_llama.tools.tune.search import Found
from megatron_llama.tools.tune.trial import DONE

SHOWN = 12
_HEADS = ("tp", "pp", "vpp", "dp", "zero", "group", "micro", "recompute")


def table(found: Found, config: Config) -> Iterator[str]:
    """The best, those that were tried, and why the others were left out."""
    tokens = config.trainer.global_batch_size * config.data.length
    tried = found.knowledge.tried
    failed = [each for each, out in tried.values() if out.status != DONE]
    head = ["", *_HEADS, "forecast s", "tokens/s", "memory"]
    head += ["measured s", "tokens/s", "memory", ""] if tried else []
    rows = [head]
    shown = [*enumerate(found.order[:SHOWN], 1), *((0, each) for each in failed)]
    for number, each in shown:
        row = [str(number) if number else "-", *_values(each)]
        row += [f"{each.seconds:.4g}", f"{tokens / each.seconds:,.0f}", gib(each.needs)]
        row += _measured(found, each, tokens) if tried else []
        rows.append(row)
    yield from text_table(rows, left=1)
    if len(found.order) > SHOWN:
        yield f"  and {len(found.order) - SHOWN:,} slower ones that fit"
    yield ""
    yield from reasons(found)


def _values(candidate: Candidate) -> list[str]:
    """The settings' values; a dash where nothing is chosen."""
    values = (candidate.settings[name] for name in TUNED)
    return ["-" if value is None else str(value) for value in values]


def _measured(found: Found, candidate: Candidate, tokens: int) -> list[str]:
    trial = found.knowledge.tried.get(candidate.key)
    if trial is None:
        return ["", "", "", "not tried"]
    out = trial[1]
    seconds = [f"{out.seconds:.4g}", f"{tokens / out.seconds:,.0f}"] if out.seconds else ["", ""]
    memory = gib(found.target.measured(out.memory, candidate.ranks)) if out.memory else ""
    return [*seconds, memory, "" if out.status == DONE else out.status]


def reasons(found: Found) -> Iterator[str]:
    """How many were looked at, and why the others are not in the table."""
    yield f"{found.space.looked_at:,} {plural(found.space.looked_at, 'set')} of settings looked at; left out:"
    dropped = dict(found.space.dropped.most_common())
    known = found.knowledge
    after = sum(each.key not in known.tried and not known.may_fit(each) for each in found.space.candidates)
    if after:
        dropped["does not fit, as trials show"] = after
    yield from (f"  {count:>7,}  {reason}" for reason, count in dropped.items())
    if known.tried:
        yield f"  forecasts of activations are multiplied by {known.memory_scale:.2f}, which follows from the trials"


def comment(found: Found, config: Config, objective: str) -> list[str]:
    """What the experiment's file says about itself."""
    best = found.best
    assert best is not None, "something was found"
    tokens = config.trainer.global_batch_size * config.data.length
    target = str(found.target).removesuffix(", this machine")
    lines = [f"{config.model.name} on {target}: the best settings for {objective} on {time.strftime('%Y-%m-%d')}."]
    lines += ["", "Found by scripts/tune.py. Forecast: a step of " + _numbers(best.seconds, tokens, best.needs)]
    trial = found.knowledge.tried.get(best.key)
    if trial is not None and trial[1].seconds:
        memory = found.target.measured(trial[1].memory or 0, best.ranks)
        lines.append("Measured: a step of " + _numbers(trial[1].seconds, tokens, memory))
        lines.append(f"With {_versions()}, {len(found.knowledge.tried)} trials.")
    else:
        lines.append("Not tried.")
    return lines


def _numbers(seconds: float, tokens: int, memory: int) -> str:
    return f"{seconds:.4g} s, {tokens / seconds:,.0f} tokens/s, {gib(memory)}."


def _versions() -> str:
    from importlib.metadata import version

    python = ".".join(map(str, sys.version_info[:3]))
    return f"Python {python}, torch {version('torch')}, megatron-core {version('megatron-core')}"
