"""How the conversations were put that a run learned from: its sets' manifests say, else its config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_llama.config.settings import CHAT_TEMPLATES
from megatron_llama.config.values import weights_and_paths


@dataclass(frozen=True)
class Taught:
    """What a model must be asked in."""

    template: str
    """own (the tokenizer's), or one of data_prep's names"""
    add_bos: bool | None = None
    """Whether the begin-of-text token stood before each example; None where only the tokenizer can say."""


def taught(settings: Mapping[str, Any]) -> Taught | None:
    """What the run with these settings was taught in; None for pretraining, and for sets that say different things."""
    data = settings.get("data", {})
    if data.get("kind") != "sft" or data.get("mock"):
        return None
    said = [_manifest(prefix) for prefix in weights_and_paths(data.get("prefixes", []))[1]]
    found = {one for one in said if one is not None}
    if not found:  # the sets are gone, or elsewhere
        found = {Taught(data.get("chat_template", "own"))}
    return found.pop() if len(found) == 1 else None


def _manifest(prefix: str) -> Taught | None:
    try:
        options = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8"))["options"]
        template, add_bos = options["chat_template"], options["add_bos"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return Taught(template, bool(add_bos)) if template in CHAT_TEMPLATES else None
