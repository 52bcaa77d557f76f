"""A changed value for each setting, applied to a run that resumes from a checkpoint."""

from __future__ import annotations

import ast
import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron_llama.checkpoint.changed_settings import Difference, check_allowed, find_differences
from megatron_llama.checkpoint.manifest import State
from megatron_llama.config import ConfigError
from megatron_llama.data.resume_record import make_record
from megatron_llama.plan import Plan, resolve
from megatron_llama.topology import AXIS_NAMES
from tests.config.helpers import everything_exists, make
from tests.data.files import numbered, write_indexed

STEP = 3


@dataclass(frozen=True)
class Change:
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


def of(section: str, text: str, base: dict[str, Any] | None = None, world: int = 1) -> dict[str, Change]:
    """Return a change of each setting in ``text``: NAME=VALUE, separated by spaces."""
    changes = {}
    for name, _, value in (word.partition("=") for word in text.split()):
        with suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
        changes[f"{section}.{name}"] = Change(value, base or {}, world=world)
    return changes


SFT = {"data.kind": "sft", "data.prefixes": ["a"]}
VALIDATED = {"trainer.val_every_steps": 10}
TUNED = {**SFT, "finetune.method": "full", "init_from": "/models/one"}
DPO = {**TUNED, "finetune.objective": "dpo", "optim.lr": 1e-6}
LORA = {"finetune.method": "lora", "init_from": "/models/one"}
SCALED = {"model.rope_scaling.factor": 8.0}
YARN = {"model.rope_scaling.rope_type": "yarn", "model.rope_scaling.original_max_position_embeddings": 2048}
LONGROPE = {f"model.rope_scaling.{name}_factor": [1.0] * 30 for name in ("short", "long")}
LONGROPE |= {**YARN, "model.rope_scaling.rope_type": "longrope"}
LENGTHS = {"metric": "seqlen_truncate", "schedule_type": "fixed_discrete", "difficulty": [8, 32], "max_step": [9]}
BLOCKS = {"model.sparse_attention.block": 64}
DROPPING = {"trainer.random_ltd.min_value": 16}
CHANGES: dict[str, Change] = {
    **of(
        "model",
        "name=other vocab_size=20001 hidden_size=200 intermediate_size=500 num_hidden_layers=5 "
        "num_attention_heads=6 num_key_value_heads=2 head_dim=40 max_position_embeddings=8192 "
        "rms_norm_eps=1e-06 rope_theta=500000.0",
    ),
    "model.rope_scaling.rope_type": Change("llama3"),  # from no scaling at all
    **of(
        "model.rope_scaling",
        "factor=4.0 low_freq_factor=2.0 high_freq_factor=8.0 original_max_position_embeddings=4096",
        SCALED,
    ),
    **of(
        "model.rope_scaling",
        "attention_factor=1.5 beta_fast=16.0 beta_slow=2.0 mscale=0.7 mscale_all_dim=0.7 truncate=False",
        YARN,
    ),
    "model.rope_scaling.short_factor": Change([2.0] * 30, LONGROPE),
    "model.rope_scaling.long_factor": Change([2.0] * 30, LONGROPE),
    **of("model", "sliding_window=16 model_type=qwen3 attention_bias=True mlp_bias=True"),
    **of("model.sparse_attention", "block=32 num_local_blocks=8 num_global_blocks=2", BLOCKS),
    **of("model", "tie_word_embeddings=True initializer_range=0.01"),
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
    "data.chat_template_kwargs": Change({"short": True}, SFT, becomes={"data.prefixes": ["b"]}),
    "data.any_template": Change(True),
    "data.format": Change("text", SFT, becomes={"data.prefixes": ["b"]}),
    "data.response_marker": Change("a", SFT, becomes={"data.prefixes": ["b"]}),
    "data.template": Change("qnli", SFT, becomes={"data.prefixes": ["b"]}),
    "data.split": Change("70,30,0"),
    **of("data", "seq_length=16 tokenizer=tokenizer.model cache_dir=/elsewhere cache_gib=50"),
    "data.prepare": Change("make it"),
    "data.add_tokens": Change(["<x>"], also={"data.tokenizer": "tokenizer.model"}),
    "data.add_special_tokens": Change(["<x>"], also={"data.tokenizer": "tokenizer.model"}),
    **of("trainer.random_ltd", "min_value=32 max_value=16 require_steps=7 seq_per_step=8 layers=[1]", DROPPING),
    **of("trainer", "tp=2 pp=2 cp=2", world=2),
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
    **of("trainer", "micro_batch_size=2 global_batch_size=16 batch_schedule=[[1000,16]] steps=200"),
    "trainer.epochs": Change(3, {"data.prefixes": ["a"]}, {"trainer.steps": 100}),
    **of("trainer", "seed=1 precision=bf16 recompute=full"),
    "trainer.offload": Change(["optimizer"]),
    "trainer.recompute_every": Change(2, base={"trainer.recompute": "full"}),
    **of(
        "trainer",
        "mlp_chunks=4 compile=True compile_strict=True compile_cache=/elsewhere z_loss=0.0001 float8=tensorwise",
    ),
    "trainer.async_tp": Change(True, {"trainer.tp": 2, "trainer.compile": True}, world=2),
    **of("trainer", "deterministic=True exact=True skip_nonfinite_steps=1 check_copies_every=10 spike_guard=skip"),
    "trainer.spike_factor": Change(4.0, {"trainer.spike_guard": "skip"}),
    "trainer.spike_window": Change(64, {"trainer.spike_guard": "skip"}),
    "trainer.spike_rewinds": Change(5, {"trainer.spike_guard": "rewind"}),
    **of("trainer", "hang_timeout_seconds=60.0 profile=[2,3] max_restarts=1"),
    **of("trainer", "val_every_steps=20 val_at_start=True val_steps=2", VALIDATED),
    "optim.name": Change("sgd"),
    "optim.lr": Change(1e-4, {"optim.min_lr": 1e-5}),
    **of("optim", "min_lr=1e-06 warmup_steps=20"),
    "optim.warmup_ratio": Change(0.1),  # which is what it was
    **of("optim", "constant_steps=5 betas=[0.9,0.99] eps=1e-06"),
    "optim.momentum": Change(0.9, {"optim.name": "muon"}),
    "optim.matrix_lr": Change(1e-4, {"optim.name": "muon"}),
    "optim.adjust_lr": Change("original", {"optim.name": "muon", "optim.matrix_lr": 1e-4}),
    "optim.split_heads": Change(True, {"optim.name": "muon"}),
    **of("optim", "qk_clip=100.0 weight_decay=0.01 clip=0.5"),
    "optim.state_bits": Change(8, {"model.hidden_size": 256, "model.head_dim": 64, "model.intermediate_size": 512}),
    "optim.freeze_step": Change(7, {"optim.name": "onebit_adam", "trainer.zero": 0}),
    "optim.schedule": Change({"_target_": "megatron_llama.optim.schedules.Constant", "max_steps": 100}),
    "finetune.method": Change("lora", {"init_from": "/models/one"}),
    **of("finetune", "lora_rank=4 lora_alpha=8.0 use_rslora=True use_dora=True lora_dropout=0.1", LORA),
    "finetune.lora_target_modules": Change(["q_proj"], LORA),
    "finetune.exclude_modules": Change(["q_proj"], LORA),
    "finetune.layers_to_transform": Change([1], LORA),
    "finetune.rank_pattern": Change({"layers.0.self_attn.q_proj": 4}, LORA),
    "finetune.alpha_pattern": Change({"q_proj": 8.0}, LORA),
    "finetune.bias": Change("all", LORA),
    "finetune.modules_to_save": Change(["norm"], LORA),
    "finetune.trainable_token_indices": Change([7], LORA),
    "finetune.objective": Change("dpo", {**TUNED, "optim.lr": 1e-6}),
    "finetune.beta": Change(0.5, DPO),
    "finetune.loss_type": Change("ipo", DPO),
    "finetune.label_smoothing": Change(0.1, DPO),
    **of("finetune", "desirable_weight=2.0 undesirable_weight=2.0", {**DPO, "finetune.objective": "kto"}),
    "finetune.neftune_noise_alpha": Change(5.0, TUNED),
    **of("finetune", "frozen_dtype=bf16 adapter=adapter", LORA),
    **of("device", "name=cpu peak_tflops=1.0 memory_gib=64.0"),
    **of(
        "logging",
        "every_steps=10 tensorboard=False csv=True prometheus=x.prom wandb=offline wandb_project=other "
        "trackio=mine mlflow=mine parameter_norm=True",
    ),
    "logging.sample_prompts": Change(["a"], also={"data.tokenizer": "tokenizer.model"}),
    "logging.sample_tokens": Change(8),
    "checkpoint.dir": Change("s3://bucket/run"),
    **of("checkpoint", "every_steps=10 every_minutes=5.0 keep=2 keep_every=100"),
    "checkpoint.keep_best": Change(True, {"trainer.val_every_steps": 100}),
    "checkpoint.resume": Change("runs/one/checkpoints/step_00000003"),
    "checkpoint.allow": Change(["optim"]),
    **of("checkpoint", "save_last=False export_hf=True asynchronous=False"),
    "checkpoint.memory_every_steps": Change(10),
    **of("checkpoint", "save_timeout_seconds=0.0 max_failed_saves=1 fallback_dir=other"),
    "launch.hosts": Change(["one", "two"], world=2),
    "launch.hostfile": Change("hosts.txt"),
    "launch.ssh": Change("ssh -p 22"),
    "hook.on_event": Change("notify"),
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
    with patch("megatron_llama.plan.rules.data.find_spec", lambda name: name):  # every extra is installed
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
