"""What each setting may be on its own: choices, ranges, forms. How settings go together is in rules.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_llama.config import settings
from megatron_llama.config.fields import settings_by_name
from megatron_llama.config.precision import PRECISIONS
from megatron_llama.config.problems import Problem, nearest, shown
from megatron_llama.config.settings import Config


@dataclass(frozen=True)
class Limit:
    """What a value must satisfy, in code and in words."""

    holds: Callable[[Any], bool]
    rule: str
    example: str | None = None
    """A legal value for the advice; the setting's default where None."""


def check_limits(config: Config) -> list[Problem]:
    """The settings whose value is impossible whatever the others are."""
    problems = []
    for name, limit in LIMITS.items():
        value = get(config, name)
        setting = settings_by_name()[name]
        if (value is None and setting.optional) or _under_null(config, name):
            continue
        rule = limit.rule
        if setting.kind in (int, float) and abs(value) >= TOO_LARGE:
            rule = f"must be below {TOO_LARGE:.0g}"
        elif limit.holds(value):
            continue
        example = limit.example or shown(setting.default)
        if name in CHOICES:
            example = nearest(str(value), CHOICES[name]) or example
        problems.append(Problem(name, value, rule, f"write {name}={example}"))
    return problems


def with_defaults_for(config: Config, problems: Iterable[Problem]) -> Config:
    """A copy in which the settings that ``problems`` name have their default value."""
    config = copy.deepcopy(config)
    for problem in problems:
        section, _, key = problem.field.rpartition(".")
        setattr(get(config, section), key, copy.deepcopy(settings_by_name()[problem.field].default))
    return config


def get(config: Config, name: str) -> Any:
    """The value of the setting ``name``; None inside a section that is null."""
    value: Any = config
    for key in name.split("."):
        value = getattr(value, key) if value is not None else None
    return value


def is_number(item: object) -> bool:
    """Whether an entry of data.prefixes is a weight."""
    try:
        float(str(item))
    except ValueError:
        return False
    return True


def _under_null(config: Config, name: str) -> bool:
    """Whether the setting's section is null, so that it has no value at all."""
    return get(config, name.rpartition(".")[0]) is None


def _good_betas(betas: list[float]) -> bool:
    return len(betas) == 2 and all(0 <= beta < 1 for beta in betas)


def _good_split(split: str) -> bool:
    shares = split.split(",")
    if len(shares) != 3 or not all(is_number(share) for share in shares):
        return False
    return all(float(share) >= 0 for share in shares) and float(shares[0]) > 0


def _good_prefixes(prefixes: list[Any]) -> bool:
    """Only paths; or weight, path, weight, path, ... with weights above zero."""
    if not any(is_number(item) for item in prefixes):
        return all(str(item).strip() for item in prefixes)
    pairs = list(zip(prefixes[::2], prefixes[1::2], strict=False))
    return len(prefixes) % 2 == 0 and all(
        is_number(weight) and float(weight) > 0 and not is_number(path) for weight, path in pairs
    )


def _some_of(legal: tuple[str, ...]) -> Callable[[list[str]], bool]:
    return lambda names: set(names) <= set(legal) and len(set(names)) == len(names)


def _at_least(names: str, least: float) -> dict[str, Limit]:
    return {
        name: Limit(lambda value: value >= least, f"must be at least {least:g}", _legal(name, least))
        for name in names.split()
    }


def _above_zero(names: str) -> dict[str, Limit]:
    return {name: Limit(lambda value: value > 0, "must be above 0", _legal(name, 1)) for name in names.split()}


def _legal(name: str, fallback: float) -> str:
    """An example for the advice: the default, or ``fallback`` where the default is to derive it."""
    default = settings_by_name()[name].default
    return f"{fallback:g}" if default is None else shown(default)


# More of anything is a slip of the keyboard, or infinity. Ranks add to the seed, and libraries take 32 bits of it.
TOO_LARGE = 1e18
LARGEST_SEED = 2**31 - 1
# As a shell and Hydra's grammar, in which commas ask for a sweep, let it through.
GOOD_SPLIT = "'\"969,30,1\"'"

CHOICES: Mapping[str, tuple[str, ...]] = {
    "trainer.precision": tuple(PRECISIONS),
    "trainer.recompute": settings.RECOMPUTE,
    "optim.name": settings.OPTIMIZERS,
    "finetune.method": settings.FINETUNE_METHODS,
    "data.kind": settings.DATA_KINDS,
    "data.chat_template": settings.CHAT_TEMPLATES,
    "data.template": settings.LABEL_TEMPLATES,
    "device.name": settings.DEVICES,
    "model.rope_scaling.rope_type": ("llama3",),
}

LIMITS: Mapping[str, Limit] = {
    **{name: Limit(legal.__contains__, f"must be one of {', '.join(legal)}") for name, legal in CHOICES.items()},
    "trainer.precision": Limit(PRECISIONS.__contains__, f"must be one of {', '.join(PRECISIONS)}; there is no fp8 yet"),
    "trainer.zero": Limit(lambda stage: stage in settings.ZERO_STAGES, "must be one of 0, 1, 2, 3"),
    **_at_least("model.vocab_size", 2),
    **_at_least(
        "model.hidden_size model.intermediate_size model.num_hidden_layers model.num_attention_heads "
        "model.num_key_value_heads model.head_dim model.max_position_embeddings data.seq_length trainer.tp trainer.pp "
        "trainer.vpp trainer.dp trainer.shard_group trainer.micro_batch_size trainer.global_batch_size "
        "trainer.epochs trainer.val_every_steps trainer.val_steps logging.every_steps logging.sample_tokens "
        "checkpoint.every_steps checkpoint.keep checkpoint.keep_every finetune.lora_rank model.rope_scaling.factor "
        "model.rope_scaling.original_max_position_embeddings",
        1,
    ),
    **_at_least(
        "trainer.steps trainer.skip_nonfinite_steps trainer.max_restarts optim.min_lr optim.warmup_steps "
        "optim.constant_steps optim.weight_decay",
        0,
    ),
    "trainer.seed": Limit(lambda seed: 0 <= seed <= LARGEST_SEED, f"must be between 0 and {LARGEST_SEED}"),
    **_above_zero(
        "finetune.lora_alpha "
        "trainer.hang_timeout_seconds model.rms_norm_eps model.rope_theta model.initializer_range "
        "model.rope_scaling.low_freq_factor "
        "model.rope_scaling.high_freq_factor optim.lr optim.eps optim.clip device.peak_tflops device.memory_gib"
    ),
    "optim.warmup_ratio": Limit(lambda ratio: 0 <= ratio <= 1, "must be between 0 and 1", "0.03"),
    "optim.betas": Limit(_good_betas, "must be two numbers, each at least 0 and below 1"),
    "data.split": Limit(
        _good_split, "must be three shares, for training, validation and test, the first above 0", GOOD_SPLIT
    ),
    "data.prefixes": Limit(
        _good_prefixes,
        "must be paths only, or weight, path, weight, path, ... with weights above 0",
        "[0.7,path/one,0.3,path/two]",
    ),
    "finetune.frozen_dtype": Limit(
        settings.FROZEN_DTYPES.__contains__, f"must be one of {', '.join(settings.FROZEN_DTYPES)}", "bf16"
    ),
    "finetune.lora_dropout": Limit(lambda share: 0 <= share < 1, "must be a share, at least 0 and below 1"),
    "finetune.lora_target_modules": Limit(
        lambda names: bool(names) and _some_of(settings.LORA_TARGETS)(names),
        f"must be some of {', '.join(settings.LORA_TARGETS)}, each once",
    ),
    "finetune.modules_to_save": Limit(
        _some_of(settings.SAVED_MODULES),
        f"must be some of {', '.join(settings.SAVED_MODULES)}, each once",
        "[embed_tokens,norm]",
    ),
    "checkpoint.resume": Limit(lambda resume: bool(resume.strip()), "must be auto, never or the path of a checkpoint"),
}
