"""Defaults that depend on the model and the device. What somebody has written is never changed; what is chosen is named
in the plan, with the reason. Notes for the user are here too."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megatron_llama.arch.pattern import Pattern, pattern_of
from megatron_llama.arch.shapes import head_dim
from megatron_llama.config.data_settings import split_weights
from megatron_llama.config.fields import get, settings_by_name
from megatron_llama.config.precision import LEAST_IN_BLOCKS, STATE_BLOCK
from megatron_llama.config.problems import format_value
from megatron_llama.config.settings import Config
from megatron_llama.corpus.epochs import samples_per_epoch
from megatron_llama.devices import NAMES, device_named, find_device
from megatron_llama.plan.derive import check_split
from megatron_llama.plan.plan import Plan
from megatron_llama.system.files import check_yaml, read_whole
from megatron_llama.system.tables import gib

CHOSEN = ("data.seq_length", "trainer.precision", "trainer.compile")
KEPT = (*CHOSEN, "trainer.pipeline_layers")
"""What a run that goes on keeps. Layers of stages are chosen in derive.py, once all rules hold."""
LONGEST_BY_DEFAULT = 8192
"""Tokens. Llama 3.1's 131,072 positions come from a last stage of training; before it, sequences have 8,192
(arXiv:2407.21783, section 3.4). Longer ones are asked for."""
SHORT = 256
"""Tokens in a sequence on a CPU."""
LONG_RUN = 1000
"""Steps that repay the minute or two that a compiler takes."""


def choose_defaults(config: Config, fast_bf16: bool = True) -> tuple[Config, tuple[str, ...]]:
    """A copy of ``config`` with values in place of what was left open, and lines that say which and why.

    ``fast_bf16`` is whether the accelerator, where it is known, has units for bf16. A CPU takes fp32 also where it has
    them: what it is for is small runs that can be compared to the last bit. A device that is not known, as in plans
    for other machines, is taken for a CPU. A run that goes on keeps what it began with, wherever it goes on.
    """
    config = copy.deepcopy(config)
    begun = list(_as_begun(config))
    device = find_device(config.device.name)
    on_accelerator = device is not None and device.is_accelerator
    choose = _on_an_accelerator(config, fast_bf16) if on_accelerator else _on_a_cpu(config)
    return config, (*begun, *choose)


def _as_begun(config: Config) -> Iterator[str]:
    """Takes over, in place, what the run that goes on has in its config.yaml."""
    run = resumed_run_dir(config)
    if run is None or all(get(config, name) is not None for name in KEPT):
        return
    try:
        check_yaml(run / "config.yaml")
        saved: dict[str, Any] = yaml.safe_load(read_whole(run / "config.yaml")) or {}
    except (OSError, ValueError, yaml.YAMLError):  # its checkpoint says the same, and what differs is told
        return
    kept = []
    for name in KEPT:
        section, _, key = name.partition(".")
        group = saved.get(section)
        value = group.get(key) if isinstance(group, dict) else None
        setting = settings_by_name()[name]
        if name == "trainer.pipeline_layers" and not _same_stages(config, saved):
            continue
        if get(config, name) is None and setting.has_type(value) and not setting.problem(value):
            setattr(get(config, section), key, value)
            kept.append(f"{name}={format_value(value)}")
    if kept:
        yield f"{', '.join(kept)}: {run} began so"


def _same_stages(config: Config, saved: dict[str, Any]) -> bool:
    """Whether the run began with as many stages, of as many layers together."""
    there, here = saved.get("trainer"), config.trainer
    if not isinstance(there, dict) or here.pp == 1:
        return False
    split = there.get("pipeline_layers")
    if not isinstance(split, list) or not all(isinstance(size, int) for size in split) or there.get("vpp") != here.vpp:
        return False
    return check_split(split, config.model.num_hidden_layers, here.pp, here.vpp) is None


def resumed_run_dir(config: Config) -> Path | None:
    """The folder of the run whose checkpoint this one goes on from; None where there is none."""
    resume = config.checkpoint.resume
    if resume not in ("auto", "never"):
        return Path(resume).parent.parent  # RUN/checkpoints/step_00000100
    if resume == "never" or config.run.dir is None:
        return None
    run = Path(config.run.dir)
    return run if any(run.glob("checkpoints/step_*")) else None


def _on_an_accelerator(config: Config, fast_bf16: bool) -> Iterator[str]:
    """Chooses, in place."""
    data, trainer, own = config.data, config.trainer, config.model.max_position_embeddings
    if data.seq_length is None:
        data.seq_length = min(own, LONGEST_BY_DEFAULT)
        whole = data.seq_length == own
        yield f"data.seq_length={data.seq_length}: the model's own{'' if whole else f' {own:,} has to be asked for'}"
    if trainer.precision is None:
        trainer.precision = "bf16" if fast_bf16 else "fp32"
        why = f"{config.device.name} multiplies it fast" if fast_bf16 else "this device has no units for bf16"
        yield f"trainer.precision={trainer.precision}: {why}"
    if trainer.compile is None:
        trainer.compile = trainer.epochs is None and trainer.steps >= LONG_RUN  # the steps of epochs are not known yet
        yield f"trainer.compile={format_value(trainer.compile)}: it pays from {LONG_RUN:,} steps on"


def _on_a_cpu(config: Config) -> Iterator[str]:
    """Chooses, in place."""
    own, chosen = config.model.max_position_embeddings, []
    if config.data.seq_length is None:
        config.data.seq_length = min(own, SHORT)
        chosen.append(f"data.seq_length={config.data.seq_length}")
    if config.trainer.precision is None:
        config.trainer.precision = "fp32"
        chosen.append("trainer.precision=fp32")
    if config.trainer.compile is None:
        config.trainer.compile = False
        chosen.append("trainer.compile=false")
    if chosen:
        yield f"{', '.join(chosen)}: for small runs on a CPU"
        if find_device(config.device.name) is None:
            accelerators = [name for name in NAMES if device_named(name).is_accelerator]
            yield f"no device is named, and device={' or '.join(accelerators)} would choose others"


# Notes for the user on a plan that works.

DEMO = "python_stdlib"
LARGE = 10**9
"""Parameters of a model that nobody trains on the demo's text."""


def list_notes(config: Config, plan: Plan) -> Iterator[str]:
    """Notes on the plan that was derived from ``config``; what derivation itself noted is in the plan already."""
    method, trainer, data = config.finetune.method, plan.config.trainer, config.data
    if method != "none" and config.init_from is None:
        yield (
            f"finetune.method={method} starts from random weights here, which is of use for measuring only: init_from "
            "is not set"
        )
    for _, path in plan.raw_data_files:
        yield f"{path} is not prepared yet: a run does that first, with data_prep/sft.py's code"
    if trainer.val_every_steps is not None and trainer.val_every_steps > trainer.steps > 0:
        yield f"no validation: trainer.val_every_steps={trainer.val_every_steps} of {trainer.steps} steps"
    pattern, inside = pattern_of(plan.model), data.pack or data.document_mask
    if inside or pattern.is_sparse(data.length):
        pattern = pattern if pattern.is_sparse(data.length) else Pattern()
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
    weights, paths = split_weights(data.prefixes)
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
    if pattern_of(plan.model).is_sparse(ltd.seq_length):
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
