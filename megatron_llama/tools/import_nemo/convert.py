"""Converts a config of NeMo, neuronx-nemo-megatron or NxDT, and records what becomes of each of its keys."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_llama.config.hf_config import read_hf_config, shape_from_hf, unsupported_architecture
from megatron_llama.config.problems import ConfigError, Problem, format_value
from megatron_llama.config.settings import ModelConfig
from megatron_llama.tools.import_nemo import nemo_keys as keys
from megatron_llama.tools.import_nemo.nemo_keys import PRESETS, SWITCHES, on, precision_of, rows_of_tokenizer
from megatron_llama.tools.import_nemo.read_yaml import (
    MEANINGLESS,
    RENAMED,
    SAME,
    TAKEN,
    UNSUPPORTED,
    Converted,
    Found,
    flat,
    load,
    open_reference,
    unread,
)

SCHEDULES = {"cosineannealing": "cosine", "linearannealingwithwarmup": "linear", "warmuppolicy": "constant"}
# Optimizers that are Adam with decoupled weight decay; they differ in where the optimizer states are.
SHARDED = ("distributed_fused_adam", "mcore_distributed_optim")
ADAMW = ("adamw", "fused_adam", "adamw_fp32optstate", "megatron_fused_adam", *SHARDED)


def convert(path: Path, overrides: Sequence[str] = ()) -> Converted:
    """Converts the file at ``path``, changed by ``overrides`` as on their command line (model.num_layers=32).

    Raises:
        ConfigError: with every reason for which the file can't be converted.
    """
    config = load(path, overrides)
    values = flat(config)
    converted = _Conversion(values, Converted(str(values.get("name") or path.stem))).run()
    if config.model.get("data") is not None:
        # As NeMo's files have the key.
        converted.found = [
            replace(one, key=f"model.{one.key}") if one.key.startswith("data.") else one for one in converted.found
        ]
    return converted


class _Conversion:
    """The conversion of one file; each method reads the keys of one subject."""

    def __init__(self, values: Mapping[str, Any], result: Converted) -> None:
        self.whole, self.result, self.settings = values, result, result.settings
        # What refers to another file, as the launcher's do, is as good as not given.
        self.values = {key: None if open_reference(value) else value for key, value in values.items()}
        self.found: dict[str, Found] = {}
        self.problems: list[Problem] = []

    def run(self) -> Converted:
        """Converts all subjects, then records each key that none of them has read."""
        self.shape()
        self.one_to_one()
        self.sequence()
        self.data()
        self.validation()
        self.optimizer()
        self.schedule()
        self.recompute()
        self.precision()
        self.checkpoints()
        self.devices()
        if self.problems:
            raise ConfigError(self.problems)
        # The default preset is another model: each setting of the model is written, so that nothing of it is left.
        for name, value in asdict(ModelConfig()).items():
            self.settings.setdefault(f"model.{name}", value)
        self.result.found = [self._became(key, value) for key, value in self.whole.items()]
        return self.result

    def _became(self, key: str, value: Any) -> Found:
        """What became of a key; one whose value is in another file is assumed to be missing, if it would count."""
        found = self.found.get(key) or unread(key, value)
        if self.values[key] is None and value is not None and (key in keys.MATTER or found.kind != MEANINGLESS):
            first = open_reference(value)
            name = f"model.{key}" if key.startswith("data.") else key
            rule = f"{name} is left out: it refers to {first}, of another file; write what that names after the file"
            self.result.assumed.append(f"{rule}, as in data_dir=PATH" if "${data_dir}" in first else rule)
            return Found(key, value, MEANINGLESS, why="refers to another file")
        return replace(found, value=value)

    @property
    def _nxdt(self) -> bool:
        return any(key.startswith(keys.LAYOUT) for key in self.values)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, ``default`` where it is null or missing."""
        value = self.values.get(key)
        return default if value is None else value

    def put(self, key: str, ours: str, value: Any, why: str = "") -> None:
        """Converts a key to one setting."""
        self.settings[ours] = value
        same = key.rpartition(".")[2] == ours.rpartition(".")[2]
        self.note(key, TAKEN if same else RENAMED, f"{ours}={format_value(value)}", why)

    def note(self, key: str, kind: str, ours: str = "", why: str = "") -> None:
        """Records what became of a key, if the file has it; what was recorded first counts."""
        if key in self.values:
            self.found.setdefault(key, Found(key, self.values[key], kind, ours, why))

    def require(self, key: str, example: str = "N") -> None:
        """Records the problem that a key is missing."""
        self.problems.append(Problem(key, None, "is not given", f"write {key}={example} after the file"))

    def one_to_one(self) -> None:
        for key, ours in keys.ONE_TO_ONE.items():
            if self.values.get(key) is not None and key not in self.found:
                self.put(key, ours, self.values[key])
        for ours in ("trainer.steps", "trainer.global_batch_size", "trainer.micro_batch_size"):
            if ours not in self.settings:
                self.require(next(key for key, one in keys.ONE_TO_ONE.items() if one == ours))

    def shape(self) -> None:
        """The model's shape; for NxDT's ``model_source: hf`` most of it is in a config.json."""
        self.settings["model.name"] = self.result.name
        if self.get("model.model_config") is not None and self.values.get("model_source") != "megatron":
            self._hugging_face(str(self.values["model.model_config"]))
        sizes = ("model.num_layers", "model.hidden_size", "model.num_attention_heads")
        missing = [key for key in sizes if self.get(key) is None and keys.ONE_TO_ONE[key] not in self.settings]
        if len(missing) == len(sizes) and not self.problems:
            rule = "has no num_layers, hidden_size, num_attention_heads: a checkpoint has them, or it is no GPT's"
            self.problems.append(Problem("model", None, rule, keys.FROM_A_CHECKPOINT))
        elif not self.problems:
            for key in missing:
                self.require(key)
        hidden, width = self.get("model.hidden_size"), self.get("model.ffn_hidden_size")
        if width is not None:
            self.put("model.ffn_hidden_size", "model.intermediate_size", width)
        elif hidden is not None and "model.intermediate_size" not in self.settings:
            self.settings["model.intermediate_size"] = 4 * hidden
            self.note("model.ffn_hidden_size", RENAMED, f"model.intermediate_size={4 * hidden}", "their default")
        if self.get("model.model_config") is None:
            self._parts_left_out()
        if self.settings.get("model.tie_word_embeddings") is None and self.get(keys.TIED) is None:
            self.settings["model.tie_word_embeddings"] = True
            self.result.assumed.append("model.tie_word_embeddings=true, their default; LLaMAs say false")
        if on(self.values, "model.scale_positional_embedding"):
            self.put("model.scale_positional_embedding", "model.rope_scaling", {"rope_type": "llama3"}, "Llama 3.1's")
        # Null in the file, as the script that reads it wants it on its command line.
        self.note("model.kd_teacher_restore_from_path", UNSUPPORTED, why="there is no distillation from a teacher")
        self._vocabulary()

    def _parts_left_out(self) -> None:
        """A GPT's parts are their defaults."""
        for part, default in keys.GPT_PARTS.items():
            if all(self.get(f"model.{key}") is None for key in part.split()):
                name = part.partition(" ")[0]
                self.result.assumed.append(f"model.{name} as a Llama has it: not given, and their default is {default}")

    def _hugging_face(self, path: str) -> None:
        folder = os.path.dirname(path) if path.endswith(".json") else path
        try:
            content = read_hf_config(folder)
        except ValueError as error:
            rule = f"has the model's shape, and can't be read here: {error}"
            self.problems.append(Problem("model.model_config", path, rule, "write model.model_config=PATH after it"))
            return
        self.problems += [
            Problem("model.model_config", path, f"is not supported: {clause}", "name another file")
            for clause in unsupported_architecture(content)
        ]
        for name, value in shape_from_hf(content).items():
            self.settings[f"model.{name}"] = value
        self.note("model.model_config", RENAMED, "model.*", "the shape in that file")
        for key in ("model.num_attention_heads", "model.layernorm_epsilon", "model.init_method_std"):
            self.note(key, MEANINGLESS, why="model_config has it")
        why = "its hf models draw o_proj and down_proj as wide as other matrices; here they are smaller, by "
        self.note("model_source", UNSUPPORTED, why=why + "sqrt(2 * layers), unless weights are loaded")

    def _vocabulary(self) -> None:
        """Their files name a tokenizer, whose vocabulary is the model's."""
        for key in ("model.vocab_size", "model.override_vocab_size"):
            if self.get(key) is not None:
                self.put(key, "model.vocab_size", self.values[key])
                return
        if "model.vocab_size" in self.settings:
            return
        paths = [self.get(f"{at}tokenizer.{key}") for at in ("model.", "data.") for key in ("model", "type")]
        size, known_by = rows_of_tokenizer([str(path) for path in paths if path])
        self.settings["model.vocab_size"] = size
        if known_by:
            self.result.assumed.append(
                f"model.vocab_size={size}, {known_by}: the tokenizer that the file names is not here; "
                "write model.vocab_size=N after the file for another"
            )

    def sequence(self) -> None:
        """encoder_seq_length is the model's, data.seq_length the samples'; NeMo requires them to be equal."""
        model, data = self.get("model.encoder_seq_length"), self.get("data.seq_length")
        length = data if data is not None else model
        if length is None:
            self.require("model.encoder_seq_length")
            return
        for key in ("model.encoder_seq_length", "data.seq_length"):
            if self.get(key) == length:
                self.put(key, "data.seq_length", length)
            else:
                self.note(key, MEANINGLESS, why=f"samples have data.seq_length={length} tokens")
        self.settings.setdefault("model.max_position_embeddings", length)

    def data(self) -> None:
        prefix = self.get("data.data_prefix")
        if isinstance(prefix, dict):
            why = "validation documents are a share of the training dataset (data.split); train is taken"
            self.note("data.data_prefix", UNSUPPORTED, why=why)
            prefix = prefix.get("train")
        prefix = [prefix] if isinstance(prefix, str) else prefix
        # The default dataset's prepare and tokenizer must not be used.
        self.settings.update({"data.prefixes": prefix or [], "data.prepare": None, "data.tokenizer": None})
        if prefix:
            self.settings["data.name"] = self.result.name
            self.note("data.data_prefix", RENAMED, f"data.prefixes={format_value(prefix)}")
        else:
            self.note("data.data_prefix", MEANINGLESS, why="is not given")
            if self.whole.get("data.data_prefix") is None:
                self.result.assumed.append(
                    "no dataset is named: write data.prefixes=[PATH], or data=mock for random tokens"
                )
        for key in ("model.tokenizer.model", "data.tokenizer.model"):
            library = self.get(key.replace(".model", ".library")) if key.startswith("data") else None
            library = library or self.get("model.tokenizer.library")
            if self.get(key) is not None and library == "sentencepiece":
                self.put(key, "data.tokenizer", self.values[key])
        resets = ("data.reset_attention_mask", "data.reset_position_ids")
        if all(on(self.values, key) for key in resets):
            for key in resets:
                self.put(key, "data.document_mask", True)
            self.settings.setdefault("data.eod_mask_loss", False)
        self._fine_tuning_sets()

    def _fine_tuning_sets(self) -> None:
        """NeMo's files have them where they fine-tune; the programs for Trainium always, and a switch."""
        records = "data.train_ds.file_names"
        if not (on(self.values, "data.fine_tuning") if "data.fine_tuning" in self.values else records in self.values):
            return
        self.note(records, UNSUPPORTED, why="records are not converted; data=chat: docs/guides/data/sft_data.md")
        for key in self.values:
            if key.startswith("data.") and "_ds." in key:
                self.note(key, MEANINGLESS, why="of the fine-tuning sets, which are not converted")

    def validation(self) -> None:
        every, batches = self.get("trainer.val_check_interval"), self.get("trainer.limit_val_batches", 1.0)
        steps = self.get("trainer.max_steps", 0)
        steps = steps if isinstance(steps, int) else 0  # what else it may be is refused as trainer.steps
        if isinstance(every, int) and isinstance(batches, int) and 0 < every <= steps and batches > 0:
            self.put("trainer.val_check_interval", "trainer.val_every_steps", every)
            self.put("trainer.limit_val_batches", "trainer.val_steps", batches)
            return
        self.settings["trainer.val_every_steps"] = None
        why = "there is no validation" if not batches or (isinstance(every, int) and every > steps) else ""
        why = why or "shares of an epoch are not supported: set trainer.val_every_steps and val_steps"
        for key in ("trainer.val_check_interval", "trainer.limit_val_batches"):
            self.note(key, MEANINGLESS, why=why)

    def optimizer(self) -> None:
        name = str(self.get("model.optim.name", "adamw")).lower()
        kind = "adamw" if name in ADAMW else name
        if kind in ("adamw", "adam", "sgd"):
            self.put("model.optim.name", "optim.name", kind)
        else:
            self.settings["optim.name"] = "adamw"
            self.note("model.optim.name", UNSUPPORTED, why="adamw, adam and sgd are supported; adamw is taken")
        # Their optimizers' own defaults, where ours differ; eps does not.
        defaults = {"weight_decay": 0.0 if name == "fused_adam" else 0.01, "betas": [0.9, 0.999], "eps": 1e-8}
        for key, value in defaults.items():
            if self.get(f"model.optim.{key}") is None:
                self.settings[f"optim.{key}"] = value
                if key != "eps":
                    self.result.assumed.append(f"optim.{key}={format_value(value)}, their optimizer's own default")
        if self.get("model.optim.lr") is None:
            self.require("model.optim.lr", "3e-4")
        self.put("trainer.gradient_clip_val", "optim.clip", self.get("trainer.gradient_clip_val", 0) or None)
        self.settings["trainer.zero"] = int(self._nxdt or name in SHARDED)  # 1 is NxDT's default
        for key in ("model.wrap_with_zero", f"{keys.LAYOUT}zero1"):
            if self.get(key) is not None:
                self.put(key, "trainer.zero", int(on(self.values, key)))

    def schedule(self) -> None:
        at = "model.optim.sched."
        name = str(self.get(f"{at}name", "")).lower()
        self.result.schedule = SCHEDULES.get(name, "constant" if not name else "cosine")
        if name and name not in SCHEDULES:
            self.note(f"{at}name", UNSUPPORTED, why="cosine, linear, constant and wsd are supported; cosine is taken")
        elif name:
            self.note(f"{at}name", RENAMED, f"optim={self.result.schedule}")
        steps = self.get("trainer.max_steps", 0)
        ratio = self.get(f"{at}warmup_ratio")
        if ratio is not None and self.get(f"{at}warmup_steps") is None:
            known = isinstance(ratio, int | float) and isinstance(steps, int)  # else the value itself is refused
            self.put(f"{at}warmup_ratio", "optim.warmup_steps", int(ratio * steps) if known else ratio)
        ends = self.get(f"{at}max_steps", steps)
        if ends != steps:
            self.put(f"{at}max_steps", "optim.schedule.max_steps", ends)
        else:
            self.note(f"{at}max_steps", MEANINGLESS, why="it is the same as trainer.steps")
        # Theirs are 0 by default, ours are derived.
        for ours in ("optim.warmup_steps", "optim.constant_steps", "optim.min_lr"):
            self.settings.setdefault(ours, 0.0 if ours == "optim.min_lr" else 0)

    def recompute(self) -> None:
        key = "model.activations_checkpoint_granularity"
        granularity = self.get(key)
        if granularity in (None, "selective", "full"):
            self.put(key, "trainer.recompute", granularity or "none")
        else:
            self.problems.append(Problem(key, granularity, "must be selective, full or null", f"write {key}=full"))

    def precision(self) -> None:
        chosen = precision_of(self.values)
        self.settings["trainer.precision"] = chosen.name
        written = f"trainer.precision={chosen.name}"
        self.note(chosen.key, RENAMED if chosen.supported else UNSUPPORTED, written, chosen.why)
        for key in ("trainer.precision", *SWITCHES):
            self.note(key, MEANINGLESS, why=f"converted with {chosen.key}")
        if chosen.assumed:
            self.result.assumed.append(chosen.assumed)
        assert chosen.name in (*PRESETS, "bf16", "bf16_sr")

    def checkpoints(self) -> None:
        key = "exp_manager.checkpoint_callback_params.save_top_k"
        kept = self.get(key)
        if kept is not None:
            # -1 keeps all; 0 keeps only the last one, by save_last.
            kept = None if isinstance(kept, int) and kept <= 0 else kept
            self.put(key, "checkpoint.keep", kept, "the newest ones; monitor is ignored")
        self._cadence()
        key = "exp_manager.create_checkpoint_callback"
        if self.get(key) is False:
            self.put(key, "checkpoint.save_last", False)
            self.settings.pop("checkpoint.every_steps", None)
        key = "exp_manager.resume_if_exists"
        if self.get(key) is not None:
            self.put(key, "checkpoint.resume", "auto" if self.values[key] else "never")

    def _cadence(self) -> None:
        """NeMo saves at each validation, unless steps or seconds are given; the programs for Trainium only by those."""
        at = "exp_manager.checkpoint_callback_params."
        if self.get(f"{at}every_n_train_steps"):
            return
        self.settings.pop("checkpoint.every_steps", None)
        if self.get(f"{at}train_time_interval"):
            why = "saving by the clock is not supported: write checkpoint.every_steps=N"
            self.note(f"{at}train_time_interval", SAME, why=why)
            self.result.assumed.append("checkpoint.every_steps is left out, since theirs is in seconds; write one")
        elif self.values.get("trainer.accelerator") != "tpu" and not self._nxdt:
            every = self.settings.get("trainer.val_every_steps")
            if every:
                self.settings["checkpoint.every_steps"] = every
                self.result.assumed.append(f"checkpoint.every_steps={every}: NeMo saves at each validation")

    def devices(self) -> None:
        devices, nodes = self.get("trainer.devices"), self.get("trainer.num_nodes", 1)
        if isinstance(devices, int) and isinstance(nodes, int) and devices > 0:
            self.result.world_size = devices * nodes
        for section in ("model.", keys.LAYOUT):
            if self.get(key := f"{section}context_parallel_size", 1) != 1:
                why = "there is no context parallelism: a rank has whole sequences, which takes more memory"
                self.note(key, SAME, why=why)
