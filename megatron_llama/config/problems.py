"""Problems of a config, collected so that all of them are reported at once."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_llama.config.settings import Config

MESSAGE_WIDTH = 100


@dataclass(frozen=True)
class Problem:
    """One reason why a run is refused: the setting, its value, the rule it breaks, and what to write instead."""

    field: str
    """The setting as it is written on the command line, e.g. ``trainer.tp``."""
    value: Any
    """Its value now; None shows no value."""
    rule: str
    """The rule it breaks, as a sentence."""
    instead: str
    """What to write instead, ready to paste where that is possible."""
    machine_specific: bool = False
    """Whether the setting is right and only this machine lacks what it names, which a command, a download or a larger
    machine mends: a dry run notes it and goes on."""


class ConfigError(ValueError):
    """A config that can't work; ``problems`` has every reason, and the message shows them all.

    ``config`` is the config without the values that could not be read, so that ``resolve`` can find further problems;
    None where nothing usable is left.
    """

    def __init__(self, problems: Iterable[Problem], config: Config | None = None) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.config = config
        assert self.problems, "a ConfigError has at least one problem"
        super().__init__(format_problems(self.problems))


def duplicate_length(epochs: int, steps: int) -> Problem:
    """The problem of a run whose length is given twice."""
    rule = f"and trainer.steps={steps} both set the length of the run"
    return Problem("trainer.epochs", epochs, rule, "write trainer.epochs=null, or leave trainer.steps out")


def format_value(value: Any) -> str:
    """``value`` as a user would write it in a config."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(format_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_value(item)}" for key, item in value.items()) + "}"
    return str(value)


def quote_value(value: Any) -> str:
    """``value`` ready for a shell and for Hydra's grammar, in which a comma outside of brackets asks for a sweep."""
    return f"'\"{value}\"'" if isinstance(value, str) and "," in value else format_value(value)


def closest_match(wanted: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name in ``known`` that is most similar to ``wanted``, at least by ``cutoff`` (difflib's ratio); else None."""
    by_lower_case = {name.lower(): name for name in known}
    found = difflib.get_close_matches(wanted.lower(), list(by_lower_case), n=1, cutoff=cutoff)
    return by_lower_case[found[0]] if found else None


def format_problems(problems: ConfigError | Sequence[Problem], what: str = "This config") -> str:
    """The message for the user: each problem's field and value, the rule, and what to write instead; see
    ``group_by_suggestion``."""
    listed = problems.problems if isinstance(problems, ConfigError) else tuple(problems)
    blocks = [f"{what} can't work, for {'one reason' if len(listed) == 1 else f'{len(listed)} reasons'}:"]
    for instead, reasons in group_by_suggestion(listed).items():
        lines: list[str] = []
        before: list[str] = []
        for alike in reasons:
            settings = [f"  {p.field}" if p.value is None else f"  {p.field} = {format_value(p.value)}" for p in alike]
            lines += settings if settings != before else []  # one setting may break several rules
            before = settings
            likewise = "; likewise the others" if len(alike) > 1 else ""
            lines.append(fill("    rule     ", alike[0].rule + likewise, MESSAGE_WIDTH))
        blocks.append("\n".join([*lines, fill("    instead  ", instead, MESSAGE_WIDTH)]))
    return "\n\n".join(blocks)


def merge_problems(problems: Iterable[Problem]) -> list[str]:
    """A sentence for each piece of advice; see ``group_by_suggestion``."""
    told = []
    for instead, alike in group_by_suggestion(problems).items():
        reasons: list[str] = []
        before = ""
        for first, *others in alike:
            more = ", ".join(("" if p.field == first.field else f"{p.field}=") + format_value(p.value) for p in others)
            likewise = f"; likewise {more}" if more else ""
            setting = f"{first.field}={format_value(first.value)}: "
            reasons.append(f"{'' if setting == before else setting}{first.rule}{likewise}")
            before = "" if others else setting
        told.append("; ".join([*reasons, instead]))
    return told


def group_by_suggestion(problems: Iterable[Problem]) -> dict[str, list[list[Problem]]]:
    """Problems by what mends them, and those together that break the same rule, so that each is told once: one command
    makes all the datasets of a blend and their tokenizer.

    Where a setting has several problems, only advice that mends the others too is worth telling: of "write a, or b" and
    "write a" the second."""
    listed = list(problems)
    found: dict[str, dict[str, list[Problem]]] = {}
    for problem in listed:
        same = [p.instead for p in listed if (p.field, p.value) == (problem.field, problem.value)]
        within = [instead for instead in same if _alternatives(instead) < _alternatives(problem.instead)]
        instead = min(within, key=lambda text: len(_alternatives(text)), default=problem.instead)
        rule = problem.rule.replace(str(problem.value), "")
        found.setdefault(instead, {}).setdefault(rule, []).append(problem)
    return {instead: list(rules.values()) for instead, rules in found.items()}


def _alternatives(instead: str) -> set[str]:
    """What one may write, of a text such as "write trainer.sp=true, or trainer.async_tp=false"."""
    return set(instead.removeprefix("write ").split(", or "))


def fill(start: str, text: str, width: int) -> str:
    """``text`` behind ``start``, wrapped with a hanging indent; long paths and commands are not broken."""
    wrapper = textwrap.TextWrapper(width, start, " " * len(start), break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text)
