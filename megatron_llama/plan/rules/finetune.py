"""Rules on fine-tuning, quantized weights and 8-bit optimizer states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from megatron_llama.arch.lora_targets import (
    adapted_modules,
    is_named,
    layer_adapters,
    layer_kinds,
    matches_pattern,
    module_name,
    module_names,
)
from megatron_llama.arch.parameters import FUSED, Matrix, has_bias, matrices
from megatron_llama.config.data_settings import NewTokens
from megatron_llama.config.precision import QUANTIZATION_BLOCK, QUANTIZED_BITS, STATE_BLOCK
from megatron_llama.config.problems import Problem, format_value, quote_value
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


PREFERENCE = (
    "objective",
    "beta",
    "loss_type",
    "label_smoothing",
    "desirable_weight",
    "undesirable_weight",
    "neftune_noise_alpha",
)
"""Settings for full fine-tuning and LoRA."""


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


ADAPTED = tuple(
    f"finetune.{name}"
    for name in "method lora_rank lora_alpha use_rslora lora_target_modules exclude_modules layers_to_transform "
    "rank_pattern alpha_pattern bias".split()
)
"""Settings that determine the adapters."""


@reads(*ADAPTED, "model")
def rank_is_low(config: Config, world_size: int) -> Iterator[Problem]:
    """LoRA's rank is at most the smallest dimension of its matrices."""
    finetune, shapes = config.finetune, {name: matrix.shape for name, matrix in matrices(config.model).items()}
    limits: dict[int, str] = {}
    for adapters, _ in layer_kinds(config.model, finetune, range(config.model.num_hidden_layers)):
        for module, adapter in adapters.items():
            if adapter.rank > min(shapes[module]):
                tightest = (limits.get(adapter.rank, module), module)
                limits[adapter.rank] = min(tightest, key=lambda name: min(shapes[name]))
    for rank, module in limits.items():
        rows, columns = shapes[module]
        rule = f"exceeds the rank of {module}, a matrix of {rows} x {columns}"
        if rank == finetune.lora_rank:
            yield Problem("finetune.lora_rank", rank, rule, f"write finetune.lora_rank={min(rows, columns)} or less")
        else:
            pattern = {key: min(value, *shapes[module]) for key, value in finetune.rank_pattern.items()}
            instead = f"write finetune.rank_pattern={quote_value(pattern)}, or smaller ranks"
            yield Problem("finetune.rank_pattern", finetune.rank_pattern, f"{rank} {rule}", instead)


@reads(*ADAPTED, "model.num_hidden_layers", "trainer.pp", "optim.name")
def adapters_match_modules(config: Config, world_size: int) -> Iterator[Problem]:
    """Each name, layer and pattern of LoRA's settings applies to some linear layer."""
    finetune, layers, every = config.finetune, config.model.num_hidden_layers, module_names(config.model)
    if finetune.method != "lora":
        return
    for name in ("lora_target_modules", "exclude_modules"):
        values = getattr(finetune, name)
        if wrong := [ending for ending in values if not any(is_named(module, ending) for module in every)]:
            rule = f"no linear layer of the {layers} layers has a name that ends in {' or '.join(wrong)}"
            yield _without(name, values, wrong, rule, f"or names such as {every[0]}")
    if absent := [layer for layer in finetune.layers_to_transform if layer >= layers]:
        rule = f"the model has layers 0 to {layers - 1}, without {' and '.join(map(str, absent))}"
        yield _without("layers_to_transform", finetune.layers_to_transform, absent, rule, f"or numbers below {layers}")
        return
    adapted = [module_name(i, name) for i in range(layers) for name in layer_adapters(config.model, finetune, i)]
    if not adapted and all(any(is_named(name, ending) for name in every) for ending in finetune.lora_target_modules):
        rule = "excludes every module of lora_target_modules"
        yield _without("exclude_modules", finetune.exclude_modules, finetune.exclude_modules, rule, "or fewer names")
    plain = [layer for layer in range(layers) if not layer_adapters(config.model, finetune, layer)]
    if adapted and plain and config.trainer.pp > 1 and config.optim.row.exchanges_signs:
        rule = f"needs trained weights on every pipeline stage, and layer {plain[0]} has no adapters"
        yield Problem("optim.name", config.optim.name, rule, "write optim.name=adamw, or trainer.pp=1")
    for name in ("rank_pattern", "alpha_pattern") if adapted else ():
        values = getattr(finetune, name)
        if wrong := [pattern for pattern in values if not any(matches_pattern(module, pattern) for module in adapted)]:
            rule = f"no adapted linear layer has a name that ends in a match of {' or '.join(wrong)}"
            yield _without(name, values, wrong, rule, f"or expressions such as {adapted[0]}")


def _without(name: str, values: Any, wrong: Sequence[Any], rule: str, others: str) -> Problem:
    """Return the problem of a list or mapping with some wrong items or keys; the advice omits them."""
    legal = [value for value in values if value not in wrong]
    rest = {key: values[key] for key in legal} if isinstance(values, dict) else legal
    if name == "lora_target_modules" and not rest:
        rest = ["q_proj"]
    return Problem(f"finetune.{name}", values, rule, f"write finetune.{name}={quote_value(rest)}, {others}")


@reads(*ADAPTED, "model")
def biases_are_whole(config: Config, world_size: int) -> Iterator[Problem]:
    """Biases of q, k and v, or of gate and up, are one parameter, so ``lora_only`` trains all of them or none."""
    if config.finetune.method != "lora" or config.finetune.bias != "lora_only":
        return
    for adapters, layers in layer_kinds(config.model, config.finetune, range(config.model.num_hidden_layers)):
        for matrix, modules in FUSED.items():
            plain = [module for module in modules if module not in adapters]
            if has_bias(config.model, matrix) and 0 < len(plain) < len(modules):
                rule = f"needs adapters of all of {', '.join(modules)}, whose biases are one parameter; "
                rule += f"layer {layers[0]} adapts no {' and no '.join(plain)}"
                yield Problem("finetune.bias", "lora_only", rule, "write finetune.bias=all, or adapt all of them")
                return


@reads("finetune.modules_to_save", "model.tie_word_embeddings")
def tied_embeddings_have_one_name(config: Config, world_size: int) -> Iterator[Problem]:
    """LoRA trains tied embeddings under the name of the embedding, as PEFT with ensure_weight_tying."""
    modules = config.finetune.modules_to_save
    if config.finetune.method == "lora" and config.model.tie_word_embeddings and "lm_head" in modules:
        others = [name for name in modules if name not in ("embed_tokens", "lm_head")]
        instead = f"write finetune.modules_to_save={format_value(['embed_tokens', *others])}, which trains both"
        yield Problem("finetune.modules_to_save", modules, "lm_head is tied to the embedding", instead)


@reads("finetune.trainable_token_indices", "finetune.modules_to_save", "model.vocab_size")
def token_rows_are_of_a_frozen_table(config: Config, world_size: int) -> Iterator[Problem]:
    """Tokens whose rows are trained are in the vocabulary, and the embedding is not trained in full."""
    finetune, vocabulary = config.finetune, config.model.vocab_size
    if finetune.method != "lora" or not finetune.trainable_token_indices:
        return
    if absent := [token for token in finetune.trainable_token_indices if token >= vocabulary]:
        rule = f"the vocabulary has ids 0 to {vocabulary - 1}, without {', '.join(map(str, absent))}"
        tokens = finetune.trainable_token_indices
        yield _without("trainable_token_indices", tokens, absent, rule, f"or ids below {vocabulary}")
    if "embed_tokens" in finetune.modules_to_save:
        rule = "trains the whole embedding, and finetune.trainable_token_indices some of its rows"
        others = "or omit finetune.trainable_token_indices"
        yield _without("modules_to_save", finetune.modules_to_save, ["embed_tokens"], rule, others)


@reads(
    *("finetune.modules_to_save", "finetune.trainable_token_indices", "model.tie_word_embeddings"),
    *("data.add_tokens", "data.add_special_tokens"),
)
def lora_trains_new_tokens(config: Config, world_size: int) -> Iterator[Problem]:
    """LoRA trains the rows of new tokens, which otherwise stay equal. ``fill_new_tokens`` compares their ids."""
    modules, new = config.finetune.modules_to_save, NewTokens.of(config.data)
    tables = [] if config.finetune.trainable_token_indices else ["embed_tokens"]
    tables += [] if config.model.tie_word_embeddings else ["lm_head"]
    if config.finetune.method == "lora" and new and not {*tables} <= {*modules}:
        rule = f"must have {' and '.join(tables)}: LoRA freezes the rows of new tokens otherwise"
        instead = f"write finetune.modules_to_save={format_value(list(dict.fromkeys([*tables, *modules])))}"
        if "embed_tokens" in tables:
            instead += ", or their ids in finetune.trainable_token_indices"
        yield Problem("finetune.modules_to_save", modules, rule, instead)


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
    modules = adapted_modules(config.model, config.finetune) if config.finetune.method == "lora" else table
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
        advice = nearest_legal("trainer.tp", tp, [size for size in layout_tp(config, world_size) if not cut(size)])
        yield Problem("trainer.tp", tp, rule, f"{advice}, or {instead}" if advice else f"write {instead}")
