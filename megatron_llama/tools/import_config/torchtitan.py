"""Convert a TOML file of torchtitan. Tables of its keys: torchtitan.yaml."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_llama.config.problems import ConfigError, Problem, format_value
from megatron_llama.system.files import read_whole
from megatron_llama.system.programs import CONF_DIR
from megatron_llama.tools.import_config.conversion import Conversion, Kind, is_count, load_tables

MOST_BYTES, MOST_DOTS = 100_000, 500
"""Size of a file, and dots in one of its lines: the parser needs quadratic memory for a key with many dots."""
_PRESETS = {"llama3 8b": "llama3_8b", "llama3 70b": "llama3_70b", "llama3 405b": "llama3_405b"}
_PRESETS |= {f"qwen3 {size}": f"qwen3/{size}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")}
_DEBUG: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
_DEBUG |= {"num_attention_heads": 16, "rope_theta": 500000.0}
_SCALING = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
_SCHEDULES = {"linear": "linear", "cosine": "cosine"}


def convert_toml(path: Path, given: Mapping[str, str]) -> Conversion:
    """Convert the TOML at ``path`` with overrides, such as training.steps=100.

    Raises ConfigError with all reasons why the file cannot be converted.
    """
    try:
        text = read_whole(path, MOST_BYTES).decode()
        if any(line.count(".") > MOST_DOTS for line in text.splitlines()):
            raise ValueError(f"a line has more than {MOST_DOTS} dots")
        content = json.loads(json.dumps(tomllib.loads(text), default=str))  # dates as text
        values = dict(_leaves(content, ""))
        values |= {key.lstrip("-"): yaml.safe_load(value) for key, value in given.items()}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = str(error.strerror) if isinstance(error, OSError) else " ".join(str(error).split())
        rule = f"cannot be read as TOML: {reason}"
        raise ConfigError([Problem("file", str(path), rule, "write the path of a TOML file")]) from error
    if not {"model", "training"} & content.keys():
        rule = "has no model or training section; it is not a config of torchtitan"
        raise ConfigError([Problem("file", str(path), rule, "write the TOML of the training script")])
    return TorchtitanConversion(values, path.stem).run()


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


class TorchtitanConversion(Conversion):
    """Conversion of torchtitan's TOML keys; each method converts the keys of one subject."""

    tables = load_tables("torchtitan")
    relevant = ("model.flavor", "optimizer.name")

    def subjects(self) -> None:
        """Convert all subjects. torchtitan's defaults are written first."""
        self.assumed += self.tables.notes
        self.dataset("", [])
        self.settings |= self.tables.defaults
        self.shape()
        self.layout()
        self.batch()
        self.optimizer()
        self.precision()
        self.recompute()
        self.output()
        self.one_to_one()

    def shape(self) -> None:
        """Convert the flavor to the shape of a preset."""
        name, flavor = str(self.get("model.name", "llama3")).lower(), str(self.get("model.flavor", "debugmodel"))
        base, _, backend = flavor.lower().partition("_")
        if (preset := _PRESETS.get(f"{name} {base}")) is not None:
            path = CONF_DIR / "model" / f"{preset}.yaml"
            shape = yaml.safe_load(path.read_text(encoding="utf-8"))
            shape.pop("name")
        elif (name, base) == ("llama3", "debugmodel"):
            shape, preset = dict(_DEBUG), "6 layers of width 256"
        else:
            rule = f"is unknown: {name} {flavor}; known are {', '.join([*_PRESETS, 'llama3 debugmodel'])}"
            instead = "write model.flavor=8B after the file" if f"{name} 8b" in _PRESETS else "name another file"
            self.problems.append(Problem("model.flavor", flavor, rule, instead))
            return
        if name == "llama3" and self.get("model.tokenizer_path") is None:
            shape["rope_scaling"] = _SCALING
            self.assumed.append(
                f"model.rope_scaling of Llama 3.1, as torchtitan since October 2025: {format_value(_SCALING)}"
            )
        shape["max_position_embeddings"] = self.get("training.seq_len", 2048)
        self.settings |= {f"model.{key}": value for key, value in shape.items()}
        self.record("model.flavor", Kind.RENAMED, "model.*", f"the shape of {preset}")
        self.record("model.name", Kind.RENAMED, "model.*", "with model.flavor")
        if backend and (backend in ("flex", "varlen") or backend.endswith("attn")):
            self.convert_key("model.flavor", "data.document_mask", True, "this flavor masks documents")
        if self.get("model.attn_mask_type") == "block_causal":
            self.convert_key("model.attn_mask_type", "data.document_mask", True)
        else:
            self.record("model.attn_mask_type", Kind.MEANINGLESS, why="always so here")
        self.record("model.use_flex_attn", Kind.MEANINGLESS, why="equal attention in another kernel")

    def _degree(self, name: str, default: int) -> int:
        keys = (f"parallelism.{name}", f"training.{name}", f"experimental.{name}")
        value = next((self.get(key) for key in keys if self.get(key) is not None), default)
        return value if is_count(value) else default

    def layout(self) -> None:
        """Convert data parallelism and the pipeline's schedule."""
        self.shards = self._degree("data_parallel_shard_degree", self._degree("data_parallel_degree", -1))
        self.replicas = self._degree("data_parallel_replicate_degree", 1)
        self.pp, cp = self._degree("pipeline_parallel_degree", 1), self._degree("context_parallel_degree", 1)
        reshard = self.get("parallelism.fsdp_reshard_after_forward", "default")
        zero = 2 if reshard == "never" or (reshard == "default" and self.pp > 1) else 3
        if self.shards == 1 or self.get("training.data_parallel_type") == "ddp":
            zero = 0
        section = "parallelism" if "parallelism.data_parallel_shard_degree" in self.values else "training"
        keys = f"{section}.data_parallel_shard_degree parallelism.fsdp_reshard_after_forward"
        self.convert_key(keys, "trainer.zero", zero)
        if self.replicas > 1 and self.shards > 1:
            key = f"{section}.data_parallel_replicate_degree"
            self.convert_key(key, "trainer.shard_group", self.shards * cp, "ranks that share states")
        if self.shards > 0:
            tp = self._degree("tensor_parallel_degree", 1)
            self.world_size = self.shards * self.replicas * self.pp * cp * tp
        for section in ("parallelism", "experimental"):
            schedule = self.get(key := f"{section}.pipeline_parallel_schedule")
            if schedule is not None and self.pp > 1 and str(schedule).lower() == "interleaved1f1b":
                self.convert_key(key, "trainer.vpp", 2, "two stages per rank, torchtitan's default")
            elif schedule is not None and str(schedule).lower() != "1f1b" and self.pp > 1:
                self.record(key, Kind.SAME_TRAINING, why="1F1B and interleaved 1F1B are supported; 1F1B is written")
            for name in ("layers_per_stage", "split_points"):
                if self.get(name := f"{section}.pipeline_parallel_{name}"):
                    self.record(name, Kind.SAME_TRAINING, why="write trainer.pipeline_layers=[...] and trainer.vpp=N")

    def batch(self) -> None:
        """Convert the batch. torchtitan's default is one local batch on each data-parallel rank."""
        local = self.get("training.local_batch_size", self.get("training.batch_size", 8))
        key, total = "training.global_batch_size", self.get("training.global_batch_size", -1)
        if is_count(total) and total < 0:
            if self.shards < 0:
                rule = "is derived from the number of devices, as data_parallel_shard_degree is -1"
                self.problems.append(Problem(key, total, rule, f"write {self.add.format(key=key, value='N')}"))
            elif is_count(local):
                total = local * self.shards * self.replicas
                self.settings["trainer.global_batch_size"] = total
                self.record(key, Kind.RENAMED, f"trainer.global_batch_size={total}")
                self.assumed.append(f"trainer.global_batch_size={total}: a local batch on each data-parallel rank")
        if self.pp > 1:
            size = self.get("parallelism.pipeline_parallel_microbatch_size", 1)
            keys = "training.local_batch_size training.batch_size"
            self.convert_key(keys, "trainer.micro_batch_size", size, "the pipeline's micro batch")

    def optimizer(self) -> None:
        """Convert optimizer and schedule."""
        name = str(self.get("optimizer.name", "AdamW")).lower()
        if name in ("adamw", "adam"):
            self.convert_key("optimizer.name", "optim.name", name)
        else:
            self.record("optimizer.name", Kind.UNSUPPORTED, why="AdamW and Adam are supported; adamw is written")
        betas = [self.get("optimizer.beta1", 0.9), self.get("optimizer.beta2", 0.95)]
        self.convert_key("optimizer.beta1 optimizer.beta2", "optim.betas", betas)
        self.convert_key("training.max_norm", "optim.clip", self.get("training.max_norm", 1.0) or None)
        ratio, kind = self.get("lr_scheduler.decay_ratio"), self.get("lr_scheduler.decay_type", "linear")
        steps = self.get("lr_scheduler.total_steps", self.get("training.steps", 10000))
        self.schedule = _SCHEDULES.get(kind, "linear")
        if kind not in _SCHEDULES or (ratio is not None and kind != "linear"):
            why = "decays are linear, or a cosine from the warm-up to the end"
            self.record("lr_scheduler.decay_type", Kind.UNSUPPORTED, why=why)
        warmup = self.get("lr_scheduler.warmup_steps", self.get("training.warmup_steps", 200))
        if is_count(steps) and is_count(warmup) and warmup > steps:  # torchtitan warns and does the same
            self.assumed.append(f"optim.warmup_steps={steps}, all steps: the file has {warmup} warm-up steps")
            warmup, keys = steps, "lr_scheduler.warmup_steps training.warmup_steps"
            self.convert_key(keys, "optim.warmup_steps", steps, "at most the steps of the run")
        if isinstance(ratio, float | int) and is_count(steps):
            self.schedule = "wsd"
            decay = min(round(steps * ratio), steps - warmup if is_count(warmup) else steps)
            self.convert_key("lr_scheduler.decay_ratio", "optim.constant_steps", decay, "steps of the decay")
        self.record("lr_scheduler.decay_type", Kind.RENAMED, f"optim={self.schedule}")
        key = "lr_scheduler.min_lr_factor" if "lr_scheduler.min_lr_factor" in self.values else "lr_scheduler.lr_min"
        factor, rate = self.get(key, 0.0), self.get("optimizer.lr", 8e-4)
        known = all(isinstance(value, float | int) for value in (factor, rate))
        self.convert_key(key, "optim.min_lr", float(f"{factor * rate:.12g}") if known else factor, "a factor of lr")

    def precision(self) -> None:
        """Convert the precision and float8."""
        kind, weights = self.get("training.mixed_precision_param", "bfloat16"), self.get("training.dtype", "float32")
        precision = "bf16_pure" if weights == "bfloat16" else "fp32" if kind == "float32" else "bf16"
        self.convert_key("training.mixed_precision_param training.dtype", "trainer.precision", precision)
        converters = self.get("model.converters", [])
        converters = converters.split(",") if isinstance(converters, str) else list(converters)
        old = [f"{section}.enable_float8_linear" for section in ("float8", "training")]
        is_on = any("float8" in str(name) for name in converters) or any(map(self.get, old))
        recipe = self.get("quantize.linear.float8.recipe_name", self.get("float8.recipe_name")) or "tensorwise"
        if is_on and recipe in ("tensorwise", "rowwise"):
            keys = ("model.converters", *old, "quantize.linear.float8.recipe_name", "float8.recipe_name")
            self.convert_key(" ".join(keys), "trainer.float8", recipe)
            keys = ("parallelism.enable_async_tensor_parallel", "experimental.enable_async_tensor_parallel")
            self.record(" ".join(keys), Kind.SAME_TRAINING, why="trainer.async_tp excludes trainer.float8")
        elif is_on:
            why = f"recipe {recipe}: tensorwise and rowwise are supported"
            self.record("model.converters", Kind.UNSUPPORTED, why=why)
        others = [str(name) for name in converters if name and "float8" not in str(name)]
        if others:
            self.by_key.pop("model.converters", None)
            self.record("model.converters", Kind.UNSUPPORTED, why=f"{', '.join(others)}: only float8 is supported")
        self.record("model.converters", Kind.MEANINGLESS, why="off")

    def recompute(self) -> None:
        """Convert activation checkpointing: an option N means every N-th layer."""
        key, mode = "activation_checkpoint.mode", self.get("activation_checkpoint.mode", "selective")
        option = str(self.get("activation_checkpoint.selective_ac_option", "2"))
        if mode == "selective" and option.isdecimal() and int(option) > 0:
            self.convert_key(key, "trainer.recompute", "full", f"in one of {option} layers")
            self.settings |= {"trainer.recompute": "full", "trainer.recompute_every": int(option)}
        elif mode in ("none", "selective", "full"):
            self.convert_key(key, "trainer.recompute", mode)
        else:
            self.record(key, Kind.SAME_TRAINING, why="write trainer.recompute=none, elementwise, selective or full")

    def output(self) -> None:
        """Convert checkpoints, logs and validation."""
        on = self.get("checkpoint.enable", self.get("checkpoint.enable_checkpoint", False))
        key = "checkpoint.enable" if "checkpoint.enable" in self.values else "checkpoint.enable_checkpoint"
        if not on:
            self.convert_key(key, "checkpoint.save_last", False, "there are no checkpoints")
            self.settings["checkpoint.every_minutes"] = 0
            keys = "checkpoint.interval checkpoint.async_mode checkpoint.keep_latest_k checkpoint.last_save_in_hf"
            self.record(keys, Kind.MEANINGLESS, why="there are no checkpoints")
        else:
            self.record(key, Kind.RENAMED, "checkpoint.save_last=true")
            self.settings["checkpoint.every_steps"] = 500
            keep = self.get("checkpoint.keep_latest_k", 10)
            self.convert_key("checkpoint.keep_latest_k", "checkpoint.keep", keep or None)
            asynchronous = self.get("checkpoint.async_mode", "disabled") != "disabled"
            self.convert_key("checkpoint.async_mode", "checkpoint.asynchronous", asynchronous)
        if self.get("metrics.enable_wandb"):
            self.convert_key("metrics.enable_wandb", "logging.wandb", "online")
        self.settings["trainer.val_every_steps"] = None
        if self.get("validation.enable", self.get("validation.enabled")):
            self.convert_key("validation.freq", "trainer.val_every_steps", self.get("validation.freq", 10))
            if is_count(steps := self.get("validation.steps")) and steps > 0:
                self.convert_key("validation.steps", "trainer.val_steps", steps)
