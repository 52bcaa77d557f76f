"""Everything that follows from other settings is filled in here, once."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from typing import Any, cast

from megatron_llama.config.data_prefixes import weights_and_paths
from megatron_llama.config.precision import PRECISIONS
from megatron_llama.config.settings import Config
from megatron_llama.plan.epochs import samples_per_epoch
from megatron_llama.plan.plan import Plan
from megatron_llama.plan.shapes import head_dim, kv_heads, padded_vocab_size
from megatron_llama.system.files import user_cache
from megatron_llama.system.units import plural

COSINE = {
    "_target_": "megatron_llama.optim.schedules.CosineAnnealing",
    "max_steps": "${trainer.steps}",
    "warmup_steps": "${optim.warmup_steps}",
    "constant_steps": "${optim.constant_steps}",
    "min_lr": "${optim.min_lr}",
}
LONGEST_WARMUP_STEPS = 2000
VALIDATION_STEPS = 4


def derive_plan(config: Config, world_size: int) -> Plan:
    """The plan of a config that breaks no rule. ``config`` is left as it is; the notes are of what was derived."""
    config, notes = copy.deepcopy(config), []
    _derive_model_and_layout(config, world_size)
    notes += _derive_sequence_parallelism(config)
    notes += _derive_steps(config)
    _derive_optimizer(config)
    trainer, dp = config.trainer, world_size // (config.trainer.tp * config.trainer.pp)
    return Plan(
        config=config,
        world_size=world_size,
        dp=dp,
        num_microbatches=trainer.global_batch_size // (trainer.micro_batch_size * dp),
        stage_layers=tuple(
            split_layers(config.model.num_hidden_layers, trainer.pp, trainer.vpp, trainer.pipeline_layers)
        ),
        padded_vocab_size=padded_vocab_size(config.model.vocab_size, trainer.tp),
        notes=tuple(notes),
    )


def _derive_model_and_layout(config: Config, world_size: int) -> None:
    model, data, trainer, finetune = config.model, config.data, config.trainer, config.finetune
    model.num_key_value_heads, model.head_dim = kv_heads(model), head_dim(model)
    if data.cache_dir is None and data.prefixes and not data.mock:
        first = weights_and_paths(data.prefixes)[1][0]
        data.cache_dir = os.path.join(os.path.dirname(first), "index_cache")
    if trainer.dp is None:
        trainer.dp = world_size // (trainer.tp * trainer.pp)
    if trainer.shard_group is None:
        trainer.shard_group = trainer.dp
    trainer.compile_cache = os.path.abspath(os.path.expanduser(trainer.compile_cache or user_cache("compile")))
    chunks = split_layers(model.num_hidden_layers, trainer.pp, trainer.vpp, trainer.pipeline_layers)
    trainer.pipeline_layers = [sum(len(chunk) for chunk in chunks[stage :: trainer.pp]) for stage in range(trainer.pp)]
    if finetune.method == "lora" and finetune.frozen_dtype is None:
        finetune.frozen_dtype = PRECISIONS[trainer.precision].compute_format


def _derive_sequence_parallelism(config: Config) -> list[str]:
    """On where tp > 1 and the sequence divides; off where there is nothing to split. Returns the notes."""
    trainer, tp, length = config.trainer, config.trainer.tp, config.data.seq_length
    if trainer.sp and tp == 1:
        trainer.sp = False
        return ["trainer.sp=true does nothing at trainer.tp=1, so it is off"]
    if trainer.sp is not None:
        return []
    trainer.sp = tp > 1 and length % tp == 0
    off = f"sequence parallelism is off: data.seq_length={length} does not divide by trainer.tp={tp}"
    return [off] if tp > 1 and not trainer.sp else []


def _derive_steps(config: Config) -> list[str]:
    """The steps of ``trainer.epochs``, which they replace: a resolved config gives a run's length once. Returns the
    notes."""
    trainer, data = config.trainer, config.data
    if data.kind != "sft" or data.mock:
        trainer.val_steps = trainer.val_steps or VALIDATION_STEPS
    if trainer.epochs is None:
        return []
    try:
        samples = samples_per_epoch(data)
    except (OSError, ValueError):  # a missing or broken dataset is for the checks of files to report
        return [f"trainer.epochs={trainer.epochs} needs the dataset; this plan is for {trainer.steps} steps"]
    epochs = f"{trainer.epochs} {plural(trainer.epochs, 'epoch')}"
    trainer.steps, trainer.epochs = trainer.epochs * samples // trainer.global_batch_size, None
    return [f"{epochs} of {samples:,} sequences in batches of {trainer.global_batch_size}: {trainer.steps:,} steps"]


def _derive_optimizer(config: Config) -> None:
    optim, steps = config.optim, config.trainer.steps
    if optim.min_lr is None:
        optim.min_lr = optim.lr / 10
    if optim.warmup_ratio is not None:
        optim.warmup_steps, optim.warmup_ratio = math.ceil(optim.warmup_ratio * steps), None
    if optim.constant_steps is None:
        optim.constant_steps = _default_constant_steps(config)
    if optim.warmup_steps is None:  # a tenth of the steps, and no more than the constant steps leave
        optim.warmup_steps = min(steps // 10, LONGEST_WARMUP_STEPS, max(steps - optim.constant_steps, 0))
    optim.schedule = _without_interpolations(config)


def _default_constant_steps(config: Config) -> int:
    """0; for warm-up, stable, decay a tenth of the steps, which is its decay, or what the warm-up leaves of it."""
    decays_at_the_end = str(config.optim.schedule.get("_target_", "")).endswith(".WarmupStableDecay")
    left = max(config.trainer.steps - (config.optim.warmup_steps or 0), 0)
    return min(-(-config.trainer.steps // 10), left) if decays_at_the_end else 0


def _without_interpolations(config: Config) -> dict[str, Any]:
    """The schedule's arguments with ``${...}`` replaced by the values derived above."""
    schedule = config.optim.schedule or dict(COSINE)
    if "${" not in str(schedule):
        return schedule
    from omegaconf import OmegaConf  # here, not above: a config made in Python needs no OmegaConf

    config.optim.schedule = schedule
    whole = OmegaConf.structured(config)
    return cast("dict[str, Any]", OmegaConf.to_container(whole.optim.schedule, resolve=True))


def split_layers(layers: int, pp: int, vpp: int, pipeline_layers: Sequence[int] | None) -> list[tuple[int, ...]]:
    """Layer numbers of each virtual stage; entry v * pp + p is chunk v of stage p, ascending in that order."""
    if pipeline_layers is None:
        sizes = spread(layers, pp * vpp)
    else:
        chunks = [spread(count, vpp) for count in pipeline_layers]
        sizes = [chunks[stage][chunk] for chunk in range(vpp) for stage in range(pp)]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def spread(total: int, parts: int) -> list[int]:
    """``total`` over ``parts`` as evenly as whole numbers allow, the first parts taking what is left over."""
    share, left_over = divmod(total, parts)
    return [share + (part < left_over) for part in range(parts)]
