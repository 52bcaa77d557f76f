"""README.md of an exported folder: a model card with the front matter of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_llama.arch.lora_targets import adapted_modules
from megatron_llama.arch.parameters import head_dim, kv_heads, parameters, whole_model
from megatron_llama.checkpoint.manifest import State
from megatron_llama.config import FinetuneConfig, ModelConfig
from megatron_llama.config.data_settings import NewTokens, split_weights
from megatron_llama.config.hub import hub_name, short_name
from megatron_llama.system.files import read_whole
from megatron_llama.system.programs import name_commands
from megatron_llama.system.tables import plural, short_count

CARD = "README.md"
UNKNOWN = "unknown"
"""A license of the hub's list."""
_MOST_BYTES = 1 << 20
_LICENSE = re.compile(r"license: *['\"]?([\w.+-]{1,100})['\"]?[ ]*")

_TEMPLATE = """\
---
{matter}
---

# {name}

Trained with megatron_llama. Before publishing, add the license, the intended use and an evaluation.

| | |
|---|---|
{rows}

## Use

FOLDER is the folder of this file.

```python
{imports}

{model}{tokenizer}
```

With megatron_llama:

```bash
{command}
```
"""


def model_card(
    states: Sequence[State], model: ModelConfig, finetune: FinetuneConfig, *, adapter: bool, dtype: str, tokenizer: bool
) -> str:
    """Return the card. It names the base model and the data, but no path.

    The front matter has ``base_model`` only for a model of the hub, which rejects other names.

    Args:
        states: State of the exported checkpoint, or of the checkpoints of which the weights are the mean, newest first.
        adapter: Whether the folder has LoRA's adapter instead of the whole model.
        dtype: dtype of the exported weights.
        tokenizer: Whether the folder has a tokenizer.
    """
    state, *older = states
    rows = [*_facts(state, model, finetune, adapter), ("Data type of the weights", dtype)]
    if older:
        steps = ", ".join(str(each.step) for each in reversed(states))
        rows.append(("Weights", f"mean of the checkpoints of steps {steps}"))
    base, lora = _base_name(state.hf_folder), finetune.method == "lora"
    title = f"{base}, fine-tuned" if base else f"{_plain(str(model.name))}, trained from random weights"
    return _fill(title, rows, state.hf_folder, lora=lora, adapter=adapter, tokenizer=tokenizer)


def merged_card(base: str, model: ModelConfig, adapters: Mapping[str, float], dtype: str, *, tokenizer: bool) -> str:
    """Return the card of the model in ``base`` with merged adapters, which are weights by folder."""
    names = ", ".join(f"{weight:g} · {_plain(short_name(folder))}" for folder, weight in adapters.items())
    rows = [*_architecture(model, base), ("Adapters", names), ("Data type of the weights", dtype)]
    return _fill(f"{_base_name(base)}, with adapters", rows, base, lora=True, adapter=False, tokenizer=tokenizer)


def _base_name(folder: str | None) -> str:
    return _plain(hub_name(folder) or short_name(folder)) if folder else ""


def _fill(
    title: str, rows: Sequence[tuple[str, str]], folder: str | None, *, lora: bool, adapter: bool, tokenizer: bool
) -> str:
    """Return the card of a model that was trained from ``folder``."""
    on_hub = hub_name(folder) if folder else ""
    matter: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llama", "megatron_llama", *(["lora"] if lora else [])],
        **({"base_model": on_hub} if on_hub else {}),
        "license": base_license(Path(folder)) if folder else UNKNOWN,
    }
    kind, package = ("AutoPeftModelForCausalLM", "peft") if adapter else ("AutoModelForCausalLM", "transformers")
    option = "" if tokenizer or (adapter and folder) else " --tokenizer TOKENIZER"
    return _TEMPLATE.format(
        matter=yaml.safe_dump(matter, sort_keys=False, allow_unicode=True).rstrip(),
        name=title + " (LoRA adapter)" * adapter,
        rows="\n".join(f"| {label} | {text} |" for label, text in rows),
        imports=f"from {package} import {kind}" + ", AutoTokenizer" * tokenizer,
        model=f'model = {kind}.from_pretrained("FOLDER")',
        tokenizer='\ntokenizer = AutoTokenizer.from_pretrained("FOLDER")' * tokenizer,
        command=name_commands(f'python scripts/generate.py FOLDER{option} --prompt "Once upon a time"'),
    )


def _architecture(model: ModelConfig, folder: str | None) -> list[tuple[str, str]]:
    heads, kv, count = model.num_attention_heads, kv_heads(model), parameters(model)
    shape = f"{model.num_hidden_layers} layers, hidden size {model.hidden_size}, {heads} heads of {head_dim(model)} "
    shape += f"({kv} for keys and values), feed-forward {model.intermediate_size}, vocabulary {model.vocab_size:,}"
    rows = [("Base model", _base_name(folder))] if folder else []
    kind = model.model_type.capitalize()
    return [*rows, ("Architecture", f"{kind}: {shape}"), ("Parameters", f"{count:,} ({short_count(count)})")]


def _facts(state: State, model: ModelConfig, finetune: FinetuneConfig, adapter: bool) -> list[tuple[str, str]]:
    """Return (label, text) of each row of the table."""
    rows, tokens = _architecture(model, state.hf_folder), state.position.tokens
    new = NewTokens.of(state.settings.get("data", {}))
    if new:
        rows.append(("New tokens", ", ".join(map(_code, (*new.plain, *new.special)))))
    if adapter:
        trained = whole_model(model, finetune).trained
        rows.append(("Parameters of the adapter", f"{trained:,} ({short_count(trained)})"))
    if finetune.method == "lora":
        modules = ", ".join(adapted_modules(model, finetune))
        if trained_tokens := len(finetune.trainable_token_indices):
            modules += f" and the embeddings of {trained_tokens} {plural(trained_tokens, 'token')}"
        rows.append(
            (
                ("rsLoRA" if finetune.use_rslora else "LoRA") + " with DoRA" * finetune.use_dora,
                f"rank {finetune.lora_rank}, alpha {finetune.lora_alpha:g}, on {modules}",
            )
        )
    rows.append(("Training tokens", f"{tokens:,} in {state.step:,} {plural(state.step, 'step')}"))
    rows.append(("Data", data_names(state.settings)))
    return rows


def data_names(settings: Mapping[str, Any]) -> str:
    """Return the names of a run's datasets, without their folders."""
    data = settings.get("data", {})
    if data.get("mock"):
        return "random tokens (data=mock)"
    _, paths = split_weights(data.get("prefixes") or [])
    files = ", ".join(dict.fromkeys(_plain(os.path.basename(os.path.normpath(path))) for path in paths))
    return _plain(str(data.get("name") or UNKNOWN)) + (f" ({files})" if files else "")


def base_license(folder: Path) -> str:
    """Return the license in the front matter of the base model's card; ``unknown`` if there is none."""
    try:
        lines = read_whole(folder / CARD, _MOST_BYTES).decode().splitlines()
    except (OSError, ValueError):
        return UNKNOWN
    end = lines.index("---", 1) if lines[:1] == ["---"] and "---" in lines[1:] else 0
    return next((match[1] for match in (_LICENSE.fullmatch(line) for line in lines[:end]) if match), UNKNOWN)


def _code(text: str) -> str:
    """Return a token as code in a cell of Markdown."""
    plain = re.sub(r"[`\s]", "_", text).replace("|", r"\|")
    return f"`{plain}`"


def _plain(text: str) -> str:
    """Return ``text`` without characters that Markdown or YAML would interpret."""
    return re.sub(r"[^\w./+@(), -]", "_", text)
