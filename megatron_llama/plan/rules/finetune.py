"""Rules on fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from megatron_llama.arch.shapes import matrices
from megatron_llama.config.fields import settings_by_name
from megatron_llama.config.problems import Problem, shown
from megatron_llama.config.settings import Config, FinetuneConfig
from megatron_llama.plan.rules.rule import reads


@reads("finetune.method", "init_from")
def fine_tuning_has_a_start(config: Config, world_size: int) -> Iterator[Problem]:
    """Fine-tuning goes on from a model; only made-up data and dry runs do without."""
    method = config.finetune.method
    if method != "none" and config.init_from is None and not (config.data.mock or config.dry_run):
        rule = f"finetune.method={method} goes on from a model that is there already"
        instead = "write init_from=FOLDER, or finetune.method=none to train from nothing"
        yield Problem("init_from", None, rule, instead)


@reads("finetune")
def lora_settings_are_for_lora(config: Config, world_size: int) -> Iterator[Problem]:
    """A rank or an adapter that is given and would do nothing was meant otherwise."""
    if config.finetune.method == "lora":
        return
    for field in fields(FinetuneConfig):
        name, value = f"finetune.{field.name}", getattr(config.finetune, field.name)
        if field.name != "method" and value != settings_by_name()[name].default:
            rule = f"means nothing with finetune.method={config.finetune.method}"
            yield Problem(name, value, rule, f"write finetune.method=lora, or leave {name} out")


@reads("finetune.lora_rank", "finetune.lora_target_modules", "model")
def rank_is_low(config: Config, world_size: int) -> Iterator[Problem]:
    """A rank above a matrix's own would cost more than the matrix and add nothing."""
    finetune = config.finetune
    if finetune.method != "lora":
        return
    shapes = {module: matrices(config.model)[module].shape for module in finetune.lora_target_modules}
    module = min(shapes, key=lambda name: min(shapes[name]))
    if finetune.lora_rank > min(shapes[module]):
        rows, columns = shapes[module]
        rule = f"is above the rank that {module} itself can have, which is {rows} x {columns}"
        instead = f"write finetune.lora_rank={min(shapes[module])} or less"
        yield Problem("finetune.lora_rank", finetune.lora_rank, rule, instead)


@reads("finetune.modules_to_save", "model.tie_word_embeddings")
def tied_tables_stay_tied(config: Config, world_size: int) -> Iterator[Problem]:
    """PEFT's files have the table and the head apart, and what reads them would untie the two."""
    tables = [name for name in config.finetune.modules_to_save if name in ("embed_tokens", "lm_head")]
    if config.finetune.method == "lora" and config.model.tie_word_embeddings and tables:
        rule = f"{tables[0]} is tied to the other table in this model, and PEFT's files can't say so"
        others = [name for name in config.finetune.modules_to_save if name not in tables]
        instead = f"write finetune.modules_to_save={shown(others)}, or finetune.method=full"
        yield Problem("finetune.modules_to_save", config.finetune.modules_to_save, rule, instead)
