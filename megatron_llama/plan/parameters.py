"""How many parameters a Llama has, in all and on one rank; arithmetic on the shape, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_llama.config.settings import FinetuneConfig, ModelConfig

if TYPE_CHECKING:
    from megatron_llama.plan.plan import Plan


def kv_heads(model: ModelConfig) -> int:
    """Key and value heads, derived where not given."""
    return model.num_attention_heads if model.num_key_value_heads is None else model.num_key_value_heads


def head_dim(model: ModelConfig) -> int:
    """Width of a head, derived where not given."""
    return model.hidden_size // model.num_attention_heads if model.head_dim is None else model.head_dim


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """The next multiple of tp: each rank holds the same number of rows."""
    return -(-vocab_size // tp) * tp


def layer_tensors(model: ModelConfig, tp: int = 1) -> dict[str, int]:
    """Elements of each tensor of one block on one tensor-parallel rank, under Hugging Face's names."""
    hidden, dim = model.hidden_size, head_dim(model)
    queries = model.num_attention_heads // tp * dim
    # Fewer kv heads than ranks: each rank holds one, the same one as its neighbours.
    keys = max(1, kv_heads(model) // tp) * dim
    feed_forward = model.intermediate_size // tp
    return {
        "input_layernorm": hidden,
        "self_attn.q_proj": hidden * queries,
        "self_attn.k_proj": hidden * keys,
        "self_attn.v_proj": hidden * keys,
        "self_attn.o_proj": queries * hidden,
        "post_attention_layernorm": hidden,
        "mlp.gate_proj": hidden * feed_forward,
        "mlp.up_proj": hidden * feed_forward,
        "mlp.down_proj": feed_forward * hidden,
    }


def parameters_per_layer(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of one block on one tensor-parallel rank."""
    return sum(layer_tensors(model, tp).values())


def matrices_per_layer(model: ModelConfig, tp: int = 1) -> int:
    """Of them, those of the seven matrices: what can be quantized."""
    return sum(count for name, count in layer_tensors(model, tp).items() if name.endswith("_proj"))


def parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, as published: no padding, no copies, a tied head counted once."""
    table = model.vocab_size * model.hidden_size
    tables = 1 if model.tie_word_embeddings else 2
    return tables * table + model.num_hidden_layers * parameters_per_layer(model) + model.hidden_size


def matrix_shape(model: ModelConfig, module: str) -> tuple[int, int]:
    """(out, in) of one of a block's matrices, by Hugging Face's name."""
    hidden, ffn, dim = model.hidden_size, model.intermediate_size, head_dim(model)
    queries, keys = model.num_attention_heads * dim, kv_heads(model) * dim
    shapes = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }
    return shapes[module]


def lora_parameters_per_layer(model: ModelConfig, finetune: FinetuneConfig, tp: int = 1) -> int:
    """What LoRA adds to one block on one tensor-parallel rank: one of A and B is cut as the matrix is, one is whole."""
    count = 0
    for module in finetune.lora_target_modules if finetune.method == "lora" else ():
        rows, columns = matrix_shape(model, module)
        if module in ("o_proj", "down_proj"):
            columns //= tp
        elif module in ("k_proj", "v_proj"):
            rows = max(1, kv_heads(model) // tp) * head_dim(model)
        else:
            rows //= tp
        count += finetune.lora_rank * (rows + columns)
    return count


def lora_parameters(model: ModelConfig, finetune: FinetuneConfig) -> int:
    """What LoRA adds to the whole model; 0 for other methods."""
    return model.num_hidden_layers * lora_parameters_per_layer(model, finetune)


def trained_parameters(model: ModelConfig, finetune: FinetuneConfig) -> int:
    """Parameters of the whole model that get gradients, copies not counted."""
    if finetune.method != "lora":
        return parameters(model)
    # A model of one rank has no padding and no copies.
    return stage_trained(model, finetune, model.num_hidden_layers, 1, first=True, last=True)


def stage_trained(
    model: ModelConfig, finetune: FinetuneConfig, layers: int, tp: int, *, first: bool, last: bool
) -> int:
    """Of the parameters that one rank of a pipeline stage holds, those that get gradients."""
    if finetune.method != "lora":
        return stage_parameters(model, layers, tp, first=first, last=last)

    def saved(module: str) -> bool:
        return module.endswith(tuple(finetune.modules_to_save))

    table = padded_vocab_size(model.vocab_size, tp) // tp * model.hidden_size
    norms = layers * (saved("input_layernorm") + saved("post_attention_layernorm")) + (last and saved("norm"))
    count = layers * lora_parameters_per_layer(model, finetune, tp) + norms * model.hidden_size
    return count + (first and saved("embed_tokens")) * table + (last and saved("lm_head")) * table


def stage_parameters(model: ModelConfig, layers: int, tp: int, *, first: bool, last: bool) -> int:
    """Parameters of the model itself that one rank of a pipeline stage with ``layers`` blocks holds, padding and copies
    included."""
    table = padded_vocab_size(model.vocab_size, tp) // tp * model.hidden_size
    count = layers * parameters_per_layer(model, tp)
    if first:
        count += table
    if last:
        count += model.hidden_size
        # A tied head on the first stage is the table itself; on a later stage it is a copy that is kept equal.
        if not (model.tie_word_embeddings and first):
            count += table
    return count


def layers_per_stage(stage_layers: Sequence[Sequence[int]], pp: int) -> list[int]:
    """Blocks on each pipeline stage, all of its chunks together."""
    return [sum(len(chunk) for chunk in stage_layers[stage::pp]) for stage in range(pp)]


def parameters_per_stage(plan: Plan) -> list[int]:
    """Parameters that one rank of each pipeline stage holds, LoRA's among them."""
    pp, tp = plan.config.trainer.pp, plan.config.trainer.tp
    added = lora_parameters_per_layer(plan.model, plan.config.finetune, tp)
    return [
        stage_parameters(plan.model, layers, tp, first=stage == 0, last=stage == pp - 1) + layers * added
        for stage, layers in enumerate(layers_per_stage(plan.stage_layers, pp))
    ]


def quantized_per_stage(plan: Plan) -> list[int]:
    """Of those, the ones that are kept in 8 or 4 bits."""
    pp, tp = plan.config.trainer.pp, plan.config.trainer.tp
    matrices = matrices_per_layer(plan.model, tp) if plan.quantized else 0
    return [layers * matrices for layers in layers_per_stage(plan.stage_layers, pp)]


def trained_per_stage(plan: Plan) -> list[int]:
    """Of those, the ones that get gradients."""
    pp, tp = plan.config.trainer.pp, plan.config.trainer.tp
    return [
        stage_trained(plan.model, plan.config.finetune, layers, tp, first=stage == 0, last=stage == pp - 1)
        for stage, layers in enumerate(layers_per_stage(plan.stage_layers, pp))
    ]
