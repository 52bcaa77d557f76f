"""Convert a config of NeMo, neuronx-nemo-megatron or NxDT and record the conversion of each key.

Tables of the keys: nemo.yaml. Keys that depend on each other are converted here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from megatron_llama.config.hf_config import read_hf_config, shape_from_hf, unsupported_architecture
from megatron_llama.config.problems import ConfigError, Problem, format_value
from megatron_llama.config.text_checks import check_interpolations, names_secret
from megatron_llama.system.files import check_yaml
from megatron_llama.tools.import_config import conversion
from megatron_llama.tools.import_config.conversion import Conversion, Kind, is_count

FP32_STATES = "adamw_fp32optstate"
SCHEDULES = {"cosineannealing": "cosine", "linearannealingwithwarmup": "linear", "warmuppolicy": "constant"}
# Optimizers equal to AdamW; they differ in the location of the optimizer states.
SHARDED = ("distributed_fused_adam", "mcore_distributed_optim")
ADAMW = ("adamw", "fused_adam", FP32_STATES, "megatron_fused_adam", *SHARDED)
LAYOUT = "distributed_strategy."
TIED = "model.share_embeddings_and_output_weights"

FROM_A_CHECKPOINT = (
    "export a Llama checkpoint to the Hugging Face format, then run python train.py model=from_hf init_from=FOLDER "
    "finetune=full, or lora (docs/guides/data/finetuning.md); or write model.num_layers=N etc. after the file"
)
GPT_DEFAULTS: Mapping[str, str] = {
    "activation": "gelu",
    "normalization": "layernorm",
    "position_embedding_type": "learned_absolute",
    "bias has_bias": "true",
    "hidden_dropout": "0.1",
    "attention_dropout": "0.1, or 0 on Trainium",
}
"""Defaults of NeMo and derived programs that differ from Llama, by the alternative names of a key."""
# Names of neuronx-nemo-megatron's train_setup.sh, which trainer.precision accepts on all devices.
PRESETS = ("bf16SR", "fp32_ZeroOptMaster", "fp32_ZeroOptMasterGradAcc", "megatron_amp_O2", "fp32_OptStates", "fp32")
SWITCHES = (
    "model.megatron_amp_O2",
    "model.wrap_with_zero",
    "model.zero_use_master_weight",
    "model.zero_use_fp32_grad_accum",
)
HALF = "XLA_USE_BF16"
"""Variable that distinguishes bf16SR from fp32 in train_setup.sh; set if that script runs this one."""


def convert(path: Path, overrides: Sequence[str] = ()) -> Conversion:
    """Convert the file at ``path`` with ``overrides`` of the original command line (model.num_layers=32).

    Raises ConfigError with all reasons why the file cannot be converted.
    """
    config = load(path, overrides)
    values = flat(config)
    converted = NemoConversion(values, str(values.get("name") or path.stem)).run()
    if config.model.get("data") is not None:
        # NeMo files have the section model.data.
        converted.conversions = [
            replace(item, key=f"model.{item.key}") if item.key.startswith("data.") else item
            for item in converted.conversions
        ]
    return converted


class NemoConversion(Conversion):
    """Conversion of a YAML of NeMo, neuronx-nemo-megatron or NxDT; each method converts the keys of one subject."""

    tables = conversion.load_tables("nemo")

    def subjects(self) -> None:
        """Convert all subjects."""
        self.shape()
        self.one_to_one()
        self.sequence()
        self.data()
        self.length()
        self.validation()
        self.optimizer()
        self.lr_schedule()
        self.recompute()
        self.precision()
        self.checkpoints()
        self.loggers()
        self.devices()

    @property
    def _is_nxdt(self) -> bool:
        return any(key.startswith(LAYOUT) for key in self.values)

    def length(self) -> None:
        """Reject lengths that are not a number of steps, and report keys that change the length or the order."""
        key = "trainer.max_steps"
        steps = self.get(key)
        if is_count(steps) and steps < 0:
            rule = "is unlimited in Lightning, which ends at max_epochs or max_time"
            self.problems.append(Problem(key, steps, rule, f"write {key}=N after the file"))
        key = "trainer.limit_train_batches"
        if self.get(key) is not None and (is_count(self.values[key]) or self.values[key] != 1.0):
            why = "an epoch is the whole dataset; trainer.steps has the length of the run"
            self.record(key, Kind.UNSUPPORTED, why=why)
        key = "trainer.log_every_n_steps"
        if self.get(key) == 0:
            self.settings.pop("logging.every_steps", None)
            why = "metrics.jsonl gets every step; logging.every_steps sets the console"
            self.record(key, Kind.MEANINGLESS, why=why)

    def shape(self) -> None:
        """Convert the shape of the model; with NxDT's ``model_source: hf`` most of it is in a config.json."""
        if self.get("model.model_config") is not None and self.values.get("model_source") != "megatron":
            self._hugging_face(str(self.values["model.model_config"]))
        sizes = ("model.num_layers", "model.hidden_size", "model.num_attention_heads")
        missing = [key for key in sizes if self.get(key) is None and self.tables.settings[key] not in self.settings]
        if len(missing) == len(sizes) and not self.problems:
            rule = "has no num_layers, hidden_size and num_attention_heads (they may be in a checkpoint)"
            self.problems.append(Problem("model", None, rule, FROM_A_CHECKPOINT))
        elif not self.problems:
            for key in missing:
                self.require(key)
        hidden, width = self.get("model.hidden_size"), self.get("model.ffn_hidden_size")
        if width is not None:
            self.convert_key("model.ffn_hidden_size", "model.intermediate_size", width)
        elif hidden is not None and "model.intermediate_size" not in self.settings:
            self.settings["model.intermediate_size"] = 4 * hidden
            setting = f"model.intermediate_size={4 * hidden}"
            self.record("model.ffn_hidden_size", Kind.RENAMED, setting, "NeMo's default")
        if self.get("model.model_config") is None:
            self._assume_llama_parts()
        if self.settings.get("model.tie_word_embeddings") is None and self.get(TIED) is None:
            self.settings["model.tie_word_embeddings"] = True
            self.assumed.append("model.tie_word_embeddings=true, NeMo's default; Llama configs set false")
        if self.is_on(key := "model.scale_positional_embedding"):
            self.convert_key(key, "model.rope_scaling", {"rope_type": "llama3"}, "Llama 3.1's")
        if (factor := self.get(key := "model.seq_len_interpolation_factor")) not in (None, 1):
            self.convert_key(key, "model.rope_scaling", {"rope_type": "linear", "factor": factor}, "linear scaling")
        # Null in the file, because the script requires it on the command line.
        why = "there is no distillation from a teacher"
        self.record("model.kd_teacher_restore_from_path", Kind.UNSUPPORTED, why=why)
        self._vocabulary()

    def _assume_llama_parts(self) -> None:
        """Record parts without a value, whose defaults differ from Llama."""
        for part, default in GPT_DEFAULTS.items():
            if all(self.get(f"model.{key}") is None for key in part.split()):
                name = part.partition(" ")[0]
                self.assumed.append(f"model.{name} as in Llama: not given, and NeMo's default is {default}")

    def _hugging_face(self, path: str) -> None:
        folder = os.path.dirname(path) if path.endswith(".json") else path
        try:
            content = read_hf_config(folder)
        except ValueError as error:
            rule = f"has the shape of the model but cannot be read: {error}"
            instead = "write model.model_config=PATH after the file"
            self.problems.append(Problem("model.model_config", path, rule, instead))
            return
        self.problems += [
            Problem("model.model_config", path, f"is not supported: {clause}", "write the path of another file")
            for clause in unsupported_architecture(content)
        ]
        for name, value in shape_from_hf(content).items():
            self.settings[f"model.{name}"] = value
        self.record("model.model_config", Kind.RENAMED, "model.*", "shape from that file")
        keys = "model.num_attention_heads model.layernorm_epsilon model.init_method_std"
        self.record(keys, Kind.MEANINGLESS, why="in model_config")
        why = "NxDT's hf models initialize o_proj and down_proj like other matrices; here their std is divided by "
        self.record("model_source", Kind.UNSUPPORTED, why=why + "sqrt(2 * layers), unless weights are loaded")

    def _vocabulary(self) -> None:
        """Convert the vocabulary size; files name a tokenizer instead."""
        for key in ("model.vocab_size", "model.override_vocab_size"):
            if self.get(key) is not None:
                self.convert_key(key, "model.vocab_size", self.values[key])
                return
        if "model.vocab_size" in self.settings:
            return
        paths = [self.get(f"{at}tokenizer.{key}") for at in ("model.", "data.") for key in ("model", "type")]
        size, known_by = conversion.embedding_rows([str(path) for path in paths if path])
        self.settings["model.vocab_size"] = size
        if known_by:
            self.assumed.append(
                f"model.vocab_size={size}, {known_by}: the tokenizer of the file was not found; "
                "write model.vocab_size=N after the file to change it"
            )

    def sequence(self) -> None:
        """Convert the lengths of the model (encoder_seq_length) and of samples (data.seq_length), equal in NeMo."""
        model, data = self.get("model.encoder_seq_length"), self.get("data.seq_length")
        length = data if data is not None else model
        if length is None:
            self.require("model.encoder_seq_length")
            return
        for key in ("model.encoder_seq_length", "data.seq_length"):
            if self.get(key) == length:
                self.convert_key(key, "data.seq_length", length)
            else:
                self.record(key, Kind.MEANINGLESS, why=f"samples have data.seq_length={length} tokens")
        self.settings.setdefault("model.max_position_embeddings", length)

    def data(self) -> None:
        prefix = self.get("data.data_prefix")
        if isinstance(prefix, dict):
            why = "validation documents are a share of the training dataset (data.split); train is converted"
            self.record("data.data_prefix", Kind.UNSUPPORTED, why=why)
            prefix = prefix.get("train")
        prefix = [prefix] if isinstance(prefix, str) else prefix or []
        self.dataset("data.data_prefix", prefix, is_missing=self.source.get("data.data_prefix") is None)
        self.record("data.data_prefix", Kind.MEANINGLESS, why="not given")
        for key in ("model.tokenizer.model", "data.tokenizer.model"):
            library = self.get(key.replace(".model", ".library")) if key.startswith("data") else None
            library = library or self.get("model.tokenizer.library")
            if self.get(key) is not None and library == "sentencepiece":
                self.convert_key(key, "data.tokenizer", self.values[key])
        self.mask_documents("data.reset_attention_mask", "data.reset_position_ids")
        self._fine_tuning_sets()

    def _fine_tuning_sets(self) -> None:
        """Convert fine-tuning datasets: NeMo has them in fine-tuning configs only; on Trainium a switch does."""
        records = "data.train_ds.file_names"
        if not (self.is_on("data.fine_tuning") if "data.fine_tuning" in self.values else records in self.values):
            return
        why = "data files are not converted; data=chat: docs/guides/data/sft_data.md"
        self.record(records, Kind.UNSUPPORTED, why=why)
        for key in self.values:
            if key.startswith("data.") and "_ds." in key:
                self.record(key, Kind.MEANINGLESS, why="fine-tuning datasets are not converted")

    def validation(self) -> None:
        """Convert the validation. In Lightning an integer is a count, and a float is a share: 1 differs from 1.0."""
        interval, limit = "trainer.val_check_interval", "trainer.limit_val_batches"
        every, batches = self.get(interval, 1.0), self.get(limit, 1.0)
        steps = self.get("trainer.max_steps", 0)
        steps = steps if isinstance(steps, int) else 0  # other types are rejected as trainer.steps
        self.settings["trainer.val_every_steps"] = None
        if not batches or (is_count(every) and every > steps):
            why = "there is no validation"
        elif is_count(every) and every > 0:
            self.convert_key(interval, "trainer.val_every_steps", every)
            if is_count(batches):
                self.convert_key(limit, "trainer.val_steps", batches)
                return
            why = f"{batches} is a share of the validation set; set trainer.val_steps=N, in global batches"
            self.assumed.append(f"trainer.val_steps is omitted: {limit}={why}")
        else:
            why = f"{every} is a share of an epoch"
            self.assumed.append(
                f"no validation: {interval}={why}; write {interval}=N after the file, an integer, for every N steps"
            )
        self.record(f"{interval} {limit}", Kind.MEANINGLESS, why=why)

    def optimizer(self) -> None:
        name = str(self.get("model.optim.name", "adamw")).lower()
        kind = "adamw" if name in ADAMW else name
        if kind in ("adamw", "adam", "sgd"):
            self.convert_key("model.optim.name", "optim.name", kind)
        else:
            self.settings["optim.name"] = "adamw"
            self.record("model.optim.name", Kind.UNSUPPORTED, why="adamw, adam and sgd are supported; adamw is written")
        # Defaults of NeMo's optimizers that differ from ours; eps is equal.
        defaults = {"weight_decay": 0.0 if name == "fused_adam" else 0.01, "betas": [0.9, 0.999], "eps": 1e-8}
        for key, value in defaults.items():
            if self.get(f"model.optim.{key}") is None:
                self.settings[f"optim.{key}"] = value
                if key != "eps":
                    self.assumed.append(f"optim.{key}={format_value(value)}, the optimizer's default in NeMo")
        if self.get("model.optim.lr") is None:
            self.require("model.optim.lr", "3e-4")
        self.convert_key("trainer.gradient_clip_val", "optim.clip", self.get("trainer.gradient_clip_val", 0) or None)
        self.settings["trainer.zero"] = int(self._is_nxdt or name in SHARDED)  # 1 is NxDT's default
        for key in ("model.wrap_with_zero", f"{LAYOUT}zero1"):
            if self.get(key) is not None:
                self.convert_key(key, "trainer.zero", int(self.is_on(key)))

    def lr_schedule(self) -> None:
        at = "model.optim.sched."
        name = str(self.get(f"{at}name", "")).lower()
        self.schedule = SCHEDULES.get(name, "constant" if not name else "cosine")
        if name and name not in SCHEDULES:
            why = "cosine, linear, constant and wsd are supported; cosine is written"
            self.record(f"{at}name", Kind.UNSUPPORTED, why=why)
        elif name:
            self.record(f"{at}name", Kind.RENAMED, f"optim={self.schedule}")
        steps = self.get("trainer.max_steps", 0)
        ratio = self.get(f"{at}warmup_ratio")
        if ratio is not None and self.get(f"{at}warmup_steps") is None:
            known = isinstance(ratio, int | float) and isinstance(steps, int)  # other types are rejected as settings
            self.convert_key(f"{at}warmup_ratio", "optim.warmup_steps", int(ratio * steps) if known else ratio)
        ends = self.get(f"{at}max_steps", steps)
        if ends != steps:
            self.convert_key(f"{at}max_steps", "optim.schedule.max_steps", ends)
        else:
            self.record(f"{at}max_steps", Kind.MEANINGLESS, why="equal to trainer.steps")
        # NeMo's defaults are 0; here they are derived.
        for setting in ("optim.warmup_steps", "optim.constant_steps", "optim.min_lr"):
            self.settings.setdefault(setting, 0.0 if setting == "optim.min_lr" else 0)

    def recompute(self) -> None:
        key = "model.activations_checkpoint_granularity"
        granularity = self.get(key)
        if granularity in (None, "selective", "full"):
            self.convert_key(key, "trainer.recompute", granularity or "none")
        else:
            self.problems.append(Problem(key, granularity, "must be selective, full or null", f"write {key}=full"))

    def precision(self) -> None:
        """Convert up to seven keys to ``trainer.precision``."""
        name, key, why, is_supported = self._precision()
        self.settings["trainer.precision"] = name
        kind = Kind.RENAMED if is_supported else Kind.UNSUPPORTED
        self.record(key, kind, f"trainer.precision={name}", why)
        self.record(" ".join(("trainer.precision", *SWITCHES)), Kind.MEANINGLESS, why=f"converted with {key}")

    def _precision(self) -> tuple[str, str, str, bool]:
        """Return (precision, key that decides, reason, whether it is supported)."""
        key, given = "trainer.precision", str(self.values.get("trainer.precision") or 32)  # null is Lightning's default
        if given in PRESETS or given == "bf16_sr":
            return given, key, "", True
        if self.values.get("precision.type") is not None:
            return self._nxdt_precision()
        if self.values.get("trainer.accelerator") == "tpu" or self.values.get("model.wrap_with_zero") is not None:
            return self._neuron_precision()
        kind = given.lower().removesuffix("-mixed")
        if kind in ("32", "32-true", "fp32"):
            return "fp32", key, "", True
        if kind == "bf16":
            name = "megatron_amp_O2" if self.is_on("model.megatron_amp_O2") else "bf16"
            return name, key, "fp32 master weights, bf16 arithmetic", True
        why = "unknown precision; bf16 is written"
        if kind in ("16", "fp16", "16-true"):
            why = "fp16 with loss scaling is not supported; bf16 is written"
        elif kind == "bf16-true":
            why = "bf16 weights without fp32 master weights lose small updates; bf16 has master weights"
        return "bf16", key, why, False

    def _nxdt_precision(self) -> tuple[str, str, str, bool]:
        key, kind = "precision.type", str(self.values["precision.type"])
        zero = self.is_on(f"{LAYOUT}zero1") or f"{LAYOUT}zero1" not in self.values
        if kind in ("bf16SR", "fp32"):
            return kind, key, "", True
        if kind == "autocast":
            return "bf16", key, "bf16 arithmetic, fp32 weights", True
        if kind in ("mixed_precision", "mixed_precisionSR", "mixed_precision_SR"):
            if not zero:
                why = "without zero1 there are no master weights, which is not supported; bf16 has them"
                return "bf16", key, why, False
            sr = "; activations are rounded to nearest" if kind != "mixed_precision" else ""
            return "fp32_ZeroOptMasterGradAcc", key, f"master weights and gradient sums in fp32{sr}", True
        if kind != "manual":
            return "bf16", key, "not a precision of NxDT; bf16 is written", False
        bf16, downcast = self.is_on("precision.xla_use_bf16"), self.is_on("precision.xla_downcast_bf16")
        if bf16 and self.is_on("precision.neuron_rt_stochastic_rounding_en"):
            return "bf16SR", key, "xla_use_bf16 with stochastic rounding", True
        if downcast and zero and self.is_on("precision.master_weights"):
            sums = "GradAcc" if self.is_on("precision.fp32_grad_acc") else ""
            return f"fp32_ZeroOptMaster{sums}", key, "master weights in fp32", True
        if not bf16 and not downcast:
            return "fp32", key, "no bf16", True
        why = "bf16 without master weights and stochastic rounding loses small updates; bf16 is written"
        return "bf16", key, why, False

    def _neuron_precision(self) -> tuple[str, str, str, bool]:
        amp, zero, master, fp32_sums = map(self.is_on, SWITCHES)
        if amp:
            return "megatron_amp_O2", SWITCHES[0], "", True
        if zero and master:
            return f"fp32_ZeroOptMaster{'GradAcc' if fp32_sums else ''}", SWITCHES[2], "", True
        if str(self.values.get("model.optim.name", "")).lower() == FP32_STATES:
            return "fp32_OptStates", "model.optim.name", "", True
        key, bf16 = "trainer.precision", os.environ.get(HALF)
        if bf16 is not None:
            kind = "bf16SR" if bf16.lower() in ("1", "true") else "fp32"
            return kind, key, f"{HALF}={bf16} is set, as train_setup.sh does", True
        self.assumed.append(
            "trainer.precision=fp32: configs of bf16SR and fp32 are equal, and train_setup.sh distinguishes them by "
            f"{HALF}; write trainer.precision=bf16SR for bf16SR"
        )
        return "fp32", key, "", True

    def checkpoints(self) -> None:
        key = "exp_manager.checkpoint_callback_params.save_top_k"
        count = self.get(key)
        if count is not None:
            # -1 keeps all checkpoints. 0 saves none; the last one is saved by save_last.
            kept = None if isinstance(count, int) and count <= 0 else count
            self.convert_key(key, "checkpoint.keep", kept, "newest checkpoints; monitor is ignored")
        self._checkpoint_interval()
        if is_count(count) and count == 0:
            self.settings.pop("checkpoint.every_steps", None)
            self.settings["checkpoint.every_minutes"] = 0
        key = "exp_manager.create_checkpoint_callback"
        if self.get(key) is False:
            self.convert_key(key, "checkpoint.save_last", False)
            self.settings.pop("checkpoint.every_steps", None)
        key = "exp_manager.resume_if_exists"
        if self.get(key) is not None:
            self.convert_key(key, "checkpoint.resume", "auto" if self.values[key] else "never")

    def loggers(self) -> None:
        key = "exp_manager.create_wandb_logger"
        if self.get(key) is not None:
            mode = "offline" if self.get("exp_manager.wandb_logger_kwargs.offline", False) else "online"
            self.convert_key(key, "logging.wandb", mode if self.values[key] else "off")

    def _checkpoint_interval(self) -> None:
        """Convert the checkpoint interval; without one NeMo saves at each validation, the Trainium programs never."""
        at = "exp_manager.checkpoint_callback_params."
        if self.get(f"{at}every_n_train_steps"):
            return
        self.settings.pop("checkpoint.every_steps", None)
        if self.get(key := f"{at}train_time_interval"):
            seconds = self.values[key]
            if isinstance(seconds, int | float) and not isinstance(seconds, bool):
                self.convert_key(key, "checkpoint.every_minutes", round(seconds / 60, 3), "given in seconds")
                return
            self.record(key, Kind.SAME_TRAINING, why="not a number of seconds: write checkpoint.every_minutes=N")
            self.assumed.append(f"checkpoint.every_minutes is omitted: {key} is not a number of seconds; set it")
        elif self.values.get("trainer.accelerator") != "tpu" and not self._is_nxdt:
            every = self.settings.get("trainer.val_every_steps")
            if every:
                self.settings["checkpoint.every_steps"] = every
                self.assumed.append(f"checkpoint.every_steps={every}: NeMo saves at each validation")

    def devices(self) -> None:
        devices, nodes = self.get("trainer.devices"), self.get("trainer.num_nodes", 1)
        if isinstance(devices, str):  # "8", or "0,1" with the numbers of two devices
            words = [word for word in devices.split(",") if word.strip()]
            numbers = all(word.strip().isdecimal() for word in words)
            devices = (int(devices) if "," not in devices else len(words)) if words and numbers else None
        elif isinstance(devices, list):
            devices = len(devices)
        if is_count(devices) and is_count(nodes) and devices > 0:  # -1 and auto: all devices of the machine
            self.world_size = devices * nodes


# The file with command-line overrides, as flat keys.


def _multiply(item: Any, other: Any) -> int:
    """Resolve NeMo's ``multiply`` for integers only, to prevent long repeated strings."""
    return int(item) * int(other)


def load(path: Path, overrides: Sequence[str]) -> DictConfig:
    """Load the file and apply the overrides."""
    problems: list[Problem] = []
    config = OmegaConf.create({})  # overrides are checked even if the file is unusable
    try:
        check_yaml(path)
        content = OmegaConf.load(path)
        if isinstance(content, DictConfig) and isinstance(content.get("model"), DictConfig):
            config = content
        else:
            rule = "has no model section; it is not a config of NeMo, neuronx-nemo-megatron or NxDT"
            problems.append(Problem("file", str(path), rule, "write the YAML of the training script"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        reason = str(error.strerror) if isinstance(error, OSError) else " ".join(str(error).split())
        rule = f"cannot be read as YAML: {reason}"
        problems.append(Problem("file", str(path), rule, "write the path of a YAML file"))
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
            if not override.key_or_group or override.is_sweep_override():
                raise ValueError("an override is one name and one value")
            if override.is_delete():
                _delete(config, override.key_or_group)
            else:
                OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            rule = f"is not an override: {str(error).splitlines()[0]}"
            problems.append(Problem("override", text, rule, "write it as in model.num_layers=32"))
    problems += check_interpolations(config, functions=True)
    if problems:
        raise ConfigError(problems)
    return config


def _delete(config: DictConfig, name: str) -> None:
    above, _, key = name.rpartition(".")
    section = OmegaConf.select(config, above) if above else config
    if not isinstance(section, DictConfig) or key not in section.keys():  # noqa: SIM118 - a key may have no value
        raise ValueError(f"the file has no key {name} to delete")
    del section[key]


def flat(config: DictConfig) -> dict[str, Any]:
    """Return {key: value} of all leaves, with interpolations resolved if possible; ??? becomes None.

    NeMo's model.data.X becomes data.X, as in NxDT.
    """
    OmegaConf.register_new_resolver("multiply", _multiply, replace=True)
    OmegaConf.register_new_resolver("oc.env", _environment, replace=True)
    return {key.removeprefix("model.") if key.startswith("model.data.") else key: v for key, v in _leaves(config, "")}


def _environment(variable: str, *default: str) -> str | None:
    """Resolve ``${oc.env:...}`` as omegaconf does. Secrets stay unresolved, or the recipe would contain them."""
    if names_secret(variable):
        raise ValueError(f"{variable} is the name of a secret")
    return oc.env(variable, *default)


def _leaves(config: DictConfig, prefix: str) -> Iterator[tuple[str, Any]]:
    for name in config:
        key = prefix + str(name)
        if OmegaConf.is_missing(config, name):
            yield key, None
            continue
        try:
            value = config[name]
            plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, ValueError):
            # A resolver of the original program, or a key of another file (${data_dir} of the launcher).
            plain = OmegaConf.to_container(config, resolve=False)[name]  # type: ignore[call-overload, index]
            value = config._get_node(name)
        if isinstance(value, DictConfig) and value and not key.endswith("data_prefix"):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, plain
