"""Defaults that depend on the model and the device. What somebody has written is never changed; what is chosen is named
in the plan, with the reason."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megatron_llama.config.fields import get, settings_by_name
from megatron_llama.config.problems import shown
from megatron_llama.config.settings import Config
from megatron_llama.devices import NAMES, device_named, find_device
from megatron_llama.plan.stage_split import fault_of
from megatron_llama.system.bounded_yaml import check_yaml
from megatron_llama.system.files import read_whole

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
    run = run_that_goes_on(config)
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
            kept.append(f"{name}={shown(value)}")
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
    return fault_of(split, config.model.num_hidden_layers, here.pp, here.vpp) is None


def run_that_goes_on(config: Config) -> Path | None:
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
        yield f"trainer.compile={shown(trainer.compile)}: it pays from {LONG_RUN:,} steps on"


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
