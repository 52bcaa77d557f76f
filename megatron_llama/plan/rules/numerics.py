"""Rules on float8 matmuls, exact mode and QK-Clip."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.arch.blocks import LEAST_TOKENS, SPANS, num_blocks
from megatron_llama.arch.shapes import FUSED, ROW_PARALLEL, matrices, qk_norm
from megatron_llama.config.precision import QUANTIZED_BITS
from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import Config
from megatron_llama.devices import find_device
from megatron_llama.plan.rules.rule import nearest_legal, reads


@reads("trainer.float8", "trainer.async_tp", "finetune.frozen_dtype", "finetune.method")
def float8_replaces_plain_matmuls(config: Config, world_size: int) -> Iterator[Problem]:
    """float8 excludes other replacements of the blocks' matmuls."""
    value = config.trainer.float8
    if value is None:
        return
    if config.trainer.async_tp:
        rule = "excludes trainer.async_tp, which fuses collectives into matmuls of other formats"
        yield Problem("trainer.float8", value, rule, "write trainer.float8=null, or trainer.async_tp=false")
    kind = config.finetune.frozen_dtype
    if config.finetune.method == "lora" and kind in QUANTIZED_BITS:
        rule = f"excludes finetune.frozen_dtype={kind}: quantized matrices are multiplied in bf16 or fp32"
        yield Problem("trainer.float8", value, rule, "write trainer.float8=null, or finetune.frozen_dtype=bf16")


def check_float8_sizes(config: Config, multiple: int) -> Iterator[Problem]:
    """Yield a problem for each size of a matmul that is not a multiple of ``multiple``, which the device needs."""
    value, tp = config.trainer.float8, config.trainer.tp
    if value is None or multiple == 1:
        return
    table = matrices(config.model)
    sizes = {"tokens of a micro batch": config.trainer.micro_batch_size * config.data.length}
    for name, parts in FUSED.items():
        shapes = [table[part].local_shape(tp) for part in parts]
        sizes[f"rows of {name} on a rank"] = sum(rows for rows, _ in shapes)
        if name in ROW_PARALLEL:
            sizes[f"columns of {name} on a rank"] = shapes[0][1]
    sizes["model.hidden_size"] = config.model.hidden_size
    for name, size in sizes.items():
        if size % multiple:
            rule = f"needs multiples of {multiple}: {name} = {size}"
            yield Problem("trainer.float8", value, rule, "write trainer.float8=null, or change the size")


@reads("trainer.exact", "device.name", "finetune.method", "optim.name")
def exact_excludes(config: Config, world_size: int) -> Iterator[Problem]:
    """Exact mode needs int64 sums, trains all weights, and excludes optimizers that exchange signs."""
    if not config.trainer.exact:
        return
    device = find_device(config.device.name)
    if device is not None and not device.sums_int64:
        rule = f"adds int64 numbers, which was not tested with device={config.device.name}"
        yield Problem("trainer.exact", True, rule, "write trainer.exact=false")
    if config.finetune.method == "lora":
        rule = "excludes finetune.method=lora, whose matmuls have no blocks"
        yield Problem("trainer.exact", True, rule, "write trainer.exact=false, or finetune.method=full")
    if config.optim.row.exchanges_signs:
        rule = f"excludes optim.name={config.optim.name}: the mean of signs depends on the number of ranks"
        yield Problem("trainer.exact", True, rule, "write trainer.exact=false, or optim.name=adamw")


@reads(
    *("trainer.exact", "trainer.compile", "trainer.float8", "trainer.grad_reduce", "trainer.param_gather"),
    "trainer.mlp_chunks",
)
def exact_replaces_matmuls_and_sums(config: Config, world_size: int) -> Iterator[Problem]:
    """Exact mode excludes other replacements of matmuls, and messages with scales that depend on the layout."""
    trainer = config.trainer
    if not trainer.exact:
        return
    excluded = {
        "compile": (bool(trainer.compile), "false", "whose fused operations depend on the shapes of a layout"),
        "float8": (trainer.float8 is not None, "null", "another replacement of the matmuls"),
        "grad_reduce": (trainer.grad_reduce is not None, "null", "which rounds parts of sums"),
        "param_gather": (trainer.param_gather is not None, "null", "which rounds weights by blocks of a rank's shard"),
        "mlp_chunks": (trainer.mlp_chunks > 1, "1", "another split of the matmuls"),
    }
    for name, (is_set, off, reason) in excluded.items():
        if is_set:
            rule = f"excludes trainer.{name}, {reason}"
            yield Problem("trainer.exact", True, rule, f"write trainer.{name}={off}, or trainer.exact=false")


@reads("trainer.exact", "trainer.tp", "model.num_attention_heads", "model.intermediate_size")
def exact_blocks_divide_by_tp(config: Config, world_size: int) -> Iterator[Problem]:
    """A tensor-parallel rank has whole blocks."""
    tp, blocks = config.trainer.tp, num_blocks(config.model)
    if config.trainer.exact and blocks % tp:
        legal = [size for size in range(1, blocks + 1) if blocks % size == 0]
        rule = f"trainer.exact splits the matrices of this model into {blocks} blocks, which tp must divide"
        yield Problem("trainer.tp", tp, rule, f"{nearest_legal('trainer.tp', tp, legal)}, or trainer.exact=false")


@reads("trainer.exact", "trainer.cp", "trainer.cp_comm", "data.seq_length", "data.curriculum")
def exact_spans_divide_by_cp(config: Config, world_size: int) -> Iterator[Problem]:
    """A context-parallel rank has whole spans of each sequence."""
    cp, length = config.trainer.cp, config.data.length
    if not config.trainer.exact or cp == 1:
        return
    if config.trainer.cp_comm != "ulysses":
        rule = "trainer.exact needs whole sequences in attention"
        advice = "write trainer.cp_comm=ulysses, or trainer.exact=false"
        yield Problem("trainer.cp_comm", config.trainer.cp_comm, rule, advice)
    if SPANS % (2 * cp):
        rule = f"trainer.exact splits sequences into {SPANS} spans, two or more of them on a rank"
        yield Problem("trainer.cp", cp, rule, f"{nearest_legal('trainer.cp', cp, (1, 2, 4))}, or trainer.exact=false")
    if length < LEAST_TOKENS or length % SPANS:
        rule = f"trainer.exact with trainer.cp={cp} needs a multiple of {SPANS} of at least {LEAST_TOKENS:,} tokens"
        longer = max(LEAST_TOKENS, -(-length // SPANS) * SPANS)
        yield Problem("data.seq_length", length, rule, f"write data.seq_length={longer}, or trainer.cp=1")
    if config.data.curriculum:
        rule = f"trainer.exact with trainer.cp={cp} needs sequences of one length"
        yield Problem("data.curriculum", None, rule, "write data.curriculum=[], or trainer.cp=1")


@reads("optim.qk_clip", "model.model_type")
def clipped_heads_have_no_norm(config: Config, world_size: int) -> Iterator[Problem]:
    """QK-Clip scales weights before the norm of q and k, which removes any scale."""
    if config.optim.qk_clip is not None and qk_norm(config.model) is not None:
        rule = f"has no effect with model.model_type={config.model.model_type}: norms of q and k remove the scale of "
        rule += "the weights, and bound the logits already"
        yield Problem("optim.qk_clip", config.optim.qk_clip, rule, "write optim.qk_clip=null")


@reads("optim.qk_clip", "finetune.method")
def clipped_weights_are_trained(config: Config, world_size: int) -> Iterator[Problem]:
    """QK-Clip scales the weights of q and k, which LoRA freezes."""
    if config.optim.qk_clip is not None and config.finetune.method == "lora":
        rule = "scales the weights of q and k, which finetune.method=lora freezes"
        yield Problem("optim.qk_clip", config.optim.qk_clip, rule, "write finetune.method=full, or optim.qk_clip=null")


@reads("optim.qk_clip", "trainer.compile", "trainer.exact")
def logits_are_computed_in_eager_blocks(config: Config, world_size: int) -> Iterator[Problem]:
    """QK-Clip computes logits next to the kernel of attention, by blocks whose number depends on documents."""
    clip, trainer = config.optim.qk_clip, config.trainer
    if clip is None:
        return
    if trainer.compile:
        rule = "reads the lengths of documents on the host for the largest logits, which compiled blocks cannot"
        yield Problem("optim.qk_clip", clip, rule, "write trainer.compile=false, or optim.qk_clip=null")
    if trainer.exact:
        rule = "computes logits by matmuls whose sums depend on the layout, which trainer.exact excludes"
        yield Problem("optim.qk_clip", clip, rule, "write trainer.exact=false, or optim.qk_clip=null")
