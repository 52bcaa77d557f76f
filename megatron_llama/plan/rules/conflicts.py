"""Settings that exclude each other, and settings that need another one: a row each.

Rules that compute a size, or that read files, are functions in the other modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from megatron_llama.arch.parameters import qk_norm
from megatron_llama.config.data_settings import CurriculumMetric, split_weights, valid_metrics
from megatron_llama.config.hf_config import NO_HF_BLOCKS
from megatron_llama.config.optimizers import OptimizerRow
from megatron_llama.config.precision import PRECISIONS, QUANTIZED_BITS
from megatron_llama.config.problems import Problem, format_value
from megatron_llama.config.settings import CHAT_FORMATS, RENDERED, Config
from megatron_llama.config.settings_table import get, settings_by_name
from megatron_llama.devices import Device, find_device
from megatron_llama.plan.rules.rule import Rule


@dataclass(frozen=True)
class Feature:
    """A use of a setting."""

    setting: str
    condition: Callable[[Config], bool] | None = None
    """Whether a config uses the feature. Default: the value is neither ``off`` nor null, false or an empty list."""
    off: str = ""
    """Value without the feature, if not the default of the setting; ``FIXED``: it cannot be changed."""
    reads: tuple[str, ...] = ()
    """Other settings that ``condition`` reads."""

    def is_used(self, config: Config) -> bool:
        """Return whether a config uses the feature."""
        if self.condition is not None:
            return self.condition(config)
        return format_value(get(config, self.setting)) not in (self.value_without, "null", "false", "[]")

    @property
    def value_without(self) -> str:
        """The value to write for a config without the feature."""
        setting = settings_by_name().get(self.setting)
        return self.off or format_value(setting.default if setting else None)

    def value(self, config: Config) -> Any:
        """Return the value to report; None for a section or a list of mappings, which is long."""
        value = get(config, self.setting)
        is_long = is_dataclass(value) or (isinstance(value, list) and any(isinstance(item, Mapping) for item in value))
        return None if is_long else value


FIXED = "-"
COMPILE = Feature("trainer.compile", off="false")
LORA = Feature("finetune.method", lambda config: config.finetune.method == "lora", "full")
PREFERENCES = Feature("finetune.objective")
REFERENCE = Feature("finetune.objective", lambda config: config.finetune.objective in ("dpo", "kto"))
QUANTIZED = Feature(
    "finetune.frozen_dtype",
    lambda config: LORA.is_used(config) and config.finetune.frozen_dtype in QUANTIZED_BITS,
    "bf16",
    ("finetune.method",),
)
OFFLOADED_STATES = Feature("trainer.offload", lambda config: "optimizer" in config.trainer.offload)
OFFLOADED_ACTIVATIONS = Feature("trainer.offload", lambda config: "activations" in config.trainer.offload)
BF16_WEIGHTS = Feature(
    "trainer.precision", lambda config: PRECISIONS[str(config.trainer.precision)].param_dtype != "float32", "bf16"
)
BLEND = Feature("data.prefixes", lambda config: bool(split_weights(config.data.prefixes)[0]), FIXED)
NORMS_OF_HEADS = Feature("model.model_type", lambda config: qk_norm(config.model) is not None, FIXED)
REWINDS = Feature("trainer.spike_guard", lambda config: config.trainer.spike_guard == "rewind", "skip")


MOCK = Feature("data.mock", off="false")
TEXTS = Feature("data.format", lambda config: config.data.format == RENDERED)
LENGTHS = Feature("data.curriculum", lambda config: any(each.is_length for each in _curriculum(config)))
DIFFICULTIES = Feature("data.curriculum", lambda config: any(not each.is_length for each in _curriculum(config)))


def _curriculum(config: Config) -> tuple[CurriculumMetric, ...]:
    return valid_metrics(config.data.curriculum)


def _device(condition: Callable[[Device], bool]) -> Feature:
    """Return the use of a device by its properties in devices/base.py; not of an unknown one."""

    def is_used(config: Config) -> bool:
        device = find_device(config.device.name)
        return device is not None and condition(device)

    return Feature("device.name", is_used, FIXED)


WITHOUT_FLOAT8 = _device(lambda device: not device.has_float8)
WITHOUT_INT64_SUMS = _device(lambda device: not device.sums_int64)


def _optimizer(condition: Callable[[OptimizerRow], bool], off: str = "adamw") -> Feature:
    """Return the use of an optimizer by its properties in config/optimizers.py."""
    return Feature("optim.name", lambda config: condition(config.optim.row), off)


SUMS_GRADIENTS = _optimizer(lambda row: row.sums_gradients)
EXCHANGES_SIGNS = _optimizer(lambda row: row.exchanges_signs)
EXCHANGES_NO_SIGNS = _optimizer(lambda row: not row.exchanges_signs, "onebit_adam")
UPDATES_VALUES = _optimizer(lambda row: not row.gathers_matrices, "muon")


def _refusal(feature: Feature) -> tuple[Feature, Feature, str]:
    """Return the row of a feature that optimizers refuse, with the reason in config/optimizers.py."""
    refusing = _optimizer(lambda row: feature.setting in row.refuses)
    return feature, refusing, f"it {{optim.row.refuses[{feature.setting}]}}"


CONFLICTS: tuple[tuple[Feature | str, Feature | str, str], ...] = (
    ("model.sliding_window", "model.sparse_attention", "a layer has one pattern of attention"),
    ("checkpoint.export_hf", "model.sparse_attention", NO_HF_BLOCKS),
    ("launch.hosts", "launch.hostfile", "both list the hosts"),
    # Exchanges between data-parallel ranks
    ("trainer.grad_reduce", SUMS_GRADIENTS, "it exchanges gradients itself"),
    (Feature("trainer.zero", off="0"), SUMS_GRADIENTS, "it exchanges unsharded gradients or momenta"),
    ("trainer.param_gather", QUANTIZED, "quantized matrices are gathered as they are"),
    # Matmuls and blocks
    ("trainer.mlp_chunks", COMPILE, "the compiler cannot trace the chunks' backward pass"),
    ("trainer.mlp_chunks", "trainer.float8", "it would scale each chunk by its own maximum"),
    ("trainer.mlp_chunks", "finetune.lora_dropout", "the second pass over a chunk would draw another mask"),
    ("finetune.lora_dropout", "finetune.use_dora", "the frozen matrices would multiply a second input"),
    ("trainer.float8", "trainer.async_tp", "it fuses collectives into matmuls of other formats"),
    ("trainer.float8", WITHOUT_FLOAT8, "it has no float8 matmuls"),
    ("trainer.float8", QUANTIZED, "quantized matrices are multiplied in bf16 or fp32"),
    ("trainer.async_tp", "trainer.cp", "overlapped matmuls were not tested with it"),
    ("trainer.random_ltd", LENGTHS, "its lengths also shorten sequences"),
    ("trainer.random_ltd", "trainer.cp", "a random subset of a sequence has no equal parts on its ranks"),
    # Exact mode
    ("trainer.exact", WITHOUT_INT64_SUMS, "sums of int64 were not tested with it"),
    ("trainer.exact", LORA, "its matmuls have no blocks"),
    ("trainer.exact", EXCHANGES_SIGNS, "the mean of signs depends on the number of ranks"),
    ("trainer.exact", COMPILE, "its fused operations depend on the shapes of a layout"),
    ("trainer.exact", "trainer.float8", "it is another replacement of the matmuls"),
    ("trainer.exact", "trainer.grad_reduce", "it rounds parts of sums"),
    ("trainer.exact", "trainer.param_gather", "it rounds weights by blocks of a rank's shard"),
    ("trainer.exact", "trainer.mlp_chunks", "it is another split of the matmuls"),
    # Preference training
    ("finetune.adapter", REFERENCE, "it compares answers with the initial weights, which an adapter changes"),
    (MOCK, PREFERENCES, "mock data has no preferences"),
    ("data.curriculum", PREFERENCES, "one of two answers would decide on the place and the length of an example"),
    ("trainer.z_loss", PREFERENCES, "its loss is no cross entropy"),
    ("finetune.label_smoothing", "finetune.loss_type", "it has no term for swapped answers"),
    # QK-Clip
    ("optim.qk_clip", NORMS_OF_HEADS, "norms of q and k remove the scale of the weights, and bound the logits already"),
    ("optim.qk_clip", LORA, "it freezes the weights of q and k, which QK-Clip scales"),
    ("optim.qk_clip", COMPILE, "compiled blocks cannot read document lengths on the host for the largest logits"),
    ("optim.qk_clip", "trainer.exact", "the sums of its matmuls for logits depend on the layout"),
    # Optimizers
    *map(_refusal, (LORA, Feature("optim.state_bits"), OFFLOADED_STATES, BF16_WEIGHTS)),
    ("optim.freeze_step", EXCHANGES_NO_SIGNS, "it exchanges no signs"),
    ("optim.momentum", UPDATES_VALUES, "it does not orthogonalize matrices"),
    ("optim.matrix_lr", UPDATES_VALUES, "it does not orthogonalize matrices"),
    ("optim.adjust_lr", UPDATES_VALUES, "it does not orthogonalize matrices"),
    ("optim.split_heads", UPDATES_VALUES, "it does not orthogonalize matrices"),
    ("optim.warmup_ratio", "optim.warmup_steps", "both set the length of the warm-up"),
    # Data
    ("trainer.epochs", MOCK, "mock data is infinite"),
    ("trainer.epochs", DIFFICULTIES, "it draws easy samples more often, so there is no epoch"),
    (DIFFICULTIES, MOCK, "mock data has no index of samples"),
    ("trainer.epochs", BLEND, "a weighted blend has no epoch"),
    ("trainer.epochs", "data.schedule", "changing blends have no epoch"),
    ("data.schedule", "data.kind", "each epoch of fine-tuning reads all datasets"),
    ("data.document_mask", "data.kind", "packed examples never attend to each other"),
    ("data.eod_mask_loss", "data.kind", "fine-tuning datasets contain loss masks"),
    ("data.format", PREFERENCES, "the objective selects the format"),
    ("data.chat_template", TEXTS, "rendered chats need no template"),
    ("data.chat_template_kwargs", TEXTS, "rendered chats need no template"),
    ("data.template", TEXTS, "rendered chats need no template"),
)
"""Pairs of features that exclude each other, and the reason, whose "it" is the second. The first one is reported."""

Lacking = Mapping[str, tuple[Any, ...]]
NEEDS: tuple[tuple[Feature | str, Lacking, str, str], ...] = (
    ("trainer.reduce_group", {"trainer.grad_reduce": (None,)}, "a format", "trainer.grad_reduce=bf16 or int8"),
    ("trainer.reduce_group", {"trainer.zero": (0,)}, "sharded gradients", "trainer.zero=1, 2 or 3"),
    ("trainer.param_gather", {"trainer.zero": (0,)}, "sharded weights", "trainer.zero=1, 2 or 3"),
    ("trainer.secondary_group", {"trainer.zero": (0, 1, 2)}, "weights gathered in the backward pass", "trainer.zero=3"),
    ("trainer.vpp", {"trainer.pp": (1,)}, "pipeline stages", "trainer.pp=2"),
    ("trainer.recompute_every", {"trainer.recompute": ("none",)}, "recomputation", "trainer.recompute=full"),
    (
        OFFLOADED_ACTIVATIONS,
        {"trainer.recompute": ("elementwise", "selective")},
        "full (offloads block inputs) or no recomputation (offloads all saved tensors) for activations",
        "trainer.recompute=full or none",
    ),
    ("trainer.async_tp", {"trainer.tp": (1,)}, "tensor parallelism", "trainer.tp=2 or more"),
    ("trainer.async_tp", {"trainer.compile": (None, False)}, "the compiler", "trainer.compile=true"),
    (
        "trainer.async_tp",
        {"trainer.sp": (False,)},
        "sequence parallelism, whose collectives it overlaps with matmuls",
        "trainer.sp=true",
    ),
    (REFERENCE, {"finetune.method": ("none",)}, "initial weights to compare with", "finetune.method=full or lora"),
    (PREFERENCES, {"data.kind": ("pretrain",)}, "preferences", "data.kind=sft"),
    ("finetune.beta", {"finetune.objective": ("sft",)}, "preference training", "finetune.objective=dpo, orpo or kto"),
    ("finetune.loss_type", {"finetune.objective": ("sft", "orpo", "kto")}, "DPO", "finetune.objective=dpo"),
    ("finetune.label_smoothing", {"finetune.objective": ("sft", "orpo", "kto")}, "DPO", "finetune.objective=dpo"),
    ("finetune.desirable_weight", {"finetune.objective": ("sft", "dpo", "orpo")}, "KTO", "finetune.objective=kto"),
    ("finetune.undesirable_weight", {"finetune.objective": ("sft", "dpo", "orpo")}, "KTO", "finetune.objective=kto"),
    ("data.pack", {"data.kind": ("pretrain",)}, "the examples of fine-tuning data", "data.kind=sft"),
    ("data.response_marker", {"data.format": ("auto", *CHAT_FORMATS)}, "rendered chats", "data.format=text"),
    ("logging.sample_prompts", {"data.tokenizer": (None,)}, "a tokenizer", "data.tokenizer=path/to/tokenizer.model"),
    (
        REWINDS,
        {"checkpoint.every_steps": (None,), "checkpoint.every_minutes": (0,)},
        "checkpoints before the end of the run",
        "checkpoint.every_steps=100",
    ),
)
"""Features, values of other settings that exclude them, the missing part, and the text to write for it."""


def _conflict(one: Feature, other: Feature, reason: str) -> Rule:
    def conflict(config: Config, world_size: int) -> Iterator[Problem]:
        if one.is_used(config) and other.is_used(config):
            value = other.value(config)
            name = other.setting if value is None else f"{other.setting}={format_value(value)}"
            rule = f"conflicts with {name}: {reason.format(**vars(config))}"
            changes = [f"{each.setting}={each.value_without}" for each in (other, one) if each.off != FIXED]
            yield Problem(one.setting, one.value(config), rule, f"write {', or '.join(changes)}")

    return Rule(conflict, frozenset({one.setting, *one.reads, other.setting, *other.reads}))


def _need(one: Feature, lacking: Lacking, needed: str, instead: str) -> Rule:
    def need(config: Config, world_size: int) -> Iterator[Problem]:
        if one.is_used(config) and all(get(config, name) in values for name, values in lacking.items()):
            present = " and ".join(f"{name} is {format_value(get(config, name))}" for name in lacking)
            advice = f"write {instead}, or {one.setting}={one.value_without}"
            yield Problem(one.setting, one.value(config), f"needs {needed}; {present}", advice)

    return Rule(need, frozenset({one.setting, *lacking}))


def _feature(each: Feature | str) -> Feature:
    return Feature(each) if isinstance(each, str) else each


ROWS = (
    *(_conflict(_feature(one), _feature(other), reason) for one, other, reason in CONFLICTS),
    *(_need(_feature(one), lacking, needed, instead) for one, lacking, needed, instead in NEEDS),
)
