"""Derived settings."""

from __future__ import annotations

import copy
import math
import os
import re
from dataclasses import asdict
from typing import Any, cast

from megatron_llama.arch.exact_blocks import num_blocks
from megatron_llama.arch.parameters import (
    head_dim,
    kv_heads,
    padded_vocab_size,
    parameters,
    stage_parameters,
    whole_model,
)
from megatron_llama.config.data_settings import derives_validation, raw_data_files, split_weights
from megatron_llama.config.precision import PRECISIONS
from megatron_llama.config.problems import format_value
from megatron_llama.config.settings import SAVE_MINUTES, Config
from megatron_llama.config.settings_table import get, sections, settings_by_name
from megatron_llama.config.stored_settings import SCHEDULE_SOURCES
from megatron_llama.corpus.splits import open_splits, samples_per_epoch
from megatron_llama.plan.data_schedules import BatchSchedule
from megatron_llama.plan.plan import Plan
from megatron_llama.plan.stage_split import balance_layers, head_cost_in_layers, split_layers
from megatron_llama.system.files import user_cache
from megatron_llama.system.object_store import is_url
from megatron_llama.system.tables import plural
from megatron_llama.topology import Grid

COSINE = {"_target_": "megatron_llama.optim.schedules.CosineAnnealing"}
COSINE |= {argument: f"${{{name}}}" for argument, name in SCHEDULE_SOURCES.items()}
PRETRAINING_LR, FINETUNING_LR = 3e-4, 2e-5
PREFERENCE_LR = {"full": 1e-6, "lora": 1e-5}
"""TRL's defaults for preference training, by finetune.method."""
"""Defaults of optim.lr. Llama 2's chat models were fine-tuned with 2e-5 (arXiv:2307.09288, section 3.1)."""
LONGEST_WARMUP_STEPS = 2000
MATRIX_LR = {"original": 0.02}
"""Defaults of optim.matrix_lr by optim.adjust_lr, if not optim.lr: the learning rate of Keller Jordan's Muon."""
ONEBIT_WARM_UP = 0.15
"""Share of the steps before 1-bit Adam exchanges signs: 15 to 25 % in the paper (arXiv:2102.02888, section 4)."""
RANDOM_LTD_STEPS = 2 / 3
"""Share of the steps in which random-LTD drops tokens."""
VALIDATION_STEPS = 4
VALIDATIONS = 10
"""Most validations of a fine-tuning run by default. A validation has at most as many batches as the steps before it,
and a batch without backward pass takes a third of a step."""


def derive_plan(config: Config, world_size: int) -> Plan:
    """Return the plan of a config that satisfies all rules. ``config`` is not changed.

    ``Plan.notes`` has the notes on derived values, ``Plan.chosen`` an uneven split of layers.
    """
    requested, config, notes, chosen = config, copy.deepcopy(config), list[str](), tuple[str, ...]()
    model, data, trainer, finetune = config.model, config.data, config.trainer, config.finetune
    model.num_key_value_heads, model.head_dim = kv_heads(model), head_dim(model)
    if data.cache_dir is None and data.prefixes and not data.mock:
        first = split_weights(data.prefixes)[1][0]
        stored = user_cache("index_cache")
        data.cache_dir = stored if is_url(first) else os.path.join(os.path.dirname(first), "index_cache")
    grid = Grid.of(trainer).with_world(world_size)
    tp, pp, data_ranks = trainer.tp, trainer.pp, grid.product(*grid.same_weights)
    trainer.dp, trainer.shard_group = grid.sizes["dp"], trainer.shard_group or data_ranks
    trainer.compile_cache = os.path.abspath(os.path.expanduser(trainer.compile_cache or user_cache("compile")))
    num_microbatches = grid.share("samples", trainer.global_batch_size) // trainer.micro_batch_size
    if trainer.pipeline_layers is None and (uneven := balance_layers(config, num_microbatches)):
        trainer.pipeline_layers = uneven
        split, work = f"trainer.pipeline_layers={format_value(uneven)}", f"{head_cost_in_layers(config):.1f} layers"
        chosen = (f"{split}: the last stage also has the output head, which costs as much as {work}",)
    chunks = split_layers(model.num_hidden_layers, pp, trainer.vpp, trainer.pipeline_layers)
    trainer.pipeline_layers = [sum(map(len, chunks[stage::pp])) for stage in range(pp)]
    if finetune.method == "lora" and finetune.frozen_dtype is None:
        finetune.frozen_dtype = PRECISIONS[str(trainer.precision)].compute_format
    if trainer.grad_reduce and data_ranks == 1:
        notes.append(f"trainer.grad_reduce={trainer.grad_reduce} has no effect with one data-parallel rank")
        trainer.grad_reduce = trainer.reduce_group = None
    if trainer.param_gather and trainer.shard_group == 1:
        notes.append(f"trainer.param_gather={trainer.param_gather} has no effect: weights are not sharded")
        trainer.param_gather = None
    notes += _derive_sequence_parallelism(config, grid)
    trainer.deterministic = trainer.deterministic or trainer.exact
    data.eod_mask_loss = data.document_mask if data.eod_mask_loss is None else data.eod_mask_loss
    if data.kind != "sft" or data.mock:
        trainer.val_steps = trainer.val_steps or VALIDATION_STEPS
    if trainer.epochs is not None:
        notes.append(_derive_steps(config, trainer.epochs))
    if trainer.val_every_steps is None and derives_validation(data):
        notes += _derive_validation(config)
    _derive_from_steps(config)
    return Plan(
        config=config,
        requested=requested,
        world_size=world_size,
        dp=grid.sizes["dp"],
        num_microbatches=num_microbatches,
        stage_layers=tuple(chunks),
        padded_vocab_size=padded_vocab_size(model.vocab_size, num_blocks(model) if trainer.exact else tp),
        parameters=parameters(model),
        whole=whole_model(model, finetune),
        stages=tuple(
            stage_parameters(model, finetune, layers, tp, first=stage == 0, last=stage == pp - 1, sp=bool(trainer.sp))
            for stage, layers in enumerate(sum(chunks[stage::pp], ()) for stage in range(pp))
        ),
        raw_data_files=tuple(raw_data_files(data)),
        notes=tuple(notes),
        chosen=chosen,
    )


def _derive_sequence_parallelism(config: Config, grid: Grid) -> list[str]:
    """Derive ``trainer.sp``, in place; return the notes."""
    trainer, length, notes = config.trainer, config.data.length, list[str]()
    fits = length % grid.sequence_unit(sp=True) == 0
    if trainer.sp and trainer.tp == 1:
        notes = ["trainer.sp=true has no effect with trainer.tp=1"]
    elif trainer.sp is None and not fits:
        tp, both = trainer.tp, trainer.tp * trainer.cp
        parts = f"trainer.tp={tp}" if trainer.cp == 1 else f"trainer.tp * trainer.cp = {both}"
        notes = [f"sequence parallelism is off: data.seq_length={length} is not a multiple of {parts}"]
    # A rule rejects trainer.sp=true if the sequence length is not a multiple of tp.
    trainer.sp = trainer.sp is not False and trainer.tp > 1 and fits
    return notes


def _derive_steps(config: Config, epochs: int) -> str:
    """Replace ``trainer.epochs`` by steps, in place; return the note."""
    trainer, batches = config.trainer, BatchSchedule.of(config)
    try:
        samples = samples_per_epoch(config.data)
    except (OSError, ValueError):  # the checks of files report missing and broken datasets
        return f"trainer.epochs={epochs} needs the dataset; this plan is for {trainer.steps} steps"
    trainer.steps, trainer.epochs = batches.last_step_within(epochs * samples), None
    passes = f"{epochs} {plural(epochs, 'epoch')}"
    sizes = " to ".join(str(size) for size in dict.fromkeys((trainer.global_batch_size, batches.sizes[-1][1])))
    return f"{passes} of {samples:,} {plural(samples, 'sequence')} in batches of {sizes}: {trainer.steps:,} steps"


def _derive_validation(config: Config) -> list[str]:
    """Derive ``trainer.val_every_steps``, in place; return a note if nothing is held out.

    With ``checkpoint.keep_best`` and no period of checkpoints, validated steps are saved.
    """
    data, trainer, checkpoint = config.data, config.trainer, config.checkpoint
    trainer.val_every_steps = 0
    if trainer.steps == 0 or not (data.validation_prefixes or float(data.split.split(",")[1])):
        return []
    batches = trainer.val_steps or 1
    try:
        if small := [part for part in open_splits(data, 1) if part.first == part.last]:
            share = "data.validation_prefixes" if data.validation_prefixes else f"data.split={data.split}"
            return [f"no validation: {share} holds out none of the {len(small[0].index):,} examples"]
        if trainer.val_steps is None:
            batches = -(-samples_per_epoch(data, 1) // trainer.global_batch_size)
    except (OSError, ValueError):  # the checks of files report missing and broken datasets
        pass
    trainer.val_every_steps = min(max(1, trainer.steps // VALIDATIONS, batches), trainer.steps)
    if checkpoint.keep_best:
        checkpoint.every_steps = checkpoint.every_steps or trainer.val_every_steps
    return []


def _derive_from_steps(config: Config) -> None:
    """Derive settings that depend on the number of steps, and the period of checkpoints, in place."""
    derive_optimizer(config)
    _derive_random_ltd(config)
    checkpoint = config.checkpoint
    if checkpoint.every_minutes is None:
        checkpoint.every_minutes = SAVE_MINUTES if checkpoint.every_steps is None and checkpoint.save_last else 0.0


def _derive_random_ltd(config: Config) -> None:
    """Derive random-LTD's settings from sequence length, steps and layers, in place."""
    ltd = config.trainer.random_ltd
    if ltd is None:
        return
    ltd.max_value = ltd.max_value or config.data.length
    ltd.require_steps = ltd.require_steps or max(1, math.ceil(RANDOM_LTD_STEPS * config.trainer.steps))
    ltd.layers = list(range(1, config.model.num_hidden_layers - 1)) if ltd.layers is None else sorted(ltd.layers)


def default_lr(config: Config) -> float:
    """Return the default of ``optim.lr``: a smaller one if all weights of a pretrained model are fine-tuned.

    LoRA has the default of pretraining: its adapters start from zero.
    """
    method = config.finetune.method
    if config.finetune.metrics and method in PREFERENCE_LR:
        return PREFERENCE_LR[method]
    is_finetuning = method == "none" and config.init_from is not None and config.data.kind == "sft"
    return FINETUNING_LR if method == "full" or is_finetuning else PRETRAINING_LR


def derive_optimizer(config: Config) -> None:
    """Derive the optimizer's settings from the steps and the learning rate, in place."""
    optim, steps = config.optim, config.trainer.steps
    if optim.lr is None:
        optim.lr = default_lr(config)
    if optim.row.exchanges_signs and optim.freeze_step is None:
        optim.freeze_step = max(1, math.ceil(ONEBIT_WARM_UP * steps))
    if optim.row.gathers_matrices and optim.matrix_lr is None:
        optim.matrix_lr = MATRIX_LR.get(optim.adjust_lr, optim.lr)
    optim.schedule = optim.schedule or dict(COSINE)
    if optim.min_lr is None:
        optim.min_lr = optim.lr / 10
    if optim.warmup_ratio is not None:
        optim.warmup_steps, optim.warmup_ratio = math.ceil(optim.warmup_ratio * steps), None
    if optim.constant_steps is None:
        # The decay of warm-up, stable, decay: a tenth of the steps, limited by the steps after the warm-up.
        decays_at_the_end = str(optim.schedule.get("_target_", "")).endswith(".WarmupStableDecay")
        left = max(steps - (optim.warmup_steps or 0), 0)
        optim.constant_steps = min(math.ceil(steps / 10), left) if decays_at_the_end else 0
    if optim.warmup_steps is None:  # a tenth of the steps, limited by the steps before the constant ones
        optim.warmup_steps = min(steps // 10, LONGEST_WARMUP_STEPS, max(steps - optim.constant_steps, 0))
    optim.schedule = resolved_schedule(config)


def resolved_schedule(config: Config) -> dict[str, Any]:
    """Return ``optim.schedule`` with ``${...}`` replaced by the values of other settings."""
    text = str(config.optim.schedule)
    if "${" not in text:
        return config.optim.schedule
    from omegaconf import OmegaConf  # imported here: configs built in Python need no OmegaConf

    # Only the settings that the schedule names: converting all of them takes longer than the rest of a plan.
    root = OmegaConf.create({"optim": {"schedule": config.optim.schedule}})
    names = {*settings_by_name(), *sections()}.intersection(re.findall(r"\w+(?:\.\w+)*", text))
    for name in sorted(names):
        value = get(config, name)
        OmegaConf.update(root, name, asdict(value) if value is not None and name in sections() else value)
    return cast("dict[str, Any]", OmegaConf.to_container(root.optim.schedule, resolve=True))
