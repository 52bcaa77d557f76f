"""Sampling: its settings, from flags and generation_config.json, and its filters; texts that end an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_llama.config import Problem

if TYPE_CHECKING:
    import torch

    from megatron_llama.text.tokenizer import Tokenizer

FILE = "generation_config.json"
LEAST_TEMPERATURE = 1e-6  # logits / temperature must not overflow


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Filters apply in transformers' order: penalty, temperature, top_k, top_p, min_p."""

    greedy: bool = False
    """Choose the likeliest id; only ``repetition_penalty`` has an effect."""
    temperature: float = 0.7
    """Divisor of the logits."""
    top_k: int = 0
    """Sample from this many likeliest ids. 0: all."""
    top_p: float = 1.0
    """Sample from the fewest likeliest ids with this total probability (nucleus sampling, arXiv:1904.09751)."""
    min_p: float = 0.0
    """Sample from ids with at least this fraction of the likeliest id's probability (arXiv:2407.01082)."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits of ids in the prompt and the answer; negative logits are multiplied
    (arXiv:1909.05858)."""
    seed: int = 1234

    @staticmethod
    def of(content: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Sampling, str, list[Problem]]:
        """Return the sampling of flags and a generation_config.json, a note on the file, and its problems."""
        defaults, problems = folder_defaults(content, given)
        ignored, note = ignored_settings(content), ""
        if defaults or ignored:
            unsupported = f"; not supported: {', '.join(ignored)}" if ignored else ""
            note = f"{FILE}: {describe(defaults) or 'no sampling settings'}{unsupported}\n"
        return (Sampling() if problems else Sampling(**defaults, **given)), note, problems

    def generators(self, rows: int) -> list[torch.Generator]:
        """Return one random generator per row, so that a row does not depend on the others."""
        import torch

        return [torch.Generator().manual_seed(self.seed + row) for row in range(rows)]


# Rule, check, and what to write instead, for flags and for generation_config.json.
_LIMITS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "temperature": (
        f"must be at least {LEAST_TEMPERATURE:g}",
        lambda value: value >= LEAST_TEMPERATURE,
        "write --greedy for the likeliest id",
    ),
    "top_k": (
        "must be an integer of at least 0 (0: all ids)",
        lambda value: isinstance(value, int) and value >= 0,
        "write --top-k 50",
    ),
    "top_p": ("must be above 0 and at most 1", lambda value: 0 < value <= 1, "write --top-p 0.9"),
    "min_p": ("must be at least 0 and at most 1", lambda value: 0 <= value <= 1, "write --min-p 0.05"),
    "repetition_penalty": (
        "must be above 0 and finite",
        lambda value: 0 < value < float("inf"),
        "write --repetition-penalty 1.1",
    ),
    "seed": ("must have at most 64 bits", lambda value: -(2**63) <= value < 2**64, "write --seed 1234"),
}
DRAWING = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Fields without effect in greedy decoding."""
OPTIONS = (*DRAWING, "repetition_penalty")
"""Fields with a flag of the same name."""
# Settings of generation_config.json that do not change the chosen ids, besides ids of special tokens.
_HARMLESS = {"do_sample", "max_length", "max_new_tokens", "transformers_version", "use_cache", "cache_implementation"}
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, 1.0, "", [], {})


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name.replace('_', '-')}"


def check_option(name: str, value: Any) -> Problem | None:
    """Return the problem of a flag's value, if any."""
    rule, is_valid, instead = _LIMITS[name]
    return None if is_valid(value) else Problem(flag_of(name), value, rule, instead)


def folder_defaults(content: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the fields of Sampling in a generation_config.json, and the problems of fields without a flag.

    As in transformers, ``do_sample: true`` without a temperature means 1. ``do_sample: false`` means greedy decoding,
    unless a flag of sampling is given.
    """
    if given.get("greedy") or (content.get("do_sample") is False and not set(DRAWING) & set(given)):
        content = {name: value for name, value in content.items() if name not in DRAWING} | {"greedy": True}
    elif content.get("do_sample") is True:
        content = {"temperature": 1.0} | {name: value for name, value in content.items() if value is not None}
    fields = {name: content[name] for name in ("greedy", *OPTIONS) if content.get(name) is not None}
    fields = {name: value for name, value in fields.items() if name not in given and name != "seed"}
    problems = []
    if content.get("do_sample") not in (None, True, False):
        rule = "do_sample must be true or false"
        problems.append(Problem(FILE, content["do_sample"], rule, "correct the file"))
    for name, value in fields.items():
        rule, is_valid, _ = _LIMITS.get(name, ("", bool, ""))
        is_number = isinstance(value, int | float) and isinstance(value, bool) == (name == "greedy")
        if not (is_number and is_valid(value)):
            problems.append(Problem(FILE, value, f"{name} {rule}", f"correct the file, or write {flag_of(name)}"))
    return fields, problems


def ignored_settings(content: Mapping[str, Any]) -> list[str]:
    """Return the names in a generation_config.json that could change the ids and are not supported."""
    supported = _HARMLESS.union(OPTIONS)
    named = {name for name, value in content.items() if value not in _NEUTRAL and not name.startswith("_")}
    return sorted(name for name in named - supported if not name.endswith("_token_id"))


def describe(fields: Mapping[str, Any]) -> str:
    """Return fields of Sampling as text, e.g. ``temperature 0.6, top-p 0.9``."""
    if fields.get("greedy"):
        fields = {name: value for name, value in fields.items() if name == "repetition_penalty"} | {"greedy": ""}
    return ", ".join(f"{name.replace('_', '-')} {value}".strip() for name, value in fields.items())


def penalize(logits: torch.Tensor, penalty: float, used: torch.Tensor) -> torch.Tensor:
    """Divide positive logits of ``used`` ids by the penalty and multiply negative ones (arXiv:1909.05858)."""
    return (logits / penalty).where(logits > 0, logits * penalty).where(used, logits)


def filter_probabilities(probabilities: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Zero the probabilities [..., vocabulary] outside top_k, top_p and min_p. Of equal ones, lower ids stay.

    Rounding changes only whether the last id, or ids as likely as the last one, stay.
    """
    if not sampling.top_k and sampling.top_p >= 1 and not sampling.min_p:
        return probabilities
    descending, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    retained = descending >= sampling.min_p * descending[..., :1]
    if sampling.top_k:
        descending[..., sampling.top_k :] = 0
    if sampling.top_p < 1:
        before = descending.cumsum(-1) - descending
        before[..., 0] = -1  # the likeliest id stays
        retained &= before < sampling.top_p * descending.sum(-1, keepdim=True)
    return probabilities.scatter(-1, ids, descending.where(retained, 0.0))


class StopTexts:
    """Texts that end an answer and are not part of it."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts = tokenizer, [text for text in texts if text]
        # A token has at least one byte, except control tokens.
        self._tail = max((len(text.encode()) for text in self.texts), default=0) + 4

    def is_complete(self, ids: list[int]) -> bool:
        """Return whether the last tokens of an answer contain a stop text."""
        return bool(self.texts) and self.contains(self.tokenizer.decode(ids[-self._tail :], skip_special=False))

    def contains(self, text: str) -> bool:
        """Return whether a text contains a stop text."""
        return any(stop in text for stop in self.texts)

    def cut(self, text: str) -> tuple[str, str]:
        """Return the text before the first stop text, and a tail that may begin one."""
        first = min((at for stop in self.texts if (at := text.find(stop)) >= 0), default=None)
        if first is not None:
            return text[:first], text[first:]
        length = max((n for stop in self.texts for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        return text[: len(text) - length], text[len(text) - length :]
