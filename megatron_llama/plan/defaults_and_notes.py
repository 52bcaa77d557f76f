"""Defaults that depend on model and device, and notes for the user.

Only unset values are chosen. The plan lists each choice with its reason.
"""

from __future__ import annotations

import copy
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_llama.arch.attention_pattern import Pattern, pattern_of
from megatron_llama.arch.parameters import head_dim, parameters
from megatron_llama.config import data_settings
from megatron_llama.config.precision import LEAST_IN_BLOCKS, STATE_BLOCK
from megatron_llama.config.problems import ConfigError, format_value
from megatron_llama.config.settings import Config, DataConfig
from megatron_llama.config.settings_table import check_limits, get, put, settings_by_name
from megatron_llama.config.stored_settings import read_values
from megatron_llama.corpus.splits import samples_per_epoch
from megatron_llama.devices import NAMES, Device, device_named, find_device
from megatron_llama.plan.derive import FINETUNING_LR, PREFERENCE_LR, PRETRAINING_LR, default_lr
from megatron_llama.plan.plan import Plan
from megatron_llama.plan.stage_split import check_split
from megatron_llama.system.files import path_exists
from megatron_llama.system.tables import gib

CHOSEN = ("data.seq_length", "trainer.precision", "trainer.compile")
KEPT = (*CHOSEN, "trainer.pipeline_layers", "optim.lr", "trainer.val_every_steps")
"""Settings that a resumed run keeps; optim.lr if it was a default, which may differ between versions. derive.py chooses
pipeline_layers and val_every_steps after all rules hold."""
TRAINING_SET, VALIDATION_SET = "_train_sft", "_validation_sft"
"""Endings of the datasets that data_prep/sft.py --split writes."""
LONGEST_BY_DEFAULT = 8192
"""Tokens. Longer sequences must be set explicitly: Llama 3.1 trains with 8,192 tokens and extends to 131,072 only in
its last stage (arXiv:2407.21783, section 3.4)."""
MOST_EPOCHS = 4
"""Repeated tokens are worth nearly as much as new ones up to here (arXiv:2305.16264, section 5)."""
MOST_NAMES = 3
SHORT = 256
"""Default sequence length on a CPU, tokens."""


def choose_defaults(config: Config, fast_bf16: bool = True) -> tuple[Config, tuple[str, ...]]:
    """Choose values for unset settings: sequence length, precision and compilation by device, and the learning rate.

    A resumed run keeps its values on any device. On a CPU the default is fp32 even if it has bf16 units, so that small
    runs are comparable bitwise. An unknown device, as in plans for other machines, counts as a CPU for small models and
    as an accelerator for large ones.

    Args:
        fast_bf16: Whether the accelerator, if known, has bf16 units.

    Returns:
        (a copy of ``config`` with the chosen values, lines with each choice and its reason).
    """
    config = copy.deepcopy(config)
    saved = _saved_settings(config)
    resumed = [*_keep_saved(config, saved), *_choose_validation(config, saved)]
    device = find_device(config.device.name)
    # Without a device, the plan of a large model is for another machine, which has accelerators.
    on_accelerator = device.is_accelerator if device is not None else is_large(config)
    choose = _on_an_accelerator(config, fast_bf16) if on_accelerator else _on_a_cpu(config)
    return config, (*resumed, *choose, *_choose_lr(config))


def _choose_lr(config: Config) -> Iterator[str]:
    """Choose the learning rate in place; yield a line if it is not the one of pretraining."""
    if config.optim.lr is None:
        config.optim.lr = default_lr(config)
        if config.optim.lr == FINETUNING_LR:
            yield f"optim.lr={format_value(FINETUNING_LR)}: default for fine-tuning all weights, as in Llama 2"
        elif config.optim.lr != PRETRAINING_LR:
            yield f"optim.lr={format_value(config.optim.lr)}: default for preference training, as in TRL"


def _keep_saved(config: Config, saved: Mapping[str, Any]) -> Iterator[str]:
    """Set, in place, unset values from the settings of the resumed run."""
    restored = []
    for name in KEPT if saved else ():
        value, setting = saved.get(name), settings_by_name()[name]
        if name == "trainer.pipeline_layers" and not _same_stages(config, saved):
            continue
        defaults = {PRETRAINING_LR, FINETUNING_LR, *PREFERENCE_LR.values()}
        if name == "optim.lr" and value not in defaults - {default_lr(config)}:
            continue
        if name == "trainer.val_every_steps":
            if not data_settings.derives_validation(config.data):
                continue
            value = value or 0  # older versions did not validate by default
        if get(config, name) is None and setting.has_type(value) and not setting.problem(value):
            put(config, name, value)
            restored.append(f"{name}={format_value(value)}")
    if restored:
        yield f"{', '.join(restored)}: kept from {resumed_run_dir(config)}"


def _saved_settings(config: Config) -> Mapping[str, Any]:
    """Return the settings in config.yaml of the run to resume, by full name; empty if there is none."""
    run = resumed_run_dir(config)
    with suppress(ConfigError):  # the checkpoint has the settings too, and reports differences
        return {} if run is None else read_values(run)
    return {}


def _choose_validation(config: Config, saved: Mapping[str, Any]) -> Iterator[str]:
    """Validate on the examples that data_prep/sft.py --split held out, in place; yield a line.

    A resumed run keeps its validation set.
    """
    data, (_, prefixes) = config.data, data_settings.split_weights(config.data.prefixes)
    held_out = [path.removesuffix(TRAINING_SET) + VALIDATION_SET for path in prefixes if path.endswith(TRAINING_SET)]
    if data.kind != "sft" or data.mock or data.validation_prefixes or not held_out or len(held_out) < len(prefixes):
        return
    if saved:
        before = saved.get("data.validation_prefixes")
        if not isinstance(before, list) or [*map(_base, before)] != [*map(_base, held_out)]:
            return
    if all(path_exists(f"{path}.idx") for path in held_out):
        data.validation_prefixes = held_out
        yield f"data.validation_prefixes={format_value(held_out)}: held out by data_prep/sft.py --split"


def _base(path: Any) -> str:
    return os.path.basename(str(path))


def _same_stages(config: Config, saved: Mapping[str, Any]) -> bool:
    """Return whether the run began with the same number of stages and layers."""
    split, trainer = saved.get("trainer.pipeline_layers"), config.trainer
    if trainer.pp == 1 or saved.get("trainer.vpp") != trainer.vpp:
        return False
    if not isinstance(split, list) or not all(isinstance(size, int) for size in split):
        return False
    return check_split(split, config.model.num_hidden_layers, trainer.pp, trainer.vpp) is None


def resumed_run_dir(config: Config) -> Path | None:
    """Return the folder of the run to resume; None if there is none."""
    resume = config.checkpoint.resume
    if resume not in ("auto", "never"):
        return Path(resume).parent.parent  # RUN/checkpoints/step_00000100
    if resume == "never" or config.run.dir is None:
        return None
    run = Path(config.run.dir)
    return run if any(run.glob("checkpoints/step_*")) else None


def is_large(config: Config) -> bool:
    """Whether a model is too large for a run on a CPU. Invalid shapes count as small."""
    return not any(problem.field.startswith("model.") for problem in check_limits(config)) and (
        parameters(config.model) >= LARGE
    )


def _on_an_accelerator(config: Config, fast_bf16: bool) -> Iterator[str]:
    """Choose values in place; yield lines for the plan."""
    data, trainer, longest = config.data, config.trainer, config.model.max_position_embeddings
    is_assumed = find_device(config.device.name) is None and any(get(config, name) is None for name in CHOSEN)
    if data.seq_length is None:
        data.seq_length = min(longest, LONGEST_BY_DEFAULT)
        limit = "the model's maximum"
        if data.seq_length < longest:
            limit = f"default limit; set it to use the model's maximum, {longest:,}"
        yield f"data.seq_length={data.seq_length}: {limit}"
    if trainer.precision is None:
        trainer.precision = "bf16" if fast_bf16 else "fp32"
        name = "an accelerator" if is_assumed else config.device.name
        reason = f"{name} has bf16 units" if fast_bf16 else "this device has no bf16 units"
        yield f"trainer.precision={trainer.precision}: {reason}"
    if trainer.compile is None:
        device = find_device(config.device.name) or Device
        is_long = device.compiles_epochs if trainer.epochs is not None else trainer.steps >= device.compile_from_steps
        features = {
            "trainer.mlp_chunks": trainer.mlp_chunks > 1,
            "trainer.exact": trainer.exact,
            "optim.qk_clip": config.optim.qk_clip is not None,
        }
        uncompiled = [name for name, is_set in features.items() if is_set]
        trainer.compile = (is_long or bool(trainer.profile)) and not uncompiled
        reason = f"saves time from {device.compile_from_steps:,} steps on"
        if uncompiled:
            reason = f"{uncompiled[0]} runs without the compiler"
        elif trainer.compile and not is_long:
            reason = "trainer.profile measures the speed of a long run"
        yield f"trainer.compile={format_value(trainer.compile)}: {reason}"
    if is_assumed:
        yield "device is not set: planned for an accelerator; device=NAME names it"


def _on_a_cpu(config: Config) -> Iterator[str]:
    """Choose values in place; yield lines for the plan."""
    defaults = dict(zip(CHOSEN, (min(config.model.max_position_embeddings, SHORT), "fp32", False), strict=True))
    chosen = {name: value for name, value in defaults.items() if get(config, name) is None}
    for name, value in chosen.items():
        put(config, name, value)
    if chosen:
        yield f"{', '.join(f'{name}={format_value(value)}' for name, value in chosen.items())}: defaults on a CPU"
        if find_device(config.device.name) is None:
            accelerators = [name for name in NAMES if device_named(name).is_accelerator]
            yield f"device is not set; device={' or '.join(accelerators)} has other defaults"


# Notes for the user on a valid plan.

DEMO = "python_stdlib"
LARGE = 10**9
"""Parameters from which on training on the demo's data is only a trial."""


def list_notes(config: Config, plan: Plan) -> Iterator[str]:
    """Yield notes on the plan derived from ``config``, in addition to ``plan.notes``."""
    method, trainer, data = config.finetune.method, plan.config.trainer, config.data
    if method != "none" and config.init_from is None:
        yield (
            f"finetune.method={method} without init_from starts from random weights, which is useful for measurements "
            "only"
        )
    yield from _data_notes(plan, data)
    if trainer.val_every_steps is not None and trainer.val_every_steps > trainer.steps > 0:
        yield f"no validation: trainer.val_every_steps={trainer.val_every_steps} of {trainer.steps} steps"
    pattern, inside = pattern_of(plan.model), data.pack or data.document_mask
    if inside or pattern.is_sparse(data.length):
        pattern = pattern if pattern.is_sparse(data.length) else Pattern()
        where = " inside documents" * inside
        if pattern.window:
            where += f" in a window of {pattern.window:,} tokens"
        elif pattern.group:
            last = pattern.block * pattern.global_blocks
            where += f" in groups of {pattern.group:,} tokens, and to the last {last:,} of each earlier group"
        yield f"attention{where}: {_kernels(plan)}"
    device = find_device(plan.config.device.name)
    if device is not None and (packages := device.attention_packages()) and plan.precision.compute_dtype != "float32":
        yield f"attention by packages of this machine: {', else '.join(packages)}"
    default_batch = Config().trainer.global_batch_size
    if plan.parameters >= LARGE and method == "none" and trainer.global_batch_size == default_batch:
        yield (
            f"trainer.global_batch_size={default_batch} is for small models; python train.py --help lists the "
            "pretraining recipes, which have 1,024 and more"
        )
    if data.name == DEMO and plan.parameters >= LARGE:
        yield (
            f"{trainer.steps:,} steps on the demo's data are only a trial of {plan.model.name}; python train.py --help "
            "lists the pretraining recipes, experiment=pretrain_..."
        )
    bits = plan.config.optim.state_bits
    if bits is not None and not plan.whole.in_blocks:
        least = f"{LEAST_IN_BLOCKS:,} values in rows of whole blocks of {STATE_BLOCK}"
        yield f"optim.state_bits={bits} has no effect: no trained matrix has {least}"
    if plan.config.optim.qk_clip is not None:
        yield "optim.qk_clip: the scores of attention are computed a second time, in fp32, for the largest logits"
    if trainer.float8 and not trainer.compile and device is not None and device.is_accelerator:
        yield f"trainer.float8={trainer.float8} without trainer.compile is slower than bf16: no kernel fuses its casts"
    yield from _random_ltd(plan)
    yield from _exposed_communication(plan)
    if data.mock:
        if data.prefixes:
            yield "data.mock=true generates random tokens; data.prefixes is ignored"
        return
    try:
        if data.kind == "sft" and trainer.val_every_steps:
            yield from _validation(plan)
    except (OSError, ValueError):  # the checks of files report missing and broken datasets
        return
    weights, paths = data_settings.split_weights(data.prefixes)
    for path, count in Counter(paths).items():
        if count > 1:
            yield f"{path} is in data.prefixes {count} times: its weights add up, and each epoch has another order"
    if data.kind == "pretrain" and len(paths) > 1 and not weights:
        yield "data.prefixes has no weights: datasets are weighted by size, so that an epoch reads each sequence once"


def _data_notes(plan: Plan, data: DataConfig) -> Iterator[str]:
    """Yield notes on the places of the data, and on datasets that pretraining repeats often."""
    often = [use for use in plan.dataset_usage if use.epochs > MOST_EPOCHS and data.kind == "pretrain"]
    if often:
        named = ", ".join(f"{_base(use.prefix)} ({use.epochs:,.1f})" for use in often[:MOST_NAMES])
        more = f" and {len(often) - MOST_NAMES} more" * (len(often) > MOST_NAMES)
        yield f"more than {MOST_EPOCHS} epochs of {named}{more}: later epochs add ever less (arXiv:2305.16264)"
    used = [] if data.mock else [*(path for _, path in data_settings.list_paths(data)), data.tokenizer or ""]
    if any(path.startswith(data_settings.OLD_DATA_FOLDER) for path in used):
        yield (
            f"data is read from {data_settings.OLD_DATA_FOLDER}, which shadows the package datasets: "
            f"move its content to {data_settings.DATA_FOLDER}, where runs find it too"
        )
    held_out = {path for name, path in data_settings.list_paths(data) if name == "data.validation_prefixes"}
    for path in sorted(held_out.intersection(map(str, data.prefixes))) if used else ():
        yield f"{path} is read in training and in validation, so that its validation loss is a training loss"
    for _, path in plan.raw_data_files:
        yield f"{shlex.quote(path)} is not prepared yet; a run prepares it first, as data_prep/sft.py does"


def _exposed_communication(plan: Plan) -> Iterator[str]:
    """Yield a note on tensor-parallel communication that matmuls could hide, and do not."""
    trainer = plan.config.trainer
    device = find_device(plan.config.device.name)
    can_overlap = device is not None and device.is_accelerator and device.has_async_tp
    excluded = trainer.async_tp or trainer.cp > 1 or trainer.float8 is not None
    if can_overlap and plan.sp and trainer.compile and not excluded:
        yield (
            f"trainer.tp={trainer.tp}: matmuls wait for the communication of tensor parallelism; trainer.async_tp=true "
            "overlaps the two, and a smaller trainer.tp with trainer.zero=3 has less of it"
        )


def _random_ltd(plan: Plan) -> Iterator[str]:
    """Yield notes on random-LTD: compilation, steps at the end, dense masks."""
    ltd, steps = plan.random_ltd, plan.config.trainer.steps
    if ltd is None:
        return
    lengths = ltd.lengths(steps)
    if plan.config.trainer.compile and len(lengths) > 1:
        yield f"trainer.random_ltd: blocks are compiled for {len(lengths)} lengths, at the first step of each"
    if ltd.length(max(1, steps)) < ltd.seq_length:
        yield (
            f"trainer.random_ltd: in the last step layers still process {ltd.length(max(1, steps)):,} of "
            f"{ltd.seq_length:,} tokens, in validation all of them; memory is planned for all"
        )
    if pattern_of(plan.model).is_sparse(ltd.seq_length):
        yield "trainer.random_ltd: attention of layers that drop tokens uses a dense mask"


def _kernels(plan: Plan) -> str:
    """Describe the attention kernel for more than a causal mask, by device if the device is unknown."""
    size = plan.config.trainer.micro_batch_size * plan.config.data.length**2
    words = {
        "tiles": "tiles, one kernel call per visible tile",
        "varlen": "varlen, FlashAttention over all documents in one call",
        "mask": f"mask, all scores with a dense mask of {gib(size)}, of one shape",
    }
    requested, pattern = plan.config.device.name, pattern_of(plan.model)
    devices = [requested] if requested in NAMES else NAMES
    kernels: dict[str, list[str]] = {}
    for device in devices:
        kernel = device_named(device).attention_kernel(pattern, plan.precision.compute_dtype, head_dim(plan.model))
        kernels.setdefault(kernel, []).append(device)
    if len(kernels) == 1:
        return words[next(iter(kernels))]
    return "; ".join(f"on {' and '.join(names)} {words[kernel]}" for kernel, names in kernels.items())


def _validation(plan: Plan) -> Iterator[str]:
    """Yield a note on the number of examples per validation, which decides the best checkpoint."""
    trainer, data = plan.config.trainer, plan.config.data
    samples = samples_per_epoch(data, 1)
    if not samples:  # rejected when the split is read
        return
    kind, size = "sequences" if data.pack else "examples", trainer.global_batch_size
    used = samples if trainer.val_steps is None else trainer.val_steps * size
    if trainer.val_steps is None:
        batches = -(-samples // size)
        each = f"all {samples:,} {kind}" if samples > 1 else f"the only {kind[:-1]}"
        yield f"each validation uses {each}, in {f'{batches:,} batches' if batches > 1 else 'a batch'} of {size}"
    elif used < samples:
        yield f"each validation uses {used:,} of {samples:,} {kind}; trainer.val_steps=null uses all"
    elif used > samples:
        yield (
            f"each validation uses {used:,} {kind} of {samples:,}, so some count twice; trainer.val_steps=null uses "
            "each once"
        )
