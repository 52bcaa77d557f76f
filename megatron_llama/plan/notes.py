"""What a user should know about a plan that works."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.arch.pattern import Pattern, pattern_of
from megatron_llama.arch.shapes import head_dim
from megatron_llama.config.data_prefixes import weights_and_paths
from megatron_llama.config.precision import LEAST_IN_BLOCKS, STATE_BLOCK
from megatron_llama.config.settings import Config
from megatron_llama.corpus.epochs import samples_per_epoch
from megatron_llama.devices import NAMES, device_named
from megatron_llama.plan.plan import Plan
from megatron_llama.system.units import gib

DEMO = "python_stdlib"
LARGE = 10**9
"""Parameters of a model that nobody trains on the demo's text."""


def notes_on(config: Config, plan: Plan) -> Iterator[str]:
    """Notes on the plan that was derived from ``config``; what derivation itself noted is in the plan already."""
    method, trainer, data = config.finetune.method, plan.config.trainer, config.data
    if method != "none" and config.init_from is None:
        yield (
            f"finetune.method={method} starts from random weights here, which is of use for measuring only: init_from "
            "is not set"
        )
    for _, path in plan.record_files:
        yield f"{path} is not prepared yet: a run does that first, with data_prep/sft.py's code"
    if trainer.val_every_steps is not None and trainer.val_every_steps > trainer.steps > 0:
        yield f"no validation: trainer.val_every_steps={trainer.val_every_steps} of {trainer.steps} steps"
    pattern, inside = pattern_of(plan.model), data.pack or data.document_mask
    if inside or pattern.leaves_out(data.length):
        pattern = pattern if pattern.leaves_out(data.length) else Pattern()
        where = " inside documents" * inside
        if pattern.window:
            where += f" in a window of {pattern.window:,} tokens"
        elif pattern.group:
            kept = pattern.block * pattern.global_blocks
            where += f" in groups of {pattern.group:,} tokens, and to the last {kept:,} of each earlier one"
        yield f"attention{where}: {_kernels(plan)}"
    if data.name == DEMO and plan.parameters >= LARGE:
        yield (
            f"{trainer.steps:,} steps on the demo's data are a trial of {plan.model.name}; python train.py --help "
            "lists the recipes that pretrain, experiment=pretrain_..."
        )
    bits = plan.config.optim.state_bits
    if bits is not None and not plan.whole.in_blocks:
        least = f"{LEAST_IN_BLOCKS:,} values, in rows of whole blocks of {STATE_BLOCK}"
        yield f"optim.state_bits={bits} changes nothing: no trained matrix has {least}"
    yield from _random_ltd(plan)
    if data.mock:
        if data.prefixes:
            yield "data.mock=true makes tokens up: data.prefixes is not read"
        return
    try:
        if data.kind == "sft" and trainer.val_every_steps:
            yield from _validation(plan)
    except (OSError, ValueError):  # a missing or broken dataset is for the checks of files to report
        return
    weights, paths = weights_and_paths(data.prefixes)
    if data.kind == "pretrain" and len(paths) > 1 and not weights:
        yield "data.prefixes has no weights: each dataset counts by its sequences, so that an epoch reads each once"


def _random_ltd(plan: Plan) -> Iterator[str]:
    """What random-LTD costs, and where it does not end."""
    ltd, steps = plan.random_ltd, plan.config.trainer.steps
    if ltd is None:
        return
    lengths = ltd.lengths(steps)
    if plan.config.trainer.compile and len(lengths) > 1:
        yield f"trainer.random_ltd: blocks are compiled for {len(lengths)} lengths, each when a step first has it"
    if ltd.length(max(1, steps)) < ltd.seq_length:
        yield (
            f"trainer.random_ltd: in the last step layers still see {ltd.length(max(1, steps)):,} of "
            f"{ltd.seq_length:,} tokens, but all of them in validation; memory is planned for all"
        )
    if pattern_of(plan.model).leaves_out(ltd.seq_length):
        yield "trainer.random_ltd: where tokens are dropped, attention is computed whole behind a mask of the positions"


def _kernels(plan: Plan) -> str:
    """How attention is computed where it is more than causal, by device if that is not known yet."""
    size = plan.config.trainer.micro_batch_size * plan.config.data.length**2
    words = {
        "tiles": "tiles, only what is seen, call by call",
        "varlen": "varlen, FlashAttention over all documents at once",
        "mask": f"mask, the whole square behind a dense mask of {gib(size)}, whose shape is always the same",
    }
    asked, pattern = plan.config.device.name, pattern_of(plan.model)
    devices = [asked] if asked in NAMES else NAMES
    found: dict[str, list[str]] = {}
    for device in devices:
        kernel = device_named(device).attention_kernel(pattern, plan.precision.compute_dtype, head_dim(plan.model))
        found.setdefault(kernel, []).append(device)
    if len(found) == 1:
        return words[next(iter(found))]
    return "; ".join(f"on {' and '.join(names)} {words[kernel]}" for kernel, names in found.items())


def _validation(plan: Plan) -> Iterator[str]:
    """How much of a fine-tuning set each validation sees: the best checkpoint is chosen by it."""
    trainer, data = plan.config.trainer, plan.config.data
    samples = samples_per_epoch(data, 1)
    if not samples:  # refused when the split is read
        return
    kind, size = "sequences" if data.pack else "examples", trainer.global_batch_size
    seen = samples if trainer.val_steps is None else trainer.val_steps * size
    if trainer.val_steps is None:
        yield f"each validation is on all {samples:,} {kind}, in batches of {size}: {-(-samples // size):,}"
    elif seen < samples:
        yield f"each validation is on {seen:,} of {samples:,} {kind}; trainer.val_steps=null takes them all"
    elif seen > samples:
        yield (
            f"each validation takes {seen:,} {kind} of {samples:,}, so that some count more often than others; "
            "trainer.val_steps=null takes each once"
        )
