"""Rules on fine-tuning, and on weights and states in blocks of few bits."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from megatron_llama.arch.shapes import Matrix, matrices
from megatron_llama.config.fields import get, settings_by_name
from megatron_llama.config.precision import QUANTIZATION_BLOCK, QUANTIZED_BITS, STATE_BLOCK
from megatron_llama.config.problems import Problem, format_value
from megatron_llama.config.settings import Config, FinetuneConfig
from megatron_llama.plan.rules.layout import layout_tp
from megatron_llama.plan.rules.rule import nearest_legal, reads


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
        instead = f"write finetune.modules_to_save={format_value(others)}, or finetune.method=full"
        yield Problem("finetune.modules_to_save", config.finetune.modules_to_save, rule, instead)


# Rules on weights and states that have few bits, in blocks of a row.

@reads("finetune.frozen_dtype", "trainer.tp", "model")
def quantized_blocks_are_whole(config: Config, world_size: int) -> Iterator[Problem]:
    """A block of a frozen matrix lies in one row, on one tensor-parallel rank."""
    kind, every = config.finetune.frozen_dtype, [*matrices(config.model).values()]
    if config.finetune.method == "lora" and kind in QUANTIZED_BITS:
        name, instead = "finetune.frozen_dtype", "finetune.frozen_dtype=bf16"
        yield from _whole_blocks(config, world_size, name, instead, QUANTIZATION_BLOCK, every)


@reads("optim.state_bits", "optim.name", "finetune", "trainer.tp", "model")
def state_blocks_are_whole(config: Config, world_size: int) -> Iterator[Problem]:
    """A block of an 8-bit optimizer state lies in one row, on one tensor-parallel rank."""
    optim, table = config.optim, matrices(config.model)
    if optim.state_bits != 8:
        return
    if reason := optim.row.refuses.get("optim.state_bits"):
        rule = f"optim.name={optim.name} {reason}"
        yield Problem("optim.state_bits", 8, rule, "write optim.state_bits=null, or optim.name=adamw")
        return
    modules = config.finetune.lora_target_modules if config.finetune.method == "lora" else table
    trained = [matrix for module, matrix in table.items() if module in modules]
    yield from _whole_blocks(config, world_size, "optim.state_bits", "optim.state_bits=null", STATE_BLOCK, trained)


def _whole_blocks(
    config: Config, world_size: int, name: str, instead: str, block: int, kept: Sequence[Matrix]
) -> Iterator[Problem]:
    """Each row of the matrices that are ``kept`` so, and each part of it that tensor parallelism cuts, is a number of
    blocks: where a block has other values in another layout, so has the run."""
    tp, value = config.trainer.tp, get(config, name)
    works = f"{name}={value} works on blocks of {block} values of a row"

    def module(matrix: Matrix) -> str:
        return matrix.name.partition(".")[2]

    odd = [matrix for matrix in kept if matrix.shape[1] % block]
    if odd:
        rule = f"works on blocks of {block} values of a row, and {module(odd[0])} has rows of {odd[0].shape[1]}"
        yield Problem(name, value, rule, f"write {instead}")
        return

    def cut(size: int) -> list[Matrix]:
        """The row-parallel matrices whose blocks this size of tp would cut."""
        return [m for m in kept if m.cut == 1 and m.shape[1] % size == 0 and m.shape[1] // size % block]

    if found := cut(tp):
        width = found[0].shape[1]
        rule = f"{works}; {module(found[0])} has rows of {width}, which is {width // tp} on a rank"
        whole = [size for size in layout_tp(config, world_size) if not cut(size)]
        advice = nearest_legal("trainer.tp", tp, whole)
        yield Problem("trainer.tp", tp, rule, f"{advice}, or {instead}" if advice else f"write {instead}")
