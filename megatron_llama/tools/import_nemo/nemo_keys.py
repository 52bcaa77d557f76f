"""What becomes of each key of a NeMo, neuronx-nemo-megatron or NxDT file.

Three tables: keys with one setting of ours; keys for which only some values are supported, because any other is a
different model or training; and keys that change nothing here. The other keys depend on one another and are converted
in convert.py, precision keys below. Data keys are listed as NxDT has them: ``data.X`` for NeMo's ``model.data.X`` too.
"""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_llama.config.hf_config import read_hf_config
from megatron_llama.text.tokenizer import vocabulary_size

LAYOUT = "distributed_strategy."
TIED = "model.share_embeddings_and_output_weights"

# One key, one setting, the same meaning; the value is taken as it is. A null means the default, which is the same here.
ONE_TO_ONE: Mapping[str, str] = {
    **{
        f"{section}{theirs}": ours
        for section in ("model.", LAYOUT)
        for theirs, ours in {
            "tensor_model_parallel_size": "trainer.tp",
            "pipeline_model_parallel_size": "trainer.pp",
            "virtual_pipeline_model_parallel_size": "trainer.vpp",
            "sequence_parallel": "trainer.sp",
        }.items()
    },
    **{
        f"{section}{name}": f"trainer.{name}"
        for section in ("model.", "data.")
        for name in ("micro_batch_size", "global_batch_size")
    },
    "trainer.max_steps": "trainer.steps",
    "trainer.log_every_n_steps": "logging.every_steps",
    "seed": "trainer.seed",
    "model.seed": "trainer.seed",
    "model.max_position_embeddings": "model.max_position_embeddings",
    "model.num_layers": "model.num_hidden_layers",
    "model.hidden_size": "model.hidden_size",
    "model.num_attention_heads": "model.num_attention_heads",
    "model.num_query_groups": "model.num_key_value_heads",
    "model.num_kv_heads": "model.num_key_value_heads",
    "model.num_key_value_heads": "model.num_key_value_heads",
    "model.kv_channels": "model.head_dim",
    "model.sliding_window": "model.sliding_window",
    "model.sliding_window_size": "model.sliding_window",
    "model.init_method_std": "model.initializer_range",
    "model.layernorm_epsilon": "model.rms_norm_eps",
    "model.share_embeddings_and_output_weights": "model.tie_word_embeddings",
    "model.rotary_base": "model.rope_theta",
    "model.rope_theta": "model.rope_theta",
    "model.position_freq_base": "model.rope_theta",
    "model.optim.lr": "optim.lr",
    "model.optim.betas": "optim.betas",
    "model.optim.eps": "optim.eps",
    "model.optim.weight_decay": "optim.weight_decay",
    "model.optim.sched.min_lr": "optim.min_lr",
    "model.optim.sched.warmup_steps": "optim.warmup_steps",
    "model.optim.sched.constant_steps": "optim.constant_steps",
    "exp_manager.create_tensorboard_logger": "logging.tensorboard",
    "exp_manager.log_parameter_norm": "logging.parameter_norm",
    "model.log_parameter_norm": "logging.parameter_norm",
    "exp_manager.explicit_log_dir": "run.dir",
    "exp_manager.checkpoint_callback_params.every_n_train_steps": "checkpoint.every_steps",
    "exp_manager.async_checkpointing": "checkpoint.asynchronous",
    "exp_manager.checkpoint_callback_params.async_save": "checkpoint.asynchronous",
    "async_checkpointing": "checkpoint.asynchronous",
    "data.splits_string": "data.split",
    "data.index_mapping_dir": "data.cache_dir",
    "data.eod_mask_loss": "data.eod_mask_loss",
}

_CHECKPOINTS = "their checkpoints can't be read: export to Hugging Face's format, then init_from=FOLDER"
FROM_A_CHECKPOINT = (
    "for a Llama export that checkpoint to Hugging Face's format, then python train.py model=from_hf init_from=FOLDER "
    "finetune=full, or lora (docs/guides/data/finetuning.md); or write model.num_layers=N and so on after the file"
)
_MODEL_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("activation", ("swiglu", "fast-swiglu"), "the feed-forward is SwiGLU"),
    ("normalization", ("rmsnorm", "RMSNorm"), "norms are RMSNorm"),
    ("position_embedding_type", ("rope",), "positions are rotary"),
    ("rotary_percentage", (1,), "the whole head is rotated"),
    ("rotary_interleaved", (False,), "halves of the head are rotated, as in Hugging Face's Llama"),
    ("transformer_block_type", ("pre_ln",), "norms come before attention and before the feed-forward"),
    ("attention_type", ("multihead",), "no other attention is supported"),
    ("has_bias bias", (False,), "no matrix has a bias"),
    ("hidden_dropout attention_dropout ffn_dropout embedding_dropout", (0,), "there is no dropout"),
    ("use_scaled_init_method", (True,), "o_proj and down_proj are always initialized smaller, by sqrt(2 * layers)"),
    ("do_layer_norm_weight_decay", (False,), "norms are exempt from weight decay"),
    ("headscale", (False,), "heads have no scale of their own"),
    ("normalize_attention_scores", (True,), "attention scores are always divided by sqrt(head_dim)"),
    ("seq_len_interpolation_factor", (1,), "positions are not interpolated; model.rope_scaling is Llama 3's"),
    ("position_abf_factor", (1,), "write model.rope_theta multiplied by it"),
    ("positition_interpolation_factor", (1,), "positions are not interpolated"),
    ("window_size", (), "write model.sliding_window=N in its place: the tokens that one sees, itself included"),
    ("name", ("", "te_gpt", "megatron_gpt_full_te_layer_autocast", "modelopt"), "it names layers of another model"),
    ("num_moe_experts moe", (), "there are no experts"),
    ("expert_model_parallel_size", (1,), "there are no experts"),
    ("fp32_residual_connection", (False,), "the residual stream has the compute dtype"),
    ("fp16_lm_cross_entropy", (False,), "the loss is computed in fp32"),
    ("fp8", (False,), "this converter does not support fp8"),
    ("add_position_embedding", (True,), "positions are rotary"),
    ("rampup_batch_size", (), "write trainer.batch_schedule=[[samples, size], ...]"),
    ("hidden_size_per_head", (), "write model.kv_channels"),
    ("flexible_pipeline_parallel_stages", (), "write trainer.pipeline_layers=[...], the layers of each stage"),
    ("context_parallel_size", (1,), "there is no context parallelism"),
    ("fsdp_grad_reduce_dtype", (32, "32", "fp32"), "gradients are summed in fp32"),
    ("optim.grad_sync_dtype", ("fp32",), "gradients are summed in fp32"),
    ("resume_from_checkpoint restore_from_path restore_from_ckpt", (), _CHECKPOINTS),
    ("peft.peft_scheme", ("none",), "adapters are not converted: write finetune=lora (docs/guides/data/finetuning.md)"),
)
_OTHER_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (f"{LAYOUT}context_parallel_size", (1,), "there is no context parallelism"),
    (f"{LAYOUT}expert_model_parallel_size", (1,), "there are no experts"),
    ("trainer.accumulate_grad_batches", (1,), "write the whole batch in global_batch_size"),
    ("restore_from_path exp_manager.resume_from_checkpoint trainer.resume_from_checkpoint", (), _CHECKPOINTS),
    ("exp_manager.create_early_stopping_callback", (False,), "no run stops early: it goes on to trainer.steps"),
    ("exp_manager.ema.enable", (False,), "there is no moving average of weights"),
    ("model_alignment_strategy", (), "SFT, DPO, ORPO and LoRA are not converted"),
    ("data.dataloader_type", ("single",), "samples come in the order of Megatron's GPTDataset"),
    ("data.data_impl", ("mmap",), "datasets are Megatron's .bin and .idx; for random tokens write data=mock"),
    ("data.mock_dataset", (False,), "for random tokens write data=mock on train.py's command line"),
    ("data.reset_position_ids", (False,), "positions start again only with reset_attention_mask"),
    ("data.reset_attention_mask", (False,), "attention ends at documents only with reset_position_ids"),
    ("data.no_seqlen_plus_one_input_tokens", (False,), "samples have one token more than the sequence"),
    ("data.shuffle_documents", (True,), "documents are shuffled"),
    ("data.fine_tuning", (False,), "fine-tuning sets are not converted"),
    ("data.chat", (False,), "chat sets are not converted"),
    ("data.train_dir", (), "make a dataset of the text with data_prep/preprocess.py, then data.prefixes=[PATH]"),
    ("data.val_dir", (), "validation documents are a share of the dataset: data.split"),
)
ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **{f"model.{key}": (allowed, why) for keys, allowed, why in _MODEL_ONLY for key in keys.split()},
    **{key: (allowed, why) for keys, allowed, why in _OTHER_ONLY for key in keys.split()},
}
"""{key: (supported values, why)}; any other value is a different model or training, and so is a section of that name.
"""

# Patterns of keys that change nothing here, with the reason. The first that matches counts.
WITHOUT_MEANING: tuple[tuple[str, str], ...] = (
    ("name", "a label"),
    ("model_source", "there is one model"),
    ("exp_manager.exp_dir", "the run's folder is run.dir"),
    ("exp_manager.checkpoint_callback_params.save_last", "of a copy named -last; a run's last step is saved here"),
    ("exp_manager.early_stopping_callback_params.*", "of early stopping"),
    ("exp_manager.max_time_per_run", "run.slurm goes on after a time limit"),
    ("exp_manager.*", "logs and checkpoints have their own format"),
    ("trainer.devices trainer.num_nodes", "torchrun, srun or the launcher decides how many ranks there are"),
    ("trainer.accelerator", "device=auto takes what is there"),
    ("trainer.max_epochs trainer.check_val_every_n_epoch", "the length of a run is in steps"),
    ("trainer.limit_test_batches", "there is no test run"),
    ("trainer.num_sanity_val_steps", "a run has other checks before its start"),
    ("trainer.max_time", "run.slurm goes on after a time limit"),
    ("trainer.*", "of Lightning, which is not used"),
    ("run.* hydra.* defaults env_vars.* data_dir base_results_dir", "of the launcher; other keys refer to it"),
    ("s3_checkpointing.* model.dist_ckpt_* model.save_nemo_on_*", "checkpoints have their own format"),
    ("model.*megatron_timer* model.gc_interval", "changes nothing that is computed"),
    ("model.peft.*", "of the adapter, which is not converted"),
    ("model.answer_only_loss data.chat_prompt_tokens.*", "of fine-tuning"),
    ("model.use_te_rng_tracker", "there is no dropout, which alone needs it"),
    ("model.fsdp model.fsdp_* model.cpu_offloading*", "where weights and activations are kept; trainer.zero decides"),
    (
        "model.layernorm_zero_centered_gamma",
        "the same norm: its weight is kept as the distance from 1, and not decayed",
    ),
    ("model.defer_embedding_wgrad_compute model.wgrad_deferral_limit", "the same gradient, later"),
    (
        "model.optim.overlap_* model.optim.contiguous_* model.optim.bucket_cap_mb",
        "changes how gradients are communicated, not the result",
    ),
    (f"{LAYOUT}token_shuffle_group_size", "of experts, which there are none of"),
    ("model.make_vocab_size_divisible_by", "the vocabulary is padded for trainer.tp, and checkpoints don't show it"),
    ("model.pre_process model.post_process", "derived from the pipeline stage"),
    ("model.native_amp_* model.hysteresis", "of loss scaling, which only fp16 needs"),
    ("model.apply_query_key_layer_scaling", "divides and multiplies by the same number"),
    (
        "model.*fusion* model.*flash_attention model.fused* model.persist_layer_norm",
        "the same arithmetic in one kernel",
    ),
    ("model.transformer_engine", "the same arithmetic in other kernels, while fp8 is off"),
    ("model.fp8_* model.reduce_amax", "fp8 is off"),
    ("model.use_emha", "the same attention in one kernel"),
    ("model.openai_gelu", "the activation is not GELU"),
    ("model.onnx_safe", "nothing is exported to ONNX"),
    ("model.apex_transformer_log_level", "apex is not used"),
    ("model.use_cpu_initialization", "initial weights don't depend on the device"),
    ("model.mcore_gpt", "the layers are megatron-core's"),
    ("model.activations_checkpoint_*", "changes memory and speed, not the result; trainer.recompute decides"),
    ("model.num_micro_batches_with_partial_activation_checkpoints", "changes memory and speed, not the result"),
    ("model.disable_layer_norm_checkpointing", "changes memory and speed, not the result"),
    (
        "model.grad_* model.gradient_as_bucket_view model.nccl_* model.sharp model.validation_param_sync_overlap",
        "changes how gradients and weights are communicated, not the result",
    ),
    ("model.sync_batch_comm model.*p2p_comm", "changes how activations are communicated, not the result"),
    ("model.tp_comm* model.*ub_tp_comm*", "changes how activations are communicated, not the result"),
    ("model.qkv_linear model.fuse_qkv model.separate_qkv", "the same matrices in another layout"),
    ("model.transpose_nki_inputs", "the same matrices in another layout"),
    (f"model.pipeline_cuts {LAYOUT}pipeline_cuts", "trainer.pipeline_layers has the layers of each stage"),
    ("model.weight_init_only", "their checkpoints are not loaded"),
    ("model.*_xser", "checkpoints have their own format"),
    (
        "model.convert_to_hf model.output_dir model.config_path",
        "checkpoint.export_hf=true writes Hugging Face's format",
    ),
    ("model.log_gradient_norm", "it is always logged"),
    ("model.nsys_profile.*", "a run is profiled from outside"),
    ("model.optim.capturable", "the same arithmetic"),
    ("model.optim.sched.name", "converted with the schedule"),
    ("model.optim.sched.monitor model.optim.sched.reduce_on_plateau", "of a schedule that looks at a metric"),
    (f"{LAYOUT}kv_replicator", "key-value heads are replicated as needed"),
    ("*.tokenizer.*", "training reads token ids"),
    (
        "data.mmap_bin_files data.exchange_indices_distributed data.legacy_dataset data.num_dataset_builder_threads",
        "how files are read, not what",
    ),
    ("data.skip_warmup", "files are mapped, not read ahead"),
    ("data.num_workers", "data is read in the rank's own process"),
    ("data.validation_drop_last", "validation takes whole batches"),
    ("data.pad_samples_to_global_batch_size", "batches are whole"),
    ("data.dev_choose_samples", "of fine-tuning"),
    ("data.*_ds.*", "of fine-tuning, which is off"),
    ("precision.*", "converted with precision.type"),
    ("compiler_*", "of the compiler"),
    ("*async_exec_max_inflight_requests aync_exec_max_inflight_requests neuron_* lnc", "of the Neuron runtime"),
    ("bucket_size_collectives", "changes how gradients are communicated, not the result"),
    ("enable_*", "logs and checkpoints have their own format"),
    ("cluster_type", "known to the launcher"),
)
MATTER: frozenset[str] = frozenset({*ONE_TO_ONE, *ONLY, "data.data_prefix", "model.ffn_hidden_size"})
"""Keys that would change the written file."""
GPT_PARTS: Mapping[str, str] = {
    "activation": "gelu",
    "normalization": "layernorm",
    "position_embedding_type": "learned_absolute",
    "bias has_bias": "true",
    "hidden_dropout": "0.1",
    "attention_dropout": "0.1, or 0 on Trainium",
}
"""What a model has whose file does not say, in NeMo and in what descends from it; several names of one key."""


# Which ``trainer.precision`` a NeMo, neuronx-nemo-megatron or NxDT config means; up to seven of its keys decide.


# The names of neuronx-nemo-megatron's train_setup.sh, which trainer.precision takes on every device.
PRESETS = ("bf16SR", "fp32_ZeroOptMaster", "fp32_ZeroOptMasterGradAcc", "megatron_amp_O2", "fp32_OptStates", "fp32")
SWITCHES = (
    "model.megatron_amp_O2",
    "model.wrap_with_zero",
    "model.zero_use_master_weight",
    "model.zero_use_fp32_grad_accum",
)
FP32_STATES = "adamw_fp32optstate"
HALF = "XLA_USE_BF16"
"""The variable by which alone train_setup.sh tells bf16SR from fp32; set where their script runs this one."""


@dataclass(frozen=True)
class Precision:
    """What ``trainer.precision`` becomes."""

    name: str
    key: str
    """The source's key that decided."""
    why: str = ""
    supported: bool = True
    assumed: str = ""
    """What was assumed because the file leaves it open."""


def precision_of(values: Mapping[str, Any]) -> Precision:
    """The precision that the flat keys ``values`` mean."""
    stated = str(values.get("trainer.precision", "32"))
    if stated in PRESETS or stated == "bf16_sr":
        return Precision(stated, "trainer.precision")
    if values.get("precision.type") is not None:
        return _nxdt(values)
    if values.get("trainer.accelerator") == "tpu" or values.get("model.wrap_with_zero") is not None:
        return _neuron(values)
    key, kind = "trainer.precision", stated.lower().removesuffix("-mixed")
    if kind in ("32", "32-true", "fp32"):
        return Precision("fp32", key)
    if kind == "bf16":
        name = "megatron_amp_O2" if on(values, "model.megatron_amp_O2") else "bf16"
        return Precision(name, key, "fp32 master weights, bf16 arithmetic")
    why = "is an unknown precision; bf16 is taken"
    if kind in ("16", "fp16"):
        why = "fp16 with loss scaling is not supported; bf16 needs none"
    elif kind == "bf16-true":
        why = "bf16 weights without fp32 copies lose small updates; bf16 keeps them"
    return Precision("bf16", key, why, supported=False)


def on(values: Mapping[str, Any], key: str) -> bool:
    """Whether a switch is on; NxDT writes some as '0' and '1'."""
    return str(values.get(key, False)).lower() in ("true", "1")


def _nxdt(values: Mapping[str, Any]) -> Precision:
    key, kind = "precision.type", str(values["precision.type"])
    zero = on(values, "distributed_strategy.zero1") or "distributed_strategy.zero1" not in values
    if kind in ("bf16SR", "fp32"):
        return Precision(kind, key)
    if kind == "autocast":
        return Precision("bf16", key, "computes in bf16, keeps fp32")
    if kind in ("mixed_precision", "mixed_precisionSR", "mixed_precision_SR"):
        if not zero:
            why = "without zero1 it keeps no master weights, which is not supported; bf16 keeps them"
            return Precision("bf16", key, why, supported=False)
        sr = "; activations are rounded to nearest" if kind != "mixed_precision" else ""
        return Precision("fp32_ZeroOptMasterGradAcc", key, f"master weights and gradient sums in fp32{sr}")
    if kind == "manual":
        return _manual(values, zero)
    return Precision("bf16", key, "is not a precision of NxDT; bf16 is taken", supported=False)


def _manual(values: Mapping[str, Any], zero: bool) -> Precision:
    key = "precision.type"
    half, down = on(values, "precision.xla_use_bf16"), on(values, "precision.xla_downcast_bf16")
    stochastic = on(values, "precision.neuron_rt_stochastic_rounding_en")
    master = on(values, "precision.master_weights") and zero
    if half and stochastic:
        return Precision("bf16SR", key, "xla_use_bf16 with stochastic rounding")
    if down and master:
        sums = on(values, "precision.fp32_grad_acc")
        return Precision("fp32_ZeroOptMasterGradAcc" if sums else "fp32_ZeroOptMaster", key, "master weights in fp32")
    if not half and not down:
        return Precision("fp32", key, "nothing is in bf16")
    why = "bf16 without master weights and without stochastic rounding loses small updates; bf16 is taken"
    return Precision("bf16", key, why, supported=False)


def _neuron(values: Mapping[str, Any]) -> Precision:
    amp, zero, master, sums = (on(values, switch) for switch in SWITCHES)
    if amp:
        return Precision("megatron_amp_O2", SWITCHES[0])
    if zero and master:
        return Precision("fp32_ZeroOptMasterGradAcc" if sums else "fp32_ZeroOptMaster", SWITCHES[2])
    if str(values.get("model.optim.name", "")).lower() == FP32_STATES:
        return Precision("fp32_OptStates", "model.optim.name")
    half = os.environ.get(HALF)
    if half is not None:
        kind = "bf16SR" if half.lower() in ("1", "true") else "fp32"
        return Precision(kind, "trainer.precision", f"{HALF}={half} is set, as train_setup.sh does")
    assumed = (
        "trainer.precision=fp32: for bf16SR and fp32 their files are the same, and train_setup.sh tells them apart by "
        f"{HALF}; write trainer.precision=bf16SR for the former"
    )
    return Precision("fp32", "trainer.precision", assumed=assumed)


# Rows of the embedding: of the tokenizer that a file names, or by that tokenizer's name.


LLAMA2_VOCAB_SIZE = 32000
# Words in a tokenizer's name or type, and the rows that models with it have.
BY_NAME = (
    ("llama3", 128256),
    ("llama2", LLAMA2_VOCAB_SIZE),
    ("gpt2bpe", 50257),
    ("mistral", LLAMA2_VOCAB_SIZE),
    ("mixtral", LLAMA2_VOCAB_SIZE),
)


def rows_of_tokenizer(paths: Sequence[str]) -> tuple[int, str]:
    """(rows, "") where one of the tokenizers is on this machine, else (rows, what they are assumed by)."""
    for path in paths:
        if (size := _rows(path)) is not None:
            return size, ""
    plain = "".join(paths).lower().replace("-", "").replace("_", "")
    for word, size in BY_NAME:
        if word in plain:
            return size, f"by the tokenizer's name ({word})"
    return LLAMA2_VOCAB_SIZE, "of Llama 1 and 2"


def _rows(path: str) -> int | None:
    """Rows of the embedding in a Hugging Face folder, which can be more than its tokenizer has ids; else the number of
    ids of a tokenizer; None where it is not here."""
    try:
        rows = read_hf_config(path).get("vocab_size")
    except ValueError:
        return vocabulary_size(path)
    return rows if isinstance(rows, int) else None
