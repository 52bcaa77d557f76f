"""A changed value for each setting, applied to a run that resumes from a checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron_llama.checkpoint.differences import Difference, check_allowed, find_differences
from megatron_llama.checkpoint.manifest import State
from megatron_llama.config import ConfigError
from megatron_llama.data.record import make_record
from megatron_llama.plan import Plan, resolve
from megatron_llama.topology import AXIS_NAMES
from tests.config.helpers import everything_exists, make
from tests.data.files import numbered, write_indexed

STEP = 3


@dataclass(frozen=True)
class Change:
    """A changed setting."""

    now: Any
    """New value. For prefixes: names in the datasets' folder."""
    base: dict[str, Any] = field(default_factory=dict)
    """Other settings of the first run."""
    also: dict[str, Any] = field(default_factory=dict)
    """Other settings that the new value requires."""
    world: int = 1
    becomes: dict[str, Any] = field(default_factory=dict)
    """Dataset that the launcher substitutes for raw data files."""

    @property
    def world_before(self) -> int:
        """Ranks of the first run."""
        sizes = [self.base.get(f"trainer.{name}", 1) for name in AXIS_NAMES]
        return math.prod(sizes)


SFT = {"data.kind": "sft", "data.prefixes": ["a"]}
VALIDATED = {"trainer.val_every_steps": 10}
LORA = {"finetune.method": "lora", "init_from": "/models/one"}
SCALED = {"model.rope_scaling.factor": 8.0}
YARN = {"model.rope_scaling.rope_type": "yarn", "model.rope_scaling.original_max_position_embeddings": 2048}
LONGROPE = {f"model.rope_scaling.{name}_factor": [1.0] * 30 for name in ("short", "long")}
LONGROPE |= {**YARN, "model.rope_scaling.rope_type": "longrope"}
LENGTHS = {"metric": "seqlen_truncate", "schedule_type": "fixed_discrete", "difficulty": [8, 32], "max_step": [9]}
BLOCKS = {"model.sparse_attention.block": 64}
DROPPING = {"trainer.random_ltd.min_value": 16}
CHANGES: dict[str, Change] = {
    "model.name": Change("other"),
    "model.vocab_size": Change(20001),
    "model.hidden_size": Change(200),
    "model.intermediate_size": Change(500),
    "model.num_hidden_layers": Change(5),
    "model.num_attention_heads": Change(6),
    "model.num_key_value_heads": Change(2),
    "model.head_dim": Change(40),
    "model.max_position_embeddings": Change(8192),
    "model.rms_norm_eps": Change(1e-6),
    "model.rope_theta": Change(500000.0),
    "model.rope_scaling.rope_type": Change("llama3"),  # from no scaling at all
    "model.rope_scaling.factor": Change(4.0, SCALED),
    "model.rope_scaling.low_freq_factor": Change(2.0, SCALED),
    "model.rope_scaling.high_freq_factor": Change(8.0, SCALED),
    "model.rope_scaling.original_max_position_embeddings": Change(4096, SCALED),
    "model.rope_scaling.attention_factor": Change(1.5, YARN),
    "model.rope_scaling.beta_fast": Change(16.0, YARN),
    "model.rope_scaling.beta_slow": Change(2.0, YARN),
    "model.rope_scaling.mscale": Change(0.7, YARN),
    "model.rope_scaling.mscale_all_dim": Change(0.7, YARN),
    "model.rope_scaling.truncate": Change(False, YARN),
    "model.rope_scaling.short_factor": Change([2.0] * 30, LONGROPE),
    "model.rope_scaling.long_factor": Change([2.0] * 30, LONGROPE),
    "model.sliding_window": Change(16),
    "model.model_type": Change("qwen3"),
    "model.attention_bias": Change(True),
    "model.mlp_bias": Change(True),
    "model.sparse_attention.block": Change(32, BLOCKS),
    "model.sparse_attention.num_local_blocks": Change(8, BLOCKS),
    "model.sparse_attention.num_global_blocks": Change(2, BLOCKS),
    "model.tie_word_embeddings": Change(True),
    "model.initializer_range": Change(0.01),
    "data.name": Change("other"),
    "data.kind": Change("sft", {"data.prefixes": ["a"]}),
    "data.pack": Change(True, SFT),
    "data.document_mask": Change(True, {"data.eod_mask_loss": False}),
    "data.eod_mask_loss": Change(True),
    "data.mock": Change(True, also={"data.split": "969,30,1"}),
    "data.prefixes": Change([0.25, "a", 0.75, "b"]),
    "data.schedule": Change([{"samples": 1000, "prefixes": [0.25, "a", 0.75, "b"]}]),
    "data.curriculum": Change([LENGTHS]),
    "data.validation_prefixes": Change(["b"], {**SFT, **VALIDATED}),
    "data.chat_template": Change("chatml", SFT, becomes={"data.prefixes": ["b"]}),
    "data.template": Change("qnli", SFT, becomes={"data.prefixes": ["b"]}),
    "data.split": Change("70,30,0"),
    "data.seq_length": Change(16),
    "data.tokenizer": Change("tokenizer.model"),
    "data.cache_dir": Change("/elsewhere"),
    "data.prepare": Change("make it"),
    "trainer.random_ltd.min_value": Change(32, DROPPING),
    "trainer.random_ltd.max_value": Change(16, DROPPING),
    "trainer.random_ltd.require_steps": Change(7, DROPPING),
    "trainer.random_ltd.seq_per_step": Change(8, DROPPING),
    "trainer.random_ltd.layers": Change([1], DROPPING),
    "trainer.tp": Change(2, world=2),
    "trainer.pp": Change(2, world=2),
    "trainer.cp": Change(2, world=2),
    "trainer.cp_comm": Change("ulysses", {"trainer.cp": 2}, world=2),
    "trainer.vpp": Change(2, {"trainer.pp": 2}, world=2),
    "trainer.pipeline_layers": Change([1, 3], {"trainer.pp": 2}, world=2),
    "trainer.sp": Change(False, {"trainer.tp": 2}, world=2),
    "trainer.zero": Change(3),
    "trainer.dp": Change(2, world=2),
    "trainer.shard_group": Change(1, {"trainer.dp": 2}, world=2),
    "trainer.grad_reduce": Change("int8", {"trainer.dp": 2}, world=2),
    "trainer.reduce_group": Change(2, {"trainer.dp": 4, "trainer.grad_reduce": "int8"}, world=4),
    "trainer.param_gather": Change("int8", {"trainer.dp": 2}, world=2),
    "trainer.secondary_group": Change(2, {"trainer.dp": 4, "trainer.zero": 3}, world=4),
    "trainer.micro_batch_size": Change(2),
    "trainer.global_batch_size": Change(16),
    "trainer.batch_schedule": Change([[1000, 16]]),
    "trainer.steps": Change(200),
    "trainer.epochs": Change(3, {"data.prefixes": ["a"]}, {"trainer.steps": 100}),
    "trainer.seed": Change(1),
    "trainer.precision": Change("bf16"),
    "trainer.recompute": Change("full"),
    "trainer.offload": Change(["optimizer"]),
    "trainer.recompute_every": Change(2, base={"trainer.recompute": "full"}),
    "trainer.mlp_chunks": Change(4),
    "trainer.compile": Change(True),
    "trainer.compile_strict": Change(True),
    "trainer.compile_cache": Change("/elsewhere"),
    "trainer.z_loss": Change(1e-4),
    "trainer.float8": Change("tensorwise"),
    "trainer.async_tp": Change(True, {"trainer.tp": 2, "trainer.compile": True}, world=2),
    "trainer.deterministic": Change(True),
    "trainer.exact": Change(True),
    "trainer.skip_nonfinite_steps": Change(1),
    "trainer.check_copies_every": Change(10),
    "trainer.spike_guard": Change("skip"),
    "trainer.spike_factor": Change(4.0, {"trainer.spike_guard": "skip"}),
    "trainer.spike_window": Change(64, {"trainer.spike_guard": "skip"}),
    "trainer.spike_rewinds": Change(5, {"trainer.spike_guard": "rewind"}),
    "trainer.hang_timeout_seconds": Change(60.0),
    "trainer.profile": Change([2, 3]),
    "trainer.max_restarts": Change(1),
    "trainer.val_every_steps": Change(20, VALIDATED),
    "trainer.val_at_start": Change(True, VALIDATED),
    "trainer.val_steps": Change(2, VALIDATED),
    "optim.name": Change("sgd"),
    "optim.lr": Change(1e-4, {"optim.min_lr": 1e-5}),
    "optim.min_lr": Change(1e-6),
    "optim.warmup_steps": Change(20),
    "optim.warmup_ratio": Change(0.1),  # which is what it was
    "optim.constant_steps": Change(5),
    "optim.betas": Change([0.9, 0.99]),
    "optim.eps": Change(1e-6),
    "optim.momentum": Change(0.9, {"optim.name": "muon"}),
    "optim.matrix_lr": Change(1e-4, {"optim.name": "muon"}),
    "optim.adjust_lr": Change("original", {"optim.name": "muon", "optim.matrix_lr": 1e-4}),
    "optim.split_heads": Change(True, {"optim.name": "muon"}),
    "optim.qk_clip": Change(100.0),
    "optim.weight_decay": Change(0.01),
    "optim.clip": Change(0.5),
    "optim.state_bits": Change(8, {"model.hidden_size": 256, "model.head_dim": 64, "model.intermediate_size": 512}),
    "optim.freeze_step": Change(7, {"optim.name": "onebit_adam", "trainer.zero": 0}),
    "optim.schedule": Change({"_target_": "megatron_llama.optim.schedules.Constant", "max_steps": 100}),
    "finetune.method": Change("lora", {"init_from": "/models/one"}),
    "finetune.lora_rank": Change(4, LORA),
    "finetune.lora_alpha": Change(8.0, LORA),
    "finetune.use_rslora": Change(True, LORA),
    "finetune.use_dora": Change(True, LORA),
    "finetune.lora_dropout": Change(0.1, LORA),
    "finetune.lora_target_modules": Change(["q_proj"], LORA),
    "finetune.modules_to_save": Change(["norm"], LORA),
    "finetune.frozen_dtype": Change("bf16", LORA),
    "finetune.adapter": Change("adapter", LORA),
    "device.name": Change("cpu"),
    "device.peak_tflops": Change(1.0),
    "device.memory_gib": Change(64.0),
    "logging.every_steps": Change(10),
    "logging.tensorboard": Change(False),
    "logging.csv": Change(True),
    "logging.wandb": Change("offline"),
    "logging.wandb_project": Change("other"),
    "logging.trackio": Change("mine"),
    "logging.mlflow": Change("mine"),
    "logging.parameter_norm": Change(True),
    "logging.sample_prompts": Change(["a"], also={"data.tokenizer": "tokenizer.model"}),
    "logging.sample_tokens": Change(8),
    "checkpoint.every_steps": Change(10),
    "checkpoint.every_minutes": Change(5.0),
    "checkpoint.keep": Change(2),
    "checkpoint.keep_every": Change(100),
    "checkpoint.keep_best": Change(True, {"trainer.val_every_steps": 100}),
    "checkpoint.resume": Change("runs/one/checkpoints/step_00000003"),
    "checkpoint.allow": Change(["optim"]),
    "checkpoint.save_last": Change(False),
    "checkpoint.export_hf": Change(True),
    "checkpoint.asynchronous": Change(False),
    "launch.hosts": Change(["one", "two"], world=2),
    "launch.hostfile": Change("hosts.txt"),
    "launch.ssh": Change("ssh -p 22"),
    "run.dir": Change("elsewhere"),
    "init_from": Change("/models/other"),
    "allow_targets": Change(["a.Class"]),
    "dry_run": Change(True),
}


def write_datasets(folder: Path) -> None:
    """Write the datasets a and b."""
    for name, count, first_id in (("a", 200, 1), ("b", 100, 10000)):
        examples = [document for document in numbered(count, first_id) if 2 <= len(document) <= 32]
        write_indexed(folder / name, examples)
        write_indexed(folder / f"{name}_mask", [[1] * len(document) for document in examples], kind="B")


def plan_in(folder: Path, world: int, settings: dict[str, Any]) -> Plan:
    """Plan a small run on the datasets in ``folder``."""
    defaults = {
        "data.mock": False,
        "data.prefixes": [0.5, "a", 0.5, "b"],
        "data.split": "80,20,0",
        "data.seq_length": 32,
        "model.vocab_size": 20000,
        "model.hidden_size": 240,
        "model.head_dim": 60,
    }
    settings = _placed(folder, {**defaults, **settings})
    with patch("importlib.util.find_spec", lambda name: name):  # every extra is installed
        return resolve(make(**settings), world, exists=everything_exists)


def _placed(folder: Path, value: Any) -> Any:
    """Replace dataset names by paths in ``folder``."""
    if isinstance(value, dict):
        return {key: _placed(folder, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_placed(folder, item) for item in value]
    return str(folder / value) if value in ("a", "b", "moved") else value


def checkpoint_of(plan: Plan, step: int = STEP) -> State:
    """Return the state of a checkpoint of the plan, after a JSON round trip."""
    position = plan.batches.after(step)
    state = State(
        step=step,
        consumed_samples=position.samples,
        optimizer=plan.config.optim.name,
        updates=step,
        world_size=plan.world_size,
        settings=asdict(plan.config),
        consumed_tokens=position.tokens,
        data=make_record(plan),
    )
    return State(**json.loads(json.dumps(asdict(state))))


@cache
def differences_of(name: str, folder: Path, step: int = STEP) -> list[Difference]:
    """Return all differences of a resumed run with the changed setting."""
    change = CHANGES[name]
    before = plan_in(folder, change.world_before, change.base)
    changed = change.becomes or {**change.also, name: change.now}
    after = plan_in(folder, change.world, {**change.base, **changed})
    return find_differences(after, checkpoint_of(before, step), make_record(after))


def outcome(differences: list[Difference]) -> str:
    """Return the effect of the differences on a resumed run."""
    for allow in ([], ["data"], ["batch"], ["optim"]):
        try:
            check_allowed(differences, allow, Path("step_00000003"))
        except ConfigError:
            continue
        return f"allow=[{allow[0]}]" if allow else "logged" if differences else "free"
    return "fixed"
