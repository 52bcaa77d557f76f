"""Tables of the keys of NeMo, neuronx-nemo-megatron and NxDT configs.

Three tables: keys with one setting here; keys with supported values, where others are a different model or training;
and keys without effect here. Keys that depend on each other are converted in convert.py, precision keys below. Data
keys have NxDT names: ``data.X`` also stands for NeMo's ``model.data.X``.
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

# Keys with one setting of equal meaning and value. Null means the default, which is equal here.
ONE_TO_ONE: Mapping[str, str] = {
    **{
        f"{section}{theirs}": ours
        for section in ("model.", LAYOUT)
        for theirs, ours in {
            "tensor_model_parallel_size": "trainer.tp",
            "pipeline_model_parallel_size": "trainer.pp",
            "virtual_pipeline_model_parallel_size": "trainer.vpp",
            "context_parallel_size": "trainer.cp",
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
    "exp_manager.wandb_logger_kwargs.project": "logging.wandb_project",
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

_CHECKPOINTS = (
    "not part of a config: write init_from=FOLDER for a checkpoint of NeMo 2 or Megatron; export others to the Hugging "
    "Face format first"
)
FROM_A_CHECKPOINT = (
    "export a Llama checkpoint to the Hugging Face format, then run python train.py model=from_hf init_from=FOLDER "
    "finetune=full, or lora (docs/guides/data/finetuning.md); or write model.num_layers=N etc. after the file"
)
_MODEL_VALUES: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("activation", ("swiglu", "fast-swiglu"), "the feed-forward is SwiGLU"),
    ("normalization", ("rmsnorm", "RMSNorm"), "norms are RMSNorm"),
    ("position_embedding_type", ("rope",), "positions are rotary"),
    ("rotary_percentage", (1,), "all dimensions of a head are rotated"),
    ("rotary_interleaved", (False,), "halves of the head are rotated, as in Hugging Face's Llama"),
    ("transformer_block_type", ("pre_ln",), "norms precede attention and feed-forward"),
    ("attention_type", ("multihead",), "other attention is not supported"),
    ("has_bias bias", (False,), "write model.attention_bias=true model.mlp_bias=true instead"),
    ("hidden_dropout attention_dropout ffn_dropout embedding_dropout", (0,), "there is no dropout"),
    (
        "use_scaled_init_method",
        (True,),
        "the initial std of o_proj and down_proj is always divided by sqrt(2 * layers)",
    ),
    ("do_layer_norm_weight_decay", (False,), "norms are exempt from weight decay"),
    ("headscale", (False,), "there is no scale per head"),
    ("normalize_attention_scores", (True,), "attention scores are always divided by sqrt(head_dim)"),
    ("seq_len_interpolation_factor", (1,), "positions are not interpolated"),
    ("position_abf_factor", (1,), "write model.rope_theta multiplied by this factor"),
    ("positition_interpolation_factor", (1,), "write model.rope_scaling={rope_type: linear, factor: N}"),
    ("window_size", (), "write model.sliding_window=N instead, which includes the token itself"),
    ("name", ("", "te_gpt", "megatron_gpt_full_te_layer_autocast", "modelopt"), "layers of another model"),
    ("num_moe_experts moe", (), "there are no experts"),
    ("expert_model_parallel_size", (1,), "there are no experts"),
    ("fp32_residual_connection", (False,), "the residual stream has the compute dtype"),
    ("fp16_lm_cross_entropy", (False,), "the loss is computed in fp32"),
    ("fp8", (False,), "write trainer.float8=tensorwise, whose scales come from the current tensor"),
    ("add_position_embedding", (True,), "positions are rotary"),
    ("rampup_batch_size", (), "write trainer.batch_schedule=[[samples, size], ...]"),
    ("hidden_size_per_head", (), "write model.kv_channels instead"),
    ("flexible_pipeline_parallel_stages", (), "write trainer.pipeline_layers=[...], the layers of each stage"),
    ("fsdp_grad_reduce_dtype", (32, "32", "fp32"), "gradients are summed in fp32"),
    ("optim.grad_sync_dtype", ("fp32",), "gradients are summed in fp32"),
    ("resume_from_checkpoint restore_from_path restore_from_ckpt", (), _CHECKPOINTS),
    ("peft.peft_scheme", ("none",), "adapters are not converted: write finetune=lora (docs/guides/data/finetuning.md)"),
)
_OTHER_VALUES: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (f"{LAYOUT}expert_model_parallel_size", (1,), "there are no experts"),
    ("trainer.accumulate_grad_batches", (1,), "include it in global_batch_size"),
    ("trainer.gradient_clip_algorithm", ("norm",), "gradients are clipped by their norm"),
    ("trainer.overfit_batches", (0,), "the whole dataset is read"),
    ("trainer.fast_dev_run", (False,), "write trainer.steps=N for a short run"),
    ("restore_from_path exp_manager.resume_from_checkpoint trainer.resume_from_checkpoint", (), _CHECKPOINTS),
    ("exp_manager.create_early_stopping_callback", (False,), "there is no early stopping"),
    ("exp_manager.ema.enable", (False,), "there is no moving average of weights"),
    ("model_alignment_strategy", (), "SFT, DPO, ORPO and LoRA are not converted"),
    ("data.dataloader_type", ("single",), "samples have the order of Megatron's GPTDataset"),
    ("data.data_impl", ("mmap",), "datasets are Megatron's .bin and .idx; for random tokens write data=mock"),
    ("data.mock_dataset", (False,), "for random tokens write data=mock on train.py's command line"),
    ("data.reset_position_ids", (False,), "positions restart only with reset_attention_mask"),
    ("data.reset_attention_mask", (False,), "attention ends at documents only with reset_position_ids"),
    ("data.no_seqlen_plus_one_input_tokens", (False,), "samples have one more token than the sequence"),
    ("data.shuffle_documents", (True,), "documents are shuffled"),
    ("data.fine_tuning", (False,), "fine-tuning datasets are not converted"),
    ("data.chat", (False,), "chat datasets are not converted"),
    ("data.train_dir", (), "convert the text with data_prep/preprocess.py, then write data.prefixes=[PATH]"),
    ("data.val_dir", (), "validation documents are a share of the dataset: data.split"),
)
SUPPORTED_VALUES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **{f"model.{key}": (allowed, why) for keys, allowed, why in _MODEL_VALUES for key in keys.split()},
    **{key: (allowed, why) for keys, allowed, why in _OTHER_VALUES for key in keys.split()},
}
"""{key: (supported values, reason)}; other values, and sections of this name, are a different model or training."""

# Patterns of keys without effect here, with the reason. The first match counts.
IGNORED_KEYS: tuple[tuple[str, str], ...] = (
    ("name", "a label"),
    ("model_source", "there is only one implementation"),
    ("exp_manager.exp_dir", "the run folder is run.dir"),
    ("exp_manager.checkpoint_callback_params.save_last", "a copy named -last; here the last step is saved"),
    ("exp_manager.early_stopping_callback_params.*", "early stopping"),
    ("exp_manager.max_time_per_run", "run.slurm resumes after a time limit"),
    ("exp_manager.*", "logs and checkpoints have another format"),
    ("trainer.devices trainer.num_nodes", "torchrun, srun or the launcher sets the number of ranks"),
    ("trainer.accelerator", "device=auto detects the device"),
    ("trainer.max_epochs trainer.check_val_every_n_epoch", "the length of a run is given in steps"),
    ("trainer.limit_test_batches", "there is no test dataset"),
    ("trainer.num_sanity_val_steps", "other checks run before the start"),
    ("trainer.max_time", "run.slurm resumes after a time limit"),
    ("trainer.*", "Lightning is not used"),
    ("run.* hydra.* defaults env_vars.* data_dir base_results_dir", "used by the launcher and by other keys"),
    ("s3_checkpointing.* model.dist_ckpt_* model.save_nemo_on_*", "checkpoints have another format"),
    ("model.*megatron_timer* model.gc_interval", "does not change the result"),
    ("model.peft.*", "adapters are not converted"),
    ("model.answer_only_loss data.chat_prompt_tokens.*", "fine-tuning only"),
    ("model.use_te_rng_tracker", "only dropout needs it"),
    ("model.fsdp model.fsdp_* model.cpu_offloading*", "location of weights and activations; trainer.zero decides"),
    (
        "model.layernorm_zero_centered_gamma",
        "equal norm: the weight is stored minus 1 and not decayed",
    ),
    ("model.defer_embedding_wgrad_compute model.wgrad_deferral_limit", "equal gradients, computed later"),
    (
        "model.optim.overlap_* model.optim.contiguous_* model.optim.bucket_cap_mb",
        "changes how gradients are communicated, not the result",
    ),
    (f"{LAYOUT}token_shuffle_group_size", "there are no experts"),
    ("model.make_vocab_size_divisible_by", "the vocabulary is padded for trainer.tp, but not in checkpoints"),
    ("model.pre_process model.post_process", "derived from the pipeline stage"),
    ("model.native_amp_* model.hysteresis", "only fp16 needs loss scaling"),
    ("model.apply_query_key_layer_scaling", "divides and multiplies by the same factor"),
    (
        "model.*fusion* model.*flash_attention model.fused* model.persist_layer_norm",
        "equal arithmetic in one kernel",
    ),
    ("model.transformer_engine", "equal arithmetic in other kernels, with fp8 off"),
    ("model.fp8_* model.reduce_amax", "fp8 is off"),
    ("model.use_emha", "equal attention in one kernel"),
    ("model.openai_gelu", "the activation is not GELU"),
    ("model.onnx_safe", "no export to ONNX"),
    ("model.apex_transformer_log_level", "apex is not used"),
    ("model.use_cpu_initialization", "initial weights do not depend on the device"),
    ("model.mcore_gpt", "layers are from megatron-core"),
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
    ("model.weight_init_only", "checkpoints are not converted"),
    ("model.*_xser", "checkpoints have another format"),
    (
        "model.convert_to_hf model.output_dir model.config_path",
        "checkpoint.export_hf=true writes the Hugging Face format",
    ),
    ("model.log_gradient_norm", "always logged"),
    ("model.nsys_profile.*", "use nsys on the command line"),
    ("model.optim.capturable", "equal arithmetic"),
    ("model.optim.sched.name", "converted with the schedule"),
    ("model.optim.sched.monitor model.optim.sched.reduce_on_plateau", "only for schedules that read a metric"),
    (f"{LAYOUT}kv_replicator", "key-value heads are replicated as needed"),
    ("*.tokenizer.*", "training reads token ids"),
    (
        "data.mmap_bin_files data.exchange_indices_distributed data.legacy_dataset data.num_dataset_builder_threads",
        "method of reading files",
    ),
    ("data.skip_warmup", "files are memory-mapped"),
    ("data.num_workers", "each rank reads data in its process"),
    ("data.validation_drop_last", "validation uses full batches"),
    ("data.pad_samples_to_global_batch_size", "batches are full"),
    ("data.dev_choose_samples", "fine-tuning only"),
    ("data.*_ds.*", "fine-tuning is off"),
    ("precision.*", "converted with precision.type"),
    ("compiler_*", "compiler option"),
    ("*async_exec_max_inflight_requests aync_exec_max_inflight_requests neuron_* lnc", "Neuron runtime option"),
    ("bucket_size_collectives", "changes how gradients are communicated, not the result"),
    ("enable_*", "logs and checkpoints have another format"),
    ("cluster_type", "used by the launcher"),
)
RELEVANT_KEYS: frozenset[str] = frozenset({*ONE_TO_ONE, *SUPPORTED_VALUES, "data.data_prefix", "model.ffn_hidden_size"})
"""Keys that would change the written file."""
GPT_DEFAULTS: Mapping[str, str] = {
    "activation": "gelu",
    "normalization": "layernorm",
    "position_embedding_type": "learned_absolute",
    "bias has_bias": "true",
    "hidden_dropout": "0.1",
    "attention_dropout": "0.1, or 0 on Trainium",
}
"""Defaults of NeMo and derived programs that differ from Llama, by the alternative names of a key."""


# ``trainer.precision`` of a NeMo, neuronx-nemo-megatron or NxDT config, from up to seven keys.


# Names of neuronx-nemo-megatron's train_setup.sh, which trainer.precision accepts on all devices.
PRESETS = ("bf16SR", "fp32_ZeroOptMaster", "fp32_ZeroOptMasterGradAcc", "megatron_amp_O2", "fp32_OptStates", "fp32")
SWITCHES = (
    "model.megatron_amp_O2",
    "model.wrap_with_zero",
    "model.zero_use_master_weight",
    "model.zero_use_fp32_grad_accum",
)
FP32_STATES = "adamw_fp32optstate"
HALF = "XLA_USE_BF16"
"""Variable that distinguishes bf16SR from fp32 in train_setup.sh; set if that script runs this one."""


@dataclass(frozen=True)
class PrecisionChoice:
    """Converted ``trainer.precision``."""

    name: str
    key: str
    """Key of the source that decided."""
    why: str = ""
    supported: bool = True
    assumed: str = ""
    """Note on an assumption; empty if the file defines the precision."""


def convert_precision(values: Mapping[str, Any]) -> PrecisionChoice:
    """Return the precision of the flat keys ``values``."""
    given = str(values.get("trainer.precision") or 32)  # null is Lightning's default
    if given in PRESETS or given == "bf16_sr":
        return PrecisionChoice(given, "trainer.precision")
    if values.get("precision.type") is not None:
        return _nxdt(values)
    if values.get("trainer.accelerator") == "tpu" or values.get("model.wrap_with_zero") is not None:
        return _neuron(values)
    key, kind = "trainer.precision", given.lower().removesuffix("-mixed")
    if kind in ("32", "32-true", "fp32"):
        return PrecisionChoice("fp32", key)
    if kind == "bf16":
        name = "megatron_amp_O2" if is_on(values, "model.megatron_amp_O2") else "bf16"
        return PrecisionChoice(name, key, "fp32 master weights, bf16 arithmetic")
    why = "unknown precision; bf16 is written"
    if kind in ("16", "fp16", "16-true"):
        why = "fp16 with loss scaling is not supported; bf16 is written"
    elif kind == "bf16-true":
        why = "bf16 weights without fp32 master weights lose small updates; bf16 has master weights"
    return PrecisionChoice("bf16", key, why, supported=False)


def is_on(values: Mapping[str, Any], key: str) -> bool:
    """Return whether a switch is on; NxDT writes some as '0' and '1'."""
    return str(values.get(key, False)).lower() in ("true", "1")


def _nxdt(values: Mapping[str, Any]) -> PrecisionChoice:
    key, kind = "precision.type", str(values["precision.type"])
    zero = is_on(values, "distributed_strategy.zero1") or "distributed_strategy.zero1" not in values
    if kind in ("bf16SR", "fp32"):
        return PrecisionChoice(kind, key)
    if kind == "autocast":
        return PrecisionChoice("bf16", key, "bf16 arithmetic, fp32 weights")
    if kind in ("mixed_precision", "mixed_precisionSR", "mixed_precision_SR"):
        if not zero:
            why = "without zero1 there are no master weights, which is not supported; bf16 has them"
            return PrecisionChoice("bf16", key, why, supported=False)
        sr = "; activations are rounded to nearest" if kind != "mixed_precision" else ""
        return PrecisionChoice("fp32_ZeroOptMasterGradAcc", key, f"master weights and gradient sums in fp32{sr}")
    if kind == "manual":
        return _manual(values, zero)
    return PrecisionChoice("bf16", key, "not a precision of NxDT; bf16 is written", supported=False)


def _manual(values: Mapping[str, Any], zero: bool) -> PrecisionChoice:
    key = "precision.type"
    bf16, downcast = is_on(values, "precision.xla_use_bf16"), is_on(values, "precision.xla_downcast_bf16")
    stochastic = is_on(values, "precision.neuron_rt_stochastic_rounding_en")
    master = is_on(values, "precision.master_weights") and zero
    if bf16 and stochastic:
        return PrecisionChoice("bf16SR", key, "xla_use_bf16 with stochastic rounding")
    if downcast and master:
        fp32_sums = is_on(values, "precision.fp32_grad_acc")
        return PrecisionChoice(
            "fp32_ZeroOptMasterGradAcc" if fp32_sums else "fp32_ZeroOptMaster", key, "master weights in fp32"
        )
    if not bf16 and not downcast:
        return PrecisionChoice("fp32", key, "no bf16")
    why = "bf16 without master weights and stochastic rounding loses small updates; bf16 is written"
    return PrecisionChoice("bf16", key, why, supported=False)


def _neuron(values: Mapping[str, Any]) -> PrecisionChoice:
    amp, zero, master, fp32_sums = (is_on(values, switch) for switch in SWITCHES)
    if amp:
        return PrecisionChoice("megatron_amp_O2", SWITCHES[0])
    if zero and master:
        return PrecisionChoice("fp32_ZeroOptMasterGradAcc" if fp32_sums else "fp32_ZeroOptMaster", SWITCHES[2])
    if str(values.get("model.optim.name", "")).lower() == FP32_STATES:
        return PrecisionChoice("fp32_OptStates", "model.optim.name")
    bf16 = os.environ.get(HALF)
    if bf16 is not None:
        kind = "bf16SR" if bf16.lower() in ("1", "true") else "fp32"
        return PrecisionChoice(kind, "trainer.precision", f"{HALF}={bf16} is set, as train_setup.sh does")
    assumed = (
        "trainer.precision=fp32: configs of bf16SR and fp32 are equal, and train_setup.sh distinguishes them by "
        f"{HALF}; write trainer.precision=bf16SR for bf16SR"
    )
    return PrecisionChoice("fp32", "trainer.precision", assumed=assumed)


# Rows of the embedding, from the tokenizer or from its name.


LLAMA2_VOCAB_SIZE = 32000
# Words in the name or type of a tokenizer, and rows of the embedding in models with it.
ROWS_BY_NAME = (
    ("llama3", 128256),
    ("llama2", LLAMA2_VOCAB_SIZE),
    ("gpt2bpe", 50257),
    ("mistral", LLAMA2_VOCAB_SIZE),
    ("mixtral", LLAMA2_VOCAB_SIZE),
)


def embedding_rows(paths: Sequence[str]) -> tuple[int, str]:
    """Return (rows, "") if one of the tokenizers is on this machine, else (rows, basis of the assumption)."""
    for path in paths:
        if (size := _rows_of_path(path)) is not None:
            return size, ""
    normalized = "".join(paths).lower().replace("-", "").replace("_", "")
    for word, size in ROWS_BY_NAME:
        if word in normalized:
            return size, f"from the name of the tokenizer ({word})"
    return LLAMA2_VOCAB_SIZE, "as in Llama 1 and 2"


def _rows_of_path(path: str) -> int | None:
    """Return the embedding rows of a Hugging Face folder, else the size of a tokenizer; None if not found."""
    try:
        rows = read_hf_config(path).get("vocab_size")
    except ValueError:
        return vocabulary_size(path)
    return rows if isinstance(rows, int) else None
