"""How the conversations were put that a run learned from: its sets' manifests say, else its config. An export says it
to other programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_llama.config.limits import weights_and_paths
from megatron_llama.config.settings import CHAT_TEMPLATES
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import write_synced
from megatron_llama.text.chat_template import END, NAMED, Named
from megatron_llama.text.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from megatron_llama.text.conversation import Turn


@dataclass(frozen=True)
class TrainedTemplate:
    """What a model must be asked in."""

    template: str
    """own (the tokenizer's), or one of data_prep's names"""
    add_bos: bool | None = None
    """Whether the begin-of-text token stood before each example; None where only the tokenizer can say."""


def trained_template(settings: Mapping[str, Any]) -> TrainedTemplate | None:
    """What the run with these settings was taught in; None for pretraining, and for sets that say different things."""
    data = settings.get("data", {})
    if data.get("kind") != "sft" or data.get("mock"):
        return None
    said = [_manifest(prefix) for prefix in weights_and_paths(data.get("prefixes", []))[1]]
    found = {one for one in said if one is not None}
    if not found:  # the sets are gone, or elsewhere
        found = {TrainedTemplate(data.get("chat_template", "own"))}
    return found.pop() if len(found) == 1 else None


def _manifest(prefix: str) -> TrainedTemplate | None:
    try:
        options = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8"))["options"]
        template, add_bos = options["chat_template"], options["add_bos"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return TrainedTemplate(template, bool(add_bos)) if template in CHAT_TEMPLATES else None


def write_trained_template(settings: Mapping[str, Any], folder: Path) -> int | None:
    """Puts the named template that the run was taught in beside the tokenizer in ``folder``, instead of the tokenizer's
    own, in which the model would not know what to say. Returns the id that ends its answers."""
    said, settings_file = trained_template(settings), folder / "tokenizer_config.json"
    if said is None or said.template not in NAMED or not settings_file.exists():
        return None
    named, tokenizer_file = NAMED[said.template], folder / "tokenizer.model"
    try:
        content = json.loads(settings_file.read_text(encoding="utf-8"))
        place = folder if (folder / "tokenizer.json").exists() else tokenizer_file
        tokenizer = load_chat_tokenizer(str(place), own=False)
    except (UserError, OSError, ValueError):  # a tokenizer that nobody can read
        return None
    add_bos = content.get("add_bos_token", False) if said.add_bos is None else said.add_bos
    _rewrite(folder / "chat_template.jinja", jinja_of(named, tokenizer, bool(add_bos)))
    (folder / "chat_template.json").unlink(missing_ok=True)
    if content.pop("chat_template", None) is not None:
        _rewrite(settings_file, json.dumps(content, indent=2) + "\n")
    answer = named.pieces([Turn("assistant", "")])
    ends = [tokenizer.control(piece.text) for piece in answer if piece.control and piece.learn]
    return ends[-1] if ends else None


def jinja_of(named: Named, tokenizer: ChatTokenizer, add_bos: bool) -> str:
    """A named template as other programs render it that read this tokenizer."""
    return named.jinja(END if tokenizer.control(END) is not None else None, add_bos)


def add_end(file: Path, end: int) -> None:
    """Adds an id at which generation stops to a generation_config.json."""
    content = json.loads(file.read_text(encoding="utf-8"))
    known = content.get("eos_token_id")
    ends = known if isinstance(known, list) else [] if known is None else [known]
    if end not in ends:
        _rewrite(file, json.dumps({**content, "eos_token_id": [*ends, end]}, indent=2) + "\n")


def _rewrite(file: Path, content: str) -> None:
    """In a folder that nobody sees yet."""
    file.unlink(missing_ok=True)
    write_synced(file, content.encode())
