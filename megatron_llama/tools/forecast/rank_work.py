"""Parameters of one rank, in the units of ``fully_shard`` (parallel/data_parallel.py), and FLOPs of its modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_llama.arch import parameters as arch
from megatron_llama.arch.hf_tp_mapping import MAGNITUDE
from megatron_llama.arch.lora_targets import layer_adapters
from megatron_llama.config.precision import BYTES, quantized_bytes
from megatron_llama.plan.plan import Plan


class Parameter(NamedTuple):
    """Shape of a parameter on one tensor-parallel rank; a vector has one column."""

    name: str
    rows: int
    columns: int
    trained: bool = True
    quantized: bool = False
    """Whether it is a frozen matrix in 8 or 4 bits."""

    def shard(self, ranks: int) -> int:
        """Return the values of one of ``ranks`` shards; ``fully_shard`` pads the rows."""
        return -(-self.rows // ranks) * self.columns


class Unit(NamedTuple):
    """Parameters that one collective moves."""

    label: str
    number: int
    """Units of this kind in a chunk."""
    parameters: tuple[Parameter, ...]


def adapters_of(plan: Plan, layer: int, matrix: str, tp: int | None = None) -> arch.StackedAdapters | None:
    """Return LoRA's adapters of a fused matrix on one of ``tp`` ranks (default: the plan's)."""
    adapters = layer_adapters(plan.model, plan.config.finetune, layer)
    return arch.stacked_adapters(plan.model, adapters, matrix, tp or plan.config.trainer.tp)


def key_rows(plan: Plan) -> int:
    """Return the number of trained key and value rows of qkv, or of LoRA's B there. They are its last rows."""
    finetune, tp = plan.config.finetune, plan.config.trainer.tp
    targets = layer_adapters(plan.model, finetune, 0) if finetune.method == "lora" else ("k_proj", "v_proj")
    matrices = arch.matrices(plan.model)
    return sum(matrices[module].local_shape(tp)[0] for module in ("k_proj", "v_proj") if module in targets)


def block_parameters(plan: Plan, tp: int | None = None, layer: int = 0) -> tuple[Parameter, ...]:
    """Return the parameters of a block on one of ``tp`` ranks (default: the plan's), in the order of the model."""
    finetune, tp, h = plan.config.finetune, tp or plan.config.trainer.tp, plan.model.hidden_size
    full, parameters = finetune.method != "lora", list[Parameter]()
    biases, branches = arch.bias_rows(plan.model, tp), (("qkv_proj", "o_proj"), ("gate_up_proj", "down_proj"))
    for norm, fused in zip(arch.block_norms(plan.model), branches, strict=True):
        parameters.append(Parameter(norm, h, 1, is_trained(plan, norm)))
        for matrix in fused:
            rows, columns = arch.fused_shape(plan.model, matrix, tp)
            parameters.append(Parameter(matrix, rows, columns, full, plan.quantized is not None))
            if matrix in biases:
                trained = full or arch.trains_bias(plan.model, finetune, layer, matrix)
                parameters.append(Parameter(f"{matrix}.bias", biases[matrix], 1, trained))
            if (stack := adapters_of(plan, layer, matrix, tp)) is not None:
                parameters.append(Parameter(f"{matrix}.lora_A", sum(stack.ranks), columns))
                parameters.append(Parameter(f"{matrix}.lora_B", sum(stack.rows), stack.width))
                if finetune.use_dora:
                    parameters.append(Parameter(f"{matrix}.{MAGNITUDE}", sum(stack.rows), 1))
    sizes = arch.qk_norm_shapes(plan.model, tp).items()
    return (*parameters, *(Parameter(name, size, 1, is_trained(plan, name)) for name, size in sizes))


def units(plan: Plan, layers: int, is_first: bool, is_last: bool) -> Iterator[Unit]:
    """Yield the units of a pipeline chunk of ``layers`` blocks."""
    h = plan.model.hidden_size
    rows = plan.padded_vocab_size // plan.config.trainer.tp
    embedding = Parameter("embed_tokens", rows, h, is_trained(plan, "embed_tokens"))
    norm = Parameter("norm", h, 1, is_trained(plan, "norm"))
    head = Parameter("lm_head", rows, h, is_trained(plan, "lm_head"))
    yield Unit("blocks", layers, block_parameters(plan))
    if is_first and is_last and plan.model.tie_word_embeddings:
        yield Unit("embedding, norm and head", 1, (embedding, norm))
        return
    if is_first:
        yield Unit("embedding", 1, (embedding,))
    if is_last:
        yield Unit("norm and head", 1, (head, norm))


def is_trained(plan: Plan, module: str) -> bool:
    """Whether a weight of the model has a gradient, that is, LoRA does not freeze it."""
    finetune = plan.config.finetune
    return finetune.method != "lora" or arch.saves_module(module, plan.model, finetune)


def gathered_bytes(plan: Plan, parameter: Parameter, ranks: int) -> int:
    """Return the bytes of one of ``ranks`` shards of a parameter in the format in which it is gathered."""
    values = parameter.shard(ranks)
    if parameter.quantized and plan.quantized:
        return quantized_bytes(plan.quantized, values)
    return values * BYTES[plan.precision.compute_dtype]


# Parameters and FLOPs of each module of a pipeline stage.
#
# Summed over modules, ranks and tokens, they equal ``arch.flops.flops_per_token`` with full attention. Vocabulary
# padding, copies of kv heads and padding tokens are added here, because the device computes them. Recomputation is not
# counted, as in MFU.


@dataclass(frozen=True)
class ModuleWork:
    """Parameters and GEMMs of a module, without its submodules."""

    parameters: int = 0
    forward: float = 0.0
    """FLOPs per token of a micro batch."""
    backward: float = 0.0
    attention: int = 0
    """FLOPs of the forward pass per pair of tokens of one document. The backward pass has twice as many."""

    def flops(self, tokens: int, pairs: int) -> tuple[int, int]:
        """Return the FLOPs of (forward, backward) for ``tokens`` tokens and ``pairs`` pairs within documents."""
        attention = self.attention * pairs
        return round(self.forward * tokens) + attention, round(self.backward * tokens) + 2 * attention


def rank_work(plan: Plan, layers: Sequence[int], *, first: bool, last: bool) -> dict[str, ModuleWork]:
    """Return parameters and FLOPs of the modules of a pipeline chunk on one rank, by module name."""
    return dict(_chunk(plan, plan.config.trainer.tp, plan.padded_vocab_size, layers, first, last))


def model_parameters(plan: Plan) -> dict[str, int]:
    """Return the parameters of each module of the model, with LoRA's, without padding and copies.

    A tied output head has 0: its weight belongs to the embedding.
    """
    layers = range(plan.model.num_hidden_layers)
    return {name: work.parameters for name, work in _chunk(plan, 1, plan.model.vocab_size, layers, True, True)}


def _chunk(
    plan: Plan, tp: int, vocab_size: int, layers: Sequence[int], first: bool, last: bool
) -> Iterator[tuple[str, ModuleWork]]:
    hidden, vocabulary = plan.model.hidden_size, vocab_size // tp * plan.model.hidden_size
    if first:
        yield "embed_tokens", ModuleWork(vocabulary)
    for layer in layers:
        yield from ((f"layers.{layer}.{name}", work) for name, work in _block(plan, tp, layer))
    if last:
        yield "norm", ModuleWork(hidden)
        head = 0 if first and plan.model.tie_word_embeddings else vocabulary
        yield "lm_head", ModuleWork(head, *_gemm_flops(vocabulary, trained=is_trained(plan, "lm_head")))


def _block(plan: Plan, tp: int, layer: int) -> Iterator[tuple[str, ModuleWork]]:
    """Yield the modules of a block in the order of their execution."""
    sizes = {each.name: each.rows * each.columns for each in block_parameters(plan, tp, layer)}
    norms = [(name, ModuleWork(sizes[name])) for name in arch.block_norms(plan.model)]
    is_last = arch.norms_branches(plan.model)
    width = plan.model.num_attention_heads // tp * arch.head_dim(plan.model)
    yield from norms[:1] * (not is_last)
    yield "self_attn", ModuleWork(attention=4 * width)  # scores, and scores times values
    yield from _matrix(plan, sizes, "self_attn", "qkv_proj")
    yield from _matrix(plan, sizes, "self_attn", "o_proj")
    for name in (name for name in arch.QK_NORMS if name in sizes):
        yield f"self_attn.{name}", ModuleWork(sizes[name])
    yield norms[0 if is_last else 1]
    yield from _matrix(plan, sizes, "mlp", "gate_up_proj")
    yield from _matrix(plan, sizes, "mlp", "down_proj")
    yield from norms[1:] * is_last


def _matrix(plan: Plan, sizes: Mapping[str, int], branch: str, matrix: str) -> Iterator[tuple[str, ModuleWork]]:
    """Yield a fused matrix, and its LoRA adapters A and B.

    With sequence parallelism the replicated one of A and B multiplies only the rank's share of the tokens.
    """
    trained = plan.config.finetune.method != "lora"
    weight = ModuleWork(sizes[matrix] + sizes.get(f"{matrix}.bias", 0), *_gemm_flops(sizes[matrix], trained=trained))
    if (a := sizes.get(f"{matrix}.lora_A")) is None:
        yield f"{branch}.{matrix}", weight
        return
    b, split = sizes[f"{matrix}.lora_B"], plan.config.trainer.tp if plan.sp else 1
    forward = 2 * (a + b / split) if matrix in arch.ROW_PARALLEL else 2 * (a / split + b)
    yield f"{branch}.{matrix}", ModuleWork(a + b, forward, 2 * forward)
    yield f"{branch}.{matrix}.base_layer", weight


def _gemm_flops(elements: int, *, trained: bool) -> tuple[float, float]:
    """Return (forward, backward) FLOPs per token of a GEMM; a frozen matrix has no weight gradient."""
    return 2.0 * elements, 4.0 * elements if trained else 2.0 * elements


def any_layer(module: str) -> str:
    """Replace the layer numbers of a module name: layers.3.mlp -> layers.*.mlp."""
    return re.sub(r"\d+", "*", module)
