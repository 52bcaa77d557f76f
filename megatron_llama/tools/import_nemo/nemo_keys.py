"""What becomes of each key of a NeMo, neuronx-nemo-megatron or NxDT file.

Three tables: keys that have one setting here, keys that may have one value only because another would be another model
or another training, and keys that change nothing here. The others are read together, in convert.py and precision.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODEL, LAYOUT = "model.", "distributed_strategy."

# One key, one setting, the same meaning; the value goes over as it is. A null stands for their default, which is ours.
ONE_TO_ONE: Mapping[str, str] = {
    **{
        f"{section}{theirs}": ours
        for section in (MODEL, LAYOUT)
        for theirs, ours in {
            "tensor_model_parallel_size": "trainer.tp",
            "pipeline_model_parallel_size": "trainer.pp",
            "virtual_pipeline_model_parallel_size": "trainer.vpp",
            "sequence_parallel": "trainer.sp",
        }.items()
    },
    **{
        f"{section}{name}": f"trainer.{name}"
        for section in (MODEL, "data.")
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
    "async_checkpointing": "checkpoint.asynchronous",
}
# In NeMo's files the data is a part of the model, in NxDT's a section of its own.
DATA: Mapping[str, str] = {
    "splits_string": "data.split",
    "index_mapping_dir": "data.cache_dir",
}

# Keys that may have only these values; any other is another model or another training than there is here.
ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "model.activation": (("swiglu", "fast-swiglu"), "the feed-forward here is SwiGLU"),
    "model.normalization": (("rmsnorm", "RMSNorm"), "the norms here are RMSNorm"),
    "model.position_embedding_type": (("rope",), "positions here are rotary"),
    "model.rotary_percentage": ((1,), "the whole head is rotated here"),
    "model.rotary_interleaved": ((False,), "halves of the head are rotated here, as in Hugging Face's Llama"),
    "model.transformer_block_type": (("pre_ln",), "the norm stands before each half of a block here"),
    "model.attention_type": (("multihead",), "there is no other attention here"),
    "model.has_bias": ((False,), "no matrix has a bias here"),
    "model.bias": ((False,), "no matrix has a bias here"),
    "model.hidden_dropout": ((0,), "there is no dropout here"),
    "model.attention_dropout": ((0,), "there is no dropout here"),
    "model.ffn_dropout": ((0,), "there is no dropout here"),
    "model.embedding_dropout": ((0,), "there is no dropout here"),
    "model.use_scaled_init_method": (
        (True,),
        "o_proj and down_proj begin smaller by sqrt(2 * layers) here, always",
    ),
    "model.do_layer_norm_weight_decay": ((False,), "norms are exempt from weight decay here"),
    "model.headscale": ((False,), "heads have no scale of their own here"),
    "model.normalize_attention_scores": ((True,), "attention scores are divided by sqrt(head_dim) here, always"),
    "model.seq_len_interpolation_factor": (
        (1,),
        "positions are not interpolated here; model.rope_scaling is Llama 3's",
    ),
    "model.position_abf_factor": ((1,), "write model.rope_theta multiplied by it"),
    "model.positition_interpolation_factor": ((1,), "positions are not interpolated here"),
    "model.sliding_window": ((), "attention is over the whole sequence here"),
    "model.sliding_window_size": ((), "attention is over the whole sequence here"),
    "model.window_size": ((), "attention is over the whole sequence here"),
    "model.num_moe_experts": ((), "there are no experts here"),
    "model.moe": ((), "there are no experts here"),
    "model.fp32_residual_connection": ((False,), "the residual stream has the compute type here"),
    "model.fp16_lm_cross_entropy": ((False,), "the loss is computed in fp32 here"),
    "model.fp8": ((False,), "there is no fp8 in this converter's reach"),
    "model.add_position_embedding": ((True,), "positions here are rotary"),
    "model.rampup_batch_size": ((), "the batch has one size here"),
    "model.hidden_size_per_head": ((), "write model.kv_channels"),
    "model.flexible_pipeline_parallel_stages": (
        (),
        "write trainer.pipeline_layers=[...], the layers of each stage",
    ),
    "model.context_parallel_size": ((1,), "there is no context parallelism here"),
    "distributed_strategy.context_parallel_size": ((1,), "there is no context parallelism here"),
    "distributed_strategy.expert_model_parallel_size": ((1,), "there are no experts here"),
    "model.expert_model_parallel_size": ((1,), "there are no experts here"),
    "trainer.accumulate_grad_batches": ((1,), "write the whole batch in global_batch_size"),
    "trainer.max_time": ((), "a run ends after its steps here"),
    "restore_from_path": ((), "their checkpoints are not read: export to Hugging Face's format, then init_from=FOLDER"),
    "model.resume_from_checkpoint": ((), "their checkpoints are not read: export to Hugging Face's, then init_from"),
    "exp_manager.resume_from_checkpoint": (
        (),
        "their checkpoints are not read: export to Hugging Face's, then init_from",
    ),
    "exp_manager.ema.enable": ((False,), "there is no moving average of weights here"),
    "model_alignment_strategy": ((), "SFT, DPO, ORPO and LoRA are not converted"),
    "model.peft": ((), "LoRA and other adapters are not converted"),
}
# The same of the data's section.
ONLY_DATA: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "dataloader_type": (("single",), "samples come in the order of Megatron's GPTDataset here"),
    "data_impl": (("mmap",), "datasets are Megatron's .bin and .idx here"),
    "reset_position_ids": ((False,), "positions run on over documents here"),
    "reset_attention_mask": ((False,), "attention goes over documents' borders here"),
    "eod_mask_loss": ((False,), "the end of a document counts in the loss here"),
    "no_seqlen_plus_one_input_tokens": ((False,), "samples have one token more than the sequence here"),
    "shuffle_documents": ((True,), "documents are shuffled here"),
    "fine_tuning": ((False,), "fine-tuning sets are not converted"),
    "chat": ((False,), "chat sets are not converted"),
    "train_dir": ((), "make a dataset of the text with data_prep/preprocess.py, then data.prefixes=[PATH]"),
    "val_dir": ((), "validation documents are a share of the dataset here: data.split"),
}

# Keys that change nothing here, by pattern, with the reason. The first that fits counts.
WITHOUT_MEANING: tuple[tuple[str, str], ...] = (
    ("name", "a label"),
    ("model_source", "one model here"),
    ("exp_manager.exp_dir", "a run's folder is run.dir"),
    ("exp_manager.*", "the log and checkpoints have their own form here"),
    ("trainer.devices", "whoever starts the ranks says how many there are: torchrun or srun"),
    ("trainer.num_nodes", "whoever starts the ranks says how many there are: torchrun or srun"),
    ("trainer.accelerator", "device=auto takes what is there"),
    ("trainer.max_epochs", "a run has steps, not epochs"),
    ("trainer.limit_test_batches", "there is no test run"),
    ("trainer.num_sanity_val_steps", "the checks before a run are others"),
    ("trainer.check_val_every_n_epoch", "a run has steps, not epochs"),
    ("trainer.*", "Lightning's; there is none here"),
    ("model.make_vocab_size_divisible_by", "padding follows trainer.tp, and is hidden"),
    ("model.pre_process", "stages find their own parts"),
    ("model.post_process", "stages find their own parts"),
    ("model.native_amp_*", "loss scaling is fp16's"),
    ("model.hysteresis", "loss scaling is fp16's"),
    ("model.apply_query_key_layer_scaling", "divides and multiplies by the same number"),
    ("model.*fusion*", "the same arithmetic in one kernel"),
    ("model.*flash_attention", "the same attention in one kernel"),
    ("model.fused*", "the same arithmetic in one kernel"),
    ("model.persist_layer_norm", "the same arithmetic in one kernel"),
    ("model.transformer_engine", "the same arithmetic in other kernels, while fp8 is off"),
    ("model.fp8_*", "fp8 is off"),
    ("model.reduce_amax", "fp8 is off"),
    ("model.use_emha", "the same attention in one kernel"),
    ("model.openai_gelu", "the activation is not GELU"),
    ("model.onnx_safe", "nothing is exported to ONNX"),
    ("model.apex_transformer_log_level", "there is no apex"),
    ("model.use_cpu_initialization", "initial weights don't depend on the device"),
    ("model.mcore_gpt", "the layers are megatron-core's"),
    ("model.activations_checkpoint_*", "changes memory and speed, not the result; trainer.recompute decides"),
    ("model.num_micro_batches_with_partial_activation_checkpoints", "changes memory and speed, not the result"),
    ("model.disable_layer_norm_checkpointing", "changes memory and speed, not the result"),
    ("model.grad_*", "changes how gradients travel, not the result"),
    ("model.gradient_as_bucket_view", "changes how gradients travel, not the result"),
    ("model.sync_batch_comm", "changes how activations travel, not the result"),
    ("model.*p2p_comm", "changes how activations travel, not the result"),
    ("model.tp_comm*", "changes how activations travel, not the result"),
    ("model.*ub_tp_comm*", "changes how activations travel, not the result"),
    ("model.qkv_linear", "the same matrices, laid out otherwise"),
    ("model.fuse_qkv", "the same matrices, laid out otherwise"),
    ("model.separate_qkv", "the same matrices, laid out otherwise"),
    ("model.transpose_nki_inputs", "the same matrices, laid out otherwise"),
    ("model.pipeline_cuts", "trainer.pipeline_layers says the layers of each stage"),
    ("model.weight_init_only", "no checkpoint of theirs is loaded"),
    ("model.*_xser", "checkpoints have their own form here"),
    ("model.convert_to_hf", "checkpoint.export_hf=true writes Hugging Face's format"),
    ("model.output_dir", "checkpoint.export_hf=true writes Hugging Face's format"),
    ("model.config_path", "checkpoint.export_hf=true writes Hugging Face's format"),
    ("model.log_gradient_norm", "it is always logged"),
    ("model.nsys_profile.*", "profiling has its own script"),
    ("model.optim.capturable", "the same arithmetic"),
    ("model.optim.sched.name", "read with the schedule"),
    ("distributed_strategy.kv_replicator", "heads are shared among ranks as needed"),
    ("distributed_strategy.pipeline_cuts", "trainer.pipeline_layers says the layers of each stage"),
    ("*.tokenizer.*", "training reads token ids"),
    ("data.skip_warmup", "files are mapped, not read ahead"),
    ("data.num_workers", "data is read in the rank's own process"),
    ("data.validation_drop_last", "validation takes whole batches"),
    ("data.pad_samples_to_global_batch_size", "batches are whole"),
    ("data.dev_choose_samples", "of fine-tuning"),
    ("data.*_ds.*", "of fine-tuning, which is off"),
    ("precision.*", "read with precision.type"),
    ("compiler_*", "the compiler's own settings"),
    ("*async_exec_max_inflight_requests", "the Neuron runtime's own setting"),
    ("aync_exec_max_inflight_requests", "the Neuron runtime's own setting"),
    ("bucket_size_collectives", "changes how gradients travel, not the result"),
    ("neuron_*", "the Neuron runtime's own setting"),
    ("lnc", "the Neuron runtime's own setting"),
    ("enable_*", "the log and checkpoints have their own form here"),
    ("cluster_type", "whoever starts the ranks knows"),
)
