"""Parameters and FLOPs of each module of a pipeline stage.

Summed over modules, ranks and tokens, they equal ``arch.flops.flops_per_token`` with full attention. Vocabulary
padding, copies of kv heads and padding tokens are added here, because the device computes them. Recomputation is not
counted, as in MFU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_llama.arch.shapes import QK_NORMS, ROW_PARALLEL, block_norms, head_dim, norms_branches
from megatron_llama.plan.plan import Plan
from megatron_llama.tools.forecast.parameters import block_parameters, is_trained


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
    block = list(_block(plan, tp))
    yield from ((f"layers.{layer}.{name}", work) for layer in layers for name, work in block)
    if last:
        yield "norm", ModuleWork(hidden)
        head = 0 if first and plan.model.tie_word_embeddings else vocabulary
        yield "lm_head", ModuleWork(head, *_gemm_flops(vocabulary, trained=is_trained(plan, "lm_head")))


def _block(plan: Plan, tp: int) -> Iterator[tuple[str, ModuleWork]]:
    """Yield the modules of a block in the order of their execution."""
    sizes = {each.name: each.rows * each.columns for each in block_parameters(plan, tp)}
    norms = [(name, ModuleWork(sizes[name])) for name in block_norms(plan.model)]
    is_last = norms_branches(plan.model)
    width = plan.model.num_attention_heads // tp * head_dim(plan.model)
    yield from norms[:1] * (not is_last)
    yield "self_attn", ModuleWork(attention=4 * width)  # scores, and scores times values
    yield from _matrix(plan, sizes, "self_attn", "qkv_proj")
    yield from _matrix(plan, sizes, "self_attn", "o_proj")
    for name in (name for name in QK_NORMS if name in sizes):
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
    forward = 2 * (a + b / split) if matrix in ROW_PARALLEL else 2 * (a / split + b)
    yield f"{branch}.{matrix}", ModuleWork(a + b, forward, 2 * forward)
    yield f"{branch}.{matrix}.base_layer", weight


def _gemm_flops(elements: int, *, trained: bool) -> tuple[float, float]:
    """Return (forward, backward) FLOPs per token of a GEMM; a frozen matrix has no weight gradient."""
    return 2.0 * elements, 4.0 * elements if trained else 2.0 * elements


def any_layer(module: str) -> str:
    """Replace the layer numbers of a module name: layers.3.mlp -> layers.*.mlp."""
    return re.sub(r"\d+", "*", module)
