"""Rules on fine-tuning, quantized weights and 8-bit optimizer states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from megatron_llama.arch.shapes import Matrix, matrices
from megatron_llama.config.precision import QUANTIZATION_BLOCK, QUANTIZED_BITS, STATE_BLOCK
from megatron_llama.config.problems import Problem, format_value
from megatron_llama.config.settings import Config, FinetuneConfig
from megatron_llama.config.settings_table import get, settings_by_name
from megatron_llama.plan.rules.layout import layout_tp
from megatron_llama.plan.rules.rule import nearest_legal, reads


@reads("finetune.method", "init_from")
def fine_tuning_has_a_start(config: Config, world_size: int) -> Iterator[Problem]:
    """Fine-tuning needs pretrained weights, except with mock data and in dry runs."""
    method = config.finetune.method
    if method != "none" and config.init_from is None and not (config.data.mock or config.dry_run):
        rule = f"finetune.method={method} needs pretrained weights"
        instead = "write init_from=FOLDER, or finetune.method=none to train from random weights"
        yield Problem("init_from", None, rule, instead)


PREFERENCE = ("objective", "beta", "loss_type", "label_smoothing", "desirable_weight", "undesirable_weight")
"""Settings of preference training, for full fine-tuning and LoRA."""


@reads("finetune")
def lora_settings_are_for_lora(config: Config, world_size: int) -> Iterator[Problem]:
    """LoRA's settings need finetune.method=lora."""
    if config.finetune.method == "lora":
        return
    for field in fields(FinetuneConfig):
        name, value = f"finetune.{field.name}", getattr(config.finetune, field.name)
        if field.name not in ("method", *PREFERENCE) and value != settings_by_name()[name].default:
            rule = f"has no effect with finetune.method={config.finetune.method}"
            yield Problem(name, value, rule, f"write finetune.method=lora, or omit {name}")


@reads("finetune.lora_rank", "finetune.lora_target_modules", "model")
def rank_is_low(config: Config, world_size: int) -> Iterator[Problem]:
    """LoRA's rank is at most the smallest dimension of its matrices."""
    finetune = config.finetune
    if finetune.method != "lora":
        return
    shapes = {module: matrices(config.model)[module].shape for module in finetune.lora_target_modules}
    module = min(shapes, key=lambda name: min(shapes[name]))
    if finetune.lora_rank > min(shapes[module]):
        rows, columns = shapes[module]
        rule = f"exceeds the rank of {module}, a matrix of {rows} x {columns}"
        instead = f"write finetune.lora_rank={min(shapes[module])} or less"
        yield Problem("finetune.lora_rank", finetune.lora_rank, rule, instead)


@reads("finetune.modules_to_save", "model.tie_word_embeddings")
def tied_embeddings_stay_tied(config: Config, world_size: int) -> Iterator[Problem]:
    """LoRA does not train tied embeddings in full: PEFT's files would untie embedding and output head."""
    tables = [name for name in config.finetune.modules_to_save if name in ("embed_tokens", "lm_head")]
    other = "output head" if tables[:1] == ["embed_tokens"] else "embedding"
    if config.finetune.method == "lora" and config.model.tie_word_embeddings and tables:
        rule = f"{tables[0]} is tied to the {other}, which PEFT's file format cannot express"
        others = [name for name in config.finetune.modules_to_save if name not in tables]
        instead = f"write finetune.modules_to_save={format_value(others)}, or finetune.method=full"
        yield Problem("finetune.modules_to_save", config.finetune.modules_to_save, rule, instead)


# Rules on quantized weights and 8-bit states, in blocks of a row.


@reads("finetune.frozen_dtype", "trainer.tp", "model")
def quantized_blocks_are_whole(config: Config, world_size: int) -> Iterator[Problem]:
    """Each quantized block of a frozen matrix is in one row on one tensor-parallel rank."""
    kind, every = config.finetune.frozen_dtype, [*matrices(config.model).values()]
    if config.finetune.method == "lora" and kind in QUANTIZED_BITS:
        name, instead = "finetune.frozen_dtype", "finetune.frozen_dtype=bf16"
        yield from _whole_blocks(config, world_size, name, instead, QUANTIZATION_BLOCK, every)


@reads("optim.state_bits", "optim.name", "finetune", "trainer.tp", "model")
def state_blocks_are_whole(config: Config, world_size: int) -> Iterator[Problem]:
    """Each block of an 8-bit optimizer state is in one row on one tensor-parallel rank."""
    optim, table = config.optim, matrices(config.model)
    if optim.state_bits != 8 or "optim.state_bits" in optim.row.refuses:
        return
    modules = config.finetune.lora_target_modules if config.finetune.method == "lora" else table
    trained = [matrix for module, matrix in table.items() if module in modules]
    yield from _whole_blocks(config, world_size, "optim.state_bits", "optim.state_bits=null", STATE_BLOCK, trained)


def _whole_blocks(
    config: Config, world_size: int, name: str, instead: str, block: int, quantized: Sequence[Matrix]
) -> Iterator[Problem]:
    """Yield a problem if a row of a ``quantized`` matrix, or a rank's part of it, is not a whole number of blocks.

    Blocks with other values in another layout would change the results.
    """
    tp, value = config.trainer.tp, get(config, name)
    needs = f"{name}={value} needs rows of whole blocks of {block} values"

    def module(matrix: Matrix) -> str:
        return matrix.name.partition(".")[2]

    odd = [matrix for matrix in quantized if matrix.shape[1] % block]
    if odd:
        rule = f"needs rows of whole blocks of {block} values; {module(odd[0])} has rows of {odd[0].shape[1]}"
        yield Problem(name, value, rule, f"write {instead}")
        return

    def cut(size: int) -> list[Matrix]:
        """Return the row-parallel matrices whose blocks this tp size would cut."""
        return [m for m in quantized if m.cut == 1 and m.shape[1] % size == 0 and m.shape[1] // size % block]

    if matrices_cut := cut(tp):
        width = matrices_cut[0].shape[1]
        rule = f"{needs}; {module(matrices_cut[0])} has rows of {width}, {width // tp} of them on a rank"
        whole = [size for size in layout_tp(config, world_size) if not cut(size)]
        advice = nearest_legal("trainer.tp", tp, whole)
        yield Problem("trainer.tp", tp, rule, f"{advice}, or {instead}" if advice else f"write {instead}")
