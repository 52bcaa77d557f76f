"""From a ``Config`` and a number of devices to a ``Plan``: everything derived is derived here, once."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from megatron_llama.config.data_prefixes import record_files, weights_and_paths
from megatron_llama.config.fields import check_limits, with_defaults_for
from megatron_llama.config.problems import ConfigError, Problem
from megatron_llama.config.settings import Config
from megatron_llama.plan.epochs import epochs_of, samples_per_epoch
from megatron_llama.plan.memory import Machine, check_memory
from megatron_llama.plan.plan import Plan
from megatron_llama.plan.rules import RULES
from megatron_llama.plan.rules.finetune import derive_finetuning
from megatron_llama.plan.rules.paths import check_data, check_files, check_quantizer, check_weights
from megatron_llama.plan.rules.rule import check_rules
from megatron_llama.plan.shapes import padded_vocab_size

COSINE = {
    "_target_": "megatron_llama.optim.schedules.CosineAnnealing",
    "max_steps": "${trainer.steps}",
    "warmup_steps": "${optim.warmup_steps}",
    "constant_steps": "${optim.constant_steps}",
    "min_lr": "${optim.min_lr}",
}
LONGEST_WARMUP_STEPS = 2000
VALIDATION_STEPS = 4


def resolve(
    config: Config,
    world_size: int,
    machine: Machine | None = None,
    exists: Callable[[str], bool] = os.path.exists,
    known: Sequence[Problem] = (),
) -> Plan:
    """What ``config`` means on ``world_size`` devices, or a ConfigError with everything that is wrong with it.

    ``config`` is left as it is. ``exists`` is the only look at the world outside: whether the files that the config
    names are there; pass ``lambda path: True`` to plan for another machine. ``machine`` is the memory that the ranks
    must fit into; None leaves that question to ``device.memory_gib``. ``known`` are problems found before, by
    ``load_config``: they are in the ConfigError too, and no rule speaks of their settings a second time.
    """
    bad = check_limits(config)
    problems = [*known, *bad]
    # Rules about how values go together are asked of a copy in which impossible values are replaced by their defaults:
    # each mistake is reported once, and the others are still found.
    sound = with_defaults_for(config, bad)
    problems += check_rules(RULES, sound, world_size, {problem.field for problem in problems})
    notes: list[str] = []
    plan = None if problems else _plan(derived(sound, world_size, notes), world_size)
    if plan is not None and sound.trainer.epochs is not None:
        problems += check_rules(RULES, plan.config, world_size)  # of the steps, which are known only now
        if plan.config.trainer.steps == 0:
            size = sound.trainer.global_batch_size
            rule = f"gives no step: all samples together are less than trainer.global_batch_size={size}"
            advice = "write a smaller trainer.global_batch_size, or more epochs"
            problems.append(Problem("trainer.epochs", sound.trainer.epochs, rule, advice))
    # A dry run asks what a run would be. What only this machine lacks, and a command, a download or a bigger machine
    # mends, is worth a note there; what the user stated (device.memory_gib, a file that no command makes) still stops.
    missing = check_data(sound, exists)
    _note_or_stop(missing, sound.dry_run and sound.data.prepare is not None, notes, problems)
    _note_or_stop(check_quantizer(sound), sound.dry_run, notes, problems)
    _note_or_stop(check_weights(sound, exists), sound.dry_run, notes, problems)
    problems += check_files(sound, exists)
    notes += [
        f"{path} is not prepared yet: a run does that first, with data_prep/sft.py's code"
        for _, path in record_files(sound.data)
    ]
    if plan is not None:
        _note_what_surprises(sound, plan.config, notes)
    too_big = check_memory(plan, machine) if plan else []
    _note_or_stop(too_big, sound.dry_run and sound.device.memory_gib is None, notes, problems)
    if problems:
        raise ConfigError(problems)
    assert plan is not None, "there is a plan where there is no problem"
    return replace(plan, notes=tuple(notes))


def _note_or_stop(found: list[Problem], is_note: bool, notes: list[str], problems: list[Problem]) -> None:
    """Puts what was found among the notes of a dry run, or among the problems."""
    if is_note:
        notes += [f"a run would be refused here: {problem}" for problem in found]
    else:
        problems += found


def _note_what_surprises(asked: Config, config: Config, notes: list[str]) -> None:
    """What was asked for and never happens in this run; and that it sees its data more than once."""
    trainer, data = config.trainer, config.data
    if trainer.val_every_steps is not None and trainer.val_every_steps > trainer.steps > 0:
        notes.append(f"no validation: trainer.val_every_steps={trainer.val_every_steps} of {trainer.steps} steps")
    if data.mock:
        if data.prefixes:
            notes.append("data.mock=true makes tokens up: data.prefixes is not read")
    elif asked.trainer.epochs is None:
        try:
            epochs = epochs_of(data, trainer.steps * trainer.global_batch_size)
        except (OSError, ValueError):  # missing or broken: the checks of files say so
            return
        if epochs > 1:
            which = "the most used dataset" if weights_and_paths(data.prefixes)[0] else "the training data"
            notes.append(f"{which} is read {epochs:.3g} times, in another order each time")


def derived(config: Config, world_size: int, notes: list[str]) -> Config:
    """A copy of a config that breaks no rule, with every value filled in that follows from others."""
    config = copy.deepcopy(config)
    model, data, trainer, optim = config.model, config.data, config.trainer, config.optim
    if model.num_key_value_heads is None:
        model.num_key_value_heads = model.num_attention_heads
    if model.head_dim is None:
        model.head_dim = model.hidden_size // model.num_attention_heads
    if data.cache_dir is None and data.prefixes and not data.mock:
        first = weights_and_paths(data.prefixes)[1][0]
        data.cache_dir = os.path.join(os.path.dirname(first), "index_cache")
    if trainer.dp is None:
        trainer.dp = world_size // (trainer.tp * trainer.pp)
    if trainer.shard_group is None:
        trainer.shard_group = trainer.dp
    if trainer.compile_cache is None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        trainer.compile_cache = os.path.join(home, "megatron_llama", "compile")
    trainer.compile_cache = os.path.abspath(os.path.expanduser(trainer.compile_cache))
    _derive_sequence_parallelism(config, notes)
    derive_finetuning(config, notes)
    chunks = split_layers(model.num_hidden_layers, trainer.pp, trainer.vpp, trainer.pipeline_layers)
    trainer.pipeline_layers = [sum(len(chunk) for chunk in chunks[stage :: trainer.pp]) for stage in range(trainer.pp)]
    if optim.min_lr is None:
        optim.min_lr = optim.lr / 10
    _derive_steps(config, notes)
    _derive_validation(config, notes)
    if optim.warmup_ratio is not None:
        optim.warmup_steps, optim.warmup_ratio = math.ceil(optim.warmup_ratio * trainer.steps), None
    optim.constant_steps = default_constant_steps(config) if optim.constant_steps is None else optim.constant_steps
    optim.warmup_steps = default_warmup_steps(config) if optim.warmup_steps is None else optim.warmup_steps
    optim.schedule = _without_interpolations(config)
    return config


def _derive_steps(config: Config, notes: list[str]) -> None:
    """The steps of ``trainer.epochs``, which they then replace: a resolved config says a run's length once."""
    trainer, data = config.trainer, config.data
    if trainer.epochs is None:
        return
    try:
        samples = samples_per_epoch(data)
    except (OSError, ValueError):  # missing or broken: the checks of files say so
        notes.append(f"trainer.epochs={trainer.epochs} needs the dataset; this plan is for {trainer.steps} steps")
        return
    trainer.steps = trainer.epochs * samples // trainer.global_batch_size
    epochs = f"{trainer.epochs} {'epoch' if trainer.epochs == 1 else 'epochs'}"
    notes.append(
        f"{epochs} of {samples:,} sequences in batches of {trainer.global_batch_size}: {trainer.steps:,} steps"
    )
    trainer.epochs = None


def _derive_validation(config: Config, notes: list[str]) -> None:
    """How much each validation looks at; for fine-tuning, whose best checkpoint it chooses, with a note."""
    trainer, data = config.trainer, config.data
    if data.kind != "sft" or data.mock:
        trainer.val_steps = trainer.val_steps or VALIDATION_STEPS
        return
    try:
        samples = samples_per_epoch(data, 1) if trainer.val_every_steps else 0
    except (OSError, ValueError):  # as above
        return
    if not samples:  # it never validates, or is refused when the split is read
        return
    kind, size = "sequences" if data.pack else "examples", trainer.global_batch_size
    if trainer.val_steps is None:
        notes.append(f"each validation is on all {samples:,} {kind}, in batches of {size}: {-(-samples // size):,}")
        return
    seen = trainer.val_steps * size
    if seen < samples:
        notes.append(f"each validation is on {seen:,} of {samples:,} {kind}; trainer.val_steps=null takes them all")
    elif seen > samples:
        rule = f"each validation takes {seen:,} {kind} of {samples:,}, so that some count more often than others"
        notes.append(f"{rule}; trainer.val_steps=null takes each once")


def split_layers(layers: int, pp: int, vpp: int, pipeline_layers: Sequence[int] | None) -> list[tuple[int, ...]]:
    """Layer numbers of each virtual stage; entry v * pp + p is chunk v of stage p, ascending in that order."""
    if pipeline_layers is None:
        sizes = spread(layers, pp * vpp)
    else:
        chunks = [spread(count, vpp) for count in pipeline_layers]
        sizes = [chunks[stage][chunk] for chunk in range(vpp) for stage in range(pp)]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def spread(total: int, places: int) -> list[int]:
    """``total`` over ``places`` as evenly as whole numbers allow, the first places taking what is left over."""
    share, left_over = divmod(total, places)
    return [share + (place < left_over) for place in range(places)]


def default_warmup_steps(config: Config) -> int:
    """A tenth of the steps, at most 2000, and no more than the constant steps leave."""
    left = max(config.trainer.steps - (config.optim.constant_steps or 0), 0)
    return min(config.trainer.steps // 10, LONGEST_WARMUP_STEPS, left)


def default_constant_steps(config: Config) -> int:
    """0; for warm-up, stable, decay a tenth of the steps, which is its decay, or what the warm-up leaves of it."""
    decays_at_the_end = str(config.optim.schedule.get("_target_", "")).endswith(".WarmupStableDecay")
    left = max(config.trainer.steps - (config.optim.warmup_steps or 0), 0)
    return min(-(-config.trainer.steps // 10), left) if decays_at_the_end else 0


def _derive_sequence_parallelism(config: Config, notes: list[str]) -> None:
    """On where tp > 1 and the sequence divides; off where there is nothing to split."""
    trainer, tp, length = config.trainer, config.trainer.tp, config.data.seq_length
    if trainer.sp is None:
        trainer.sp = tp > 1 and length % tp == 0
        if tp > 1 and not trainer.sp:
            notes.append(f"sequence parallelism is off: data.seq_length={length} does not divide by trainer.tp={tp}")
    elif trainer.sp and tp == 1:
        trainer.sp = False
        notes.append("trainer.sp=true does nothing at trainer.tp=1, so it is off")


def _without_interpolations(config: Config) -> dict[str, Any]:
    """The schedule's arguments with ``${...}`` replaced by the values derived above."""
    schedule = config.optim.schedule or dict(COSINE)
    if "${" not in str(schedule):
        return schedule
    from omegaconf import OmegaConf  # here, not above: a config made in Python needs no OmegaConf

    config.optim.schedule = schedule
    whole = OmegaConf.structured(config)
    return cast("dict[str, Any]", OmegaConf.to_container(whole.optim.schedule, resolve=True))


def _plan(config: Config, world_size: int) -> Plan:
    """The plan of a config in which nothing is left to derive."""
    trainer = config.trainer
    assert trainer.dp is not None, "derived() has set it"
    return Plan(
        config=config,
        world_size=world_size,
        dp=trainer.dp,
        num_microbatches=trainer.global_batch_size // (trainer.micro_batch_size * trainer.dp),
        stage_layers=tuple(
            split_layers(config.model.num_hidden_layers, trainer.pp, trainer.vpp, trainer.pipeline_layers)
        ),
        padded_vocab_size=padded_vocab_size(config.model.vocab_size, trainer.tp),
    )
