"""The chat template that a run was fine-tuned with, read from the manifests of its data sets or from its config, and
written into exported tokenizers for other programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_llama.config.data_prefixes import weights_and_paths
from megatron_llama.config.settings import CHAT_TEMPLATES
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import read_json, write_synced
from megatron_llama.text.chat_template import NAMED
from megatron_llama.text.conversation import Turn
from megatron_llama.text.tokenizer import SETTINGS, open_tokenizer


@dataclass(frozen=True)
class TrainedTemplate:
    """How the conversations were rendered that a model was fine-tuned on, so that prompts can be rendered alike."""

    template: str
    """``own`` (the tokenizer's), or a name in ``chat_template.NAMED``."""
    add_bos: bool | None = None
    """Whether each example began with BOS; None: as the tokenizer does it."""


def trained_template(settings: Mapping[str, Any]) -> TrainedTemplate | None:
    """The template of the run with these settings; None for pretraining, and where its data sets differ."""
    data = settings.get("data", {})
    if data.get("kind") != "sft" or data.get("mock"):
        return None
    found = set()
    for prefix in weights_and_paths(data.get("prefixes", []))[1]:
        try:
            options = read_json(Path(f"{prefix}.json"))["options"]
            template, add_bos = options["chat_template"], options["add_bos"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if template in CHAT_TEMPLATES:
            found.add(TrainedTemplate(template, bool(add_bos)))
    if not found:  # the sets are gone, or elsewhere
        found = {TrainedTemplate(data.get("chat_template", "own"))}
    return found.pop() if len(found) == 1 else None


def write_trained_template(settings: Mapping[str, Any], folder: Path) -> int | None:
    """Writes the named template that the run was trained with beside the tokenizer in ``folder``, where it replaces
    the tokenizer's own: the model never saw that one. Returns the id that ends its answers.

    Does nothing and returns None for other runs, and where the folder has no tokenizer that can be read.
    """
    trained, settings_file = trained_template(settings), folder / SETTINGS
    if trained is None or trained.template not in NAMED or not settings_file.exists():
        return None
    named = NAMED[trained.template]
    try:
        content = read_json(settings_file)
        tokenizer = open_tokenizer(folder)
    except (UserError, OSError, ValueError):
        return None
    add_bos = tokenizer.adds_bos if trained.add_bos is None else trained.add_bos
    _rewrite(folder / "chat_template.jinja", named.jinja(tokenizer, add_bos))
    (folder / "chat_template.json").unlink(missing_ok=True)
    if content.pop("chat_template", None) is not None:
        _rewrite(settings_file, json.dumps(content, indent=2) + "\n")
    answer = named.pieces([Turn("assistant", "")])
    ends = [tokenizer.control(piece.text) for piece in answer if piece.control and piece.learn]
    return ends[-1] if ends else None


def add_end(file: Path, end: int) -> None:
    """Adds an id at which generation stops to a generation_config.json."""
    content = read_json(file)
    known = content.get("eos_token_id")
    ends = known if isinstance(known, list) else [] if known is None else [known]
    if end not in ends:
        _rewrite(file, json.dumps({**content, "eos_token_id": [*ends, end]}, indent=2) + "\n")


def _rewrite(file: Path, content: str) -> None:
    """Replaces a file; not atomic, since the folder is not published yet."""
    file.unlink(missing_ok=True)
    write_synced(file, content.encode())
