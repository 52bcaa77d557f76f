"""Problems of a config, reported together."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_llama.system.object_store import hide_credentials
from megatron_llama.system.programs import name_commands
from megatron_llama.system.wrapping import WIDTH, escape_controls, fill

if TYPE_CHECKING:
    from megatron_llama.config.settings import Config

NOT_TEXT = re.compile(r"[+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:e[+-]?[\d_]+)?|[+-]?(?:inf|nan)|true|false|null", re.I)
"""Values without quotes that Hydra's grammar reads as a number, a boolean or null."""
_PLAIN = re.compile(r"[A-Za-z0-9_./:@+-]+")
"""Texts without quotes that Hydra's grammar does not change."""
_SECRET = re.compile(r"//[^/\s]*:[^/\s]*@")
"""User name and password in a URL, which no message repeats."""
_SHELL = re.compile(r"[\w./:@%+,=\[\]-]+")
"""Values that need no quotes in a shell."""

MOST_SHOWN = 100
"""Size limit of one value of a file in a message."""
MOST_CHARACTERS = 2000
"""Size limit of a value, a rule or a suggestion in a message: files from other people can have any length."""
MOST_ALIKE = 20
"""Settings in a message that break the same rule, such as the datasets of a blend."""


@dataclass(frozen=True)
class Problem:
    """One reason to reject a config: the setting, its value, the rule and the text to write instead."""

    field: str
    """Name of the setting on the command line, e.g. ``trainer.tp``."""
    value: Any
    """Current value; None shows no value."""
    rule: str
    """Violated rule, a clause whose subject is the setting."""
    instead: str
    """Text to write instead, ready to paste if possible."""
    machine_specific: bool = False
    """Whether the setting is valid, but this host lacks the file, package or memory. A dry run only prints a note."""


class ConfigError(ValueError):
    """Invalid config. The message lists all ``problems``.

    ``config`` omits the values that could not be parsed, so that ``resolve`` can find further problems. It is None if
    nothing can be parsed.
    """

    def __init__(self, problems: Iterable[Problem], config: Config | None = None) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.config = config
        assert self.problems, "a ConfigError has at least one problem"
        super().__init__(format_problems(self.problems))


def duplicate_length(epochs: int, steps: int) -> Problem:
    """Return the problem of a run whose length is set twice."""
    rule = f"conflicts with trainer.steps={steps}: both set the length of the run"
    return Problem("trainer.epochs", epochs, rule, "write trainer.epochs=null, or omit trainer.steps")


def format_value(value: Any) -> str:
    """Format a value as a user writes it in a config."""
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
    return _SECRET.sub("//...@", str(value))


def quote_value(value: Any) -> str:
    """Format a value for Hydra's grammar and for the shell."""
    text = _quote_texts(value)
    return text if _SHELL.fullmatch(text) else shlex.quote(text)


def write_override(name: str, value: Any) -> str:
    """Format an override for Hydra's grammar."""
    return f"{name}={_quote_texts(value)}"


def _quote_texts(value: Any) -> str:
    """Format a value; put texts in quotes if Hydra's grammar rejects them or reads another value."""
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_quote_texts, value)) + "]"
    if isinstance(value, dict):
        keys = {key: re.sub(r"[\\()\[\]{}:=, ]", r"\\\g<0>", str(key)) for key in value}
        return "{" + ",".join(f"{keys[key]}:{_quote_texts(item)}" for key, item in value.items()) + "}"
    text = format_value(value)
    if not isinstance(value, str) or (_PLAIN.fullmatch(text) and not NOT_TEXT.fullmatch(text)):
        return text
    escaped = re.sub(r'(\\+)(?="|$)', r"\1\1", text).replace('"', '\\"')
    return f'"{escaped}"'


def shorten(text: str, most: int = MOST_CHARACTERS) -> str:
    """Cut a text after ``most`` characters, and name the number of omitted ones."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more characters)"


def show_value(value: Any) -> str:
    """Format a value of a file from other people for a message, within MOST_SHOWN characters."""
    return shorten(repr(value), MOST_SHOWN)


def closest_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the entry of ``known`` that is most similar to ``name``; None if none reaches ``cutoff``.

    Args:
        cutoff: Smallest similarity, difflib's ratio.
    """
    by_lower_case = {known_name.lower(): known_name for known_name in known}
    matches = difflib.get_close_matches(name.lower(), list(by_lower_case), n=1, cutoff=cutoff)
    return by_lower_case[matches[0]] if matches else None


def format_problems(problems: ConfigError | Sequence[Problem], subject: str = "This config") -> str:
    """Format problems for the user: setting, value, rule and the text to write, grouped by suggestion."""
    listed = problems.problems if isinstance(problems, ConfigError) else tuple(problems)
    blocks = [f"{subject} can't work, for {'one reason' if len(listed) == 1 else f'{len(listed)} reasons'}:"]
    for instead, reasons in group_by_suggestion(listed).items():
        lines, before = list[str](), list[str]()
        for alike in reasons:
            settings = [_setting_line(p) for p in alike[:MOST_ALIKE]]
            settings += [f"  ... and {len(alike) - MOST_ALIKE:,} more"] * (len(alike) > MOST_ALIKE)
            lines += settings if settings != before else []  # one setting may break several rules
            before = settings
            likewise = "; likewise the others" if len(alike) > 1 else ""
            lines.append(fill("    rule     ", name_commands(shorten(alike[0].rule)) + likewise))
        blocks.append("\n".join([*lines, fill("    instead  ", name_commands(shorten(instead)))]))
    return escape_controls(hide_credentials("\n\n".join(blocks)))


def _setting_line(problem: Problem) -> str:
    """Return the line with setting and value; long lists are wrapped after their commas."""
    if problem.value is None:
        return f"  {problem.field}"
    line = f"{problem.field} = {shorten(format_value(problem.value))}"
    if len(line) <= WIDTH - 2 or not isinstance(problem.value, (list, tuple)):
        return f"  {line}"
    return fill("  ", re.sub(r",(?! )", ", ", line))


def merge_problems(problems: Iterable[Problem]) -> list[str]:
    """Return one sentence per suggestion; see ``group_by_suggestion``."""
    messages = []
    for instead, alike in group_by_suggestion(problems).items():
        reasons, before = list[str](), ""
        for first, *others in alike:
            more = ", ".join(("" if p.field == first.field else f"{p.field}=") + format_value(p.value) for p in others)
            likewise = f"; likewise {shorten(more)}" if more else ""
            setting = f"{first.field}={shorten(format_value(first.value))}: "
            reasons.append(f"{'' if setting == before else setting}{shorten(first.rule)}{likewise}")
            before = "" if others else setting
        messages.append(hide_credentials("; ".join([*reasons, shorten(instead)])))
    return messages


def group_by_suggestion(problems: Iterable[Problem]) -> dict[str, list[list[Problem]]]:
    """Group problems by suggestion, then by rule, so that a suggestion that fixes several problems is shown once.

    If a setting has several problems, suggestions that fix only one of them are dropped: of "write a, or b" and
    "write a", the second remains.
    """
    listed = list(problems)
    groups: dict[str, dict[str, list[Problem]]] = {}
    suggestions: dict[tuple[str, str], list[str]] = {}
    for problem in listed:
        suggestions.setdefault((problem.field, repr(problem.value)), []).append(problem.instead)
    for problem in listed:
        same = suggestions[problem.field, repr(problem.value)]
        within = [instead for instead in same if _alternatives(instead) < _alternatives(problem.instead)]
        instead = min(within, key=lambda text: len(_alternatives(text)), default=problem.instead)
        groups.setdefault(instead, {}).setdefault(problem.rule.replace(str(problem.value), ""), []).append(problem)
    return {instead: list(rules.values()) for instead, rules in groups.items()}


def _alternatives(instead: str) -> set[str]:
    """Return the alternatives of a text such as "write trainer.sp=true, or trainer.async_tp=false"."""
    return set(instead.removeprefix("write ").split(", or "))
