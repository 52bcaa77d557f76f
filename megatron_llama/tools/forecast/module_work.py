"""What each module of a pipeline stage holds and computes: the formula of ``flops.py``, module by module.

The sum over all modules, ranks and tokens of a step is ``flops_per_token`` with attention as the full square, where no
rank computes more than its share. Padding of the vocabulary, copies of kv heads and padding tokens come on top here,
because a device does compute them. What recomputation does a second time is not counted, as in MFU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_llama.arch.shapes import FUSED, ROW_PARALLEL, head_dim, matrices
from megatron_llama.config.settings import FinetuneConfig, ModelConfig
from megatron_llama.plan.plan import Plan


@dataclass(frozen=True)
class ModuleWork:
    """A module's own weights and products, without those of the modules inside it."""

    parameters: int = 0
    forward: float = 0.0
    """FLOPs for each token of a micro batch."""
    backward: float = 0.0
    attention: int = 0
    """FLOPs of the forward pass for each pair of tokens of one document, each with each; the backward pass has two."""

    def flops(self, tokens: int, pairs: int) -> tuple[int, int]:
        """FLOPs of (forward, backward) over ``tokens`` tokens whose documents hold ``pairs`` pairs of tokens."""
        attention = self.attention * pairs
        return round(self.forward * tokens) + attention, round(self.backward * tokens) + 2 * attention


@dataclass(frozen=True)
class _Part:
    """The part of a model that one rank has."""

    model: ModelConfig
    finetune: FinetuneConfig
    tp: int
    sp: bool
    vocab_size: int

    def is_frozen(self, module: str) -> bool:
        return self.finetune.method == "lora" and not module.endswith(tuple(self.finetune.modules_to_save))


def rank_work(plan: Plan, layers: Sequence[int], *, first: bool, last: bool) -> dict[str, ModuleWork]:
    """The modules of a chunk with ``layers`` on one of its ranks, by name, without those that do nothing countable."""
    part = _Part(plan.model, plan.config.finetune, plan.config.trainer.tp, plan.sp, plan.padded_vocab_size)
    return dict(_chunk(part, layers, first, last))


def model_parameters(plan: Plan) -> dict[str, int]:
    """Parameters of each module of the whole model, LoRA's included, without padding and copies. A tied head has none:
    they are the embedding's."""
    part = _Part(plan.model, plan.config.finetune, 1, False, plan.model.vocab_size)
    return {name: work.parameters for name, work in _chunk(part, range(plan.model.num_hidden_layers), True, True)}


def _chunk(part: _Part, layers: Sequence[int], first: bool, last: bool) -> Iterator[tuple[str, ModuleWork]]:
    hidden, table = part.model.hidden_size, part.vocab_size // part.tp * part.model.hidden_size
    if first:
        yield "embed_tokens", ModuleWork(table)
    for layer in layers:
        for name, work in _block(part):
            yield f"layers.{layer}.{name}", work
    if last:
        yield "norm", ModuleWork(hidden)
        own = 0 if first and part.model.tie_word_embeddings else table
        yield "lm_head", ModuleWork(own, *_product(table, frozen=part.is_frozen("lm_head")))


def _block(part: _Part) -> Iterator[tuple[str, ModuleWork]]:
    norm = ModuleWork(part.model.hidden_size)
    width = part.model.num_attention_heads // part.tp * head_dim(part.model)
    yield "input_layernorm", norm
    yield "self_attn", ModuleWork(attention=4 * width)  # the scores, and their product with the values
    yield from _matrix(part, "self_attn.qkv_proj")
    yield from _matrix(part, "self_attn.o_proj")
    yield "post_attention_layernorm", norm
    yield from _matrix(part, "mlp.gate_up_proj")
    yield from _matrix(part, "mlp.down_proj")


def _matrix(part: _Part, name: str) -> Iterator[tuple[str, ModuleWork]]:
    """A fused matrix, and the LoRA update around it."""
    fused = name.rpartition(".")[2]
    shapes = {module: matrices(part.model)[module].local_shape(part.tp) for module in FUSED[fused]}
    elements = sum(rows * columns for rows, columns in shapes.values())
    matrix = ModuleWork(elements, *_product(elements, frozen=part.is_frozen(name)))
    adapted = part.finetune.lora_target_modules if part.finetune.method == "lora" else []
    targets = [shape for module, shape in shapes.items() if module in adapted]
    if targets:
        yield name, _lora(part, targets, column=fused not in ROW_PARALLEL)
        yield f"{name}.base_layer", matrix
    else:
        yield name, matrix


def _lora(part: _Part, targets: Sequence[tuple[int, int]], *, column: bool) -> ModuleWork:
    """A and B of a matrix's targets, (rows, columns) each. Under sequence parallelism the one that is replicated
    multiplies only this rank's part of the tokens."""
    rank, split = part.finetune.lora_rank, part.tp if part.sp else 1
    a, b = rank * sum(columns for _, columns in targets), rank * sum(rows for rows, _ in targets)
    forward = 2 * (a / split + b) if column else 2 * (a + b / split)
    return ModuleWork(a + b, forward, 2 * forward)


def _product(elements: int, *, frozen: bool) -> tuple[float, float]:
    """FLOPs per token of a product with a matrix, forward and backward: a frozen one has no gradient of its own."""
    return 2.0 * elements, 2.0 * elements if frozen else 4.0 * elements


def any_layer(module: str) -> str:
    """layers.3.mlp as layers.*.mlp."""
    return re.sub(r"\d+", "*", module)
