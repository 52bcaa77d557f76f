"""For each rule: settings that break it, a part of its advice, and similar settings that pass."""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    rule: str
    world: int
    bad: dict[str, Any]
    good: dict[str, Any]
    advice: str
    """What the message must tell the user to write."""


WIDE = {"model.num_attention_heads": 16, "model.num_key_value_heads": 4, "model.hidden_size": 256}
LORA = {"finetune.method": "lora"}
TWO_STAGES = {"trainer.pp": 2}
FILES = {"data.mock": False, "data.prefixes": ["x"]}
RECORDS = {**FILES, "data.kind": "sft", "data.tokenizer": "t"}
RARITY = {"metric": "rarity", "min_difficulty": 1, "max_difficulty": 10, "total_curriculum_step": 5}
LENGTHS = {"metric": "seqlen_truncate", "schedule_type": "fixed_discrete", "difficulty": [64, 256], "max_step": [9]}
RESHAPED = {**LENGTHS, "metric": "seqlen_reshape"}
ODD = {**LENGTHS, "difficulty": [65, 256]}
LTD = "trainer.random_ltd"
CASES = [
    *(
        Case("curriculum_has_schedules", 1, {"data.curriculum": [bad]}, {"data.curriculum": [LENGTHS]}, advice)
        for bad, advice in (
            (7, "{metric: NAME"),
            ({**LENGTHS, "dificulty": [1]}, "write difficulty"),
            ({**LENGTHS, "difficulty": []}, "difficulty: NUMBER"),
            ({**LENGTHS, "difficulty": [256, 64]}, "[64,128,256]"),
            ({**LENGTHS, "max_step": [9, 12]}, "one max_step less"),
            ({**LENGTHS, "max_step": "9"}, "change max_step"),
            ({**LENGTHS, "min_difficulty": 64}, "leave out min_difficulty"),
            ({**LENGTHS, "difficulty_type": "percentile"}, "difficulty_type: value"),
            ({**LENGTHS, "index": "folder"}, "leave out index"),
            ({**LENGTHS, "metric": " "}, "metric: seqlen_truncate"),
            ({**RARITY, "difficulty_step": 0}, "difficulty_step: 1"),
            ({**RARITY, "min_difficulty": 11}, "min_difficulty: 10"),
            ({**RARITY, "total_curriculum_step": None}, "total_curriculum_step: NUMBER"),
        )
    ),
    Case(
        "curriculum_has_schedules",
        1,
        {"data.curriculum": [LENGTHS, LENGTHS]},
        {"data.curriculum": [LENGTHS]},
        "each metric once",
    ),
    Case(
        "curriculum_has_schedules",
        1,
        {"data.curriculum": [LENGTHS, RESHAPED]},
        {"data.curriculum": [RESHAPED]},
        "seqlen_truncate or seqlen_reshape",
    ),
    Case(
        "curriculum_has_few_levels",
        1,
        {**FILES, "data.curriculum": [{**RARITY, "max_difficulty": 40_001}]},
        {**FILES, "data.curriculum": [{**RARITY, "max_difficulty": 40_001, "difficulty_step": 40}]},
        "difficulty_step: 40 or more",
    ),
    Case(
        "curriculum_lengths_fit",
        1,
        {"data.curriculum": [LENGTHS], "data.seq_length": 128},
        {"data.curriculum": [LENGTHS]},
        "data.seq_length=256",
    ),
    Case(
        "curriculum_lengths_fit",
        1,
        {**FILES, "data.kind": "sft", "data.curriculum": [RESHAPED]},
        {**FILES, "data.kind": "sft", "data.curriculum": [LENGTHS]},
        "metric: seqlen_truncate",
    ),
    Case(
        "curriculum_lengths_fit",
        2,
        {"data.curriculum": [ODD], "trainer.tp": 2},
        {"data.curriculum": [ODD], "trainer.tp": 2, "trainer.sp": False},
        "trainer.sp=false",
    ),
    Case(
        "curriculum_goes_with_the_run",
        1,
        {"data.curriculum": [RARITY]},
        {**FILES, "data.curriculum": [RARITY]},
        "data.mock=false",
    ),
    Case(
        "curriculum_goes_with_the_run",
        1,
        {**FILES, "data.curriculum": [RARITY], "trainer.epochs": 2},
        {**FILES, "data.curriculum": [RARITY]},
        "trainer.epochs=null",
    ),
    Case(
        "curriculum_goes_with_the_run",
        1,
        {"data.curriculum": [LENGTHS], "trainer.compile": True, "trainer.compile_strict": True},
        {"data.curriculum": [LENGTHS], "trainer.compile": True},
        "trainer.compile_strict=false",
    ),
    Case("lengths_grow_within_the_sequence", 1, {f"{LTD}.max_value": 272}, {f"{LTD}.max_value": 192}, "max_value=256"),
    Case(
        "lengths_grow_within_the_sequence",
        1,
        {f"{LTD}.min_value": 100},
        {f"{LTD}.min_value": 100, f"{LTD}.seq_per_step": 20},
        "min_value=96 or 112",
    ),
    Case(
        "lengths_grow_within_the_sequence",
        1,
        {f"{LTD}.max_value": 64},
        {f"{LTD}.max_value": 64, f"{LTD}.min_value": 64},
        "min_value=64",
    ),
    Case(
        "lengths_grow_within_the_sequence",
        1,
        {"data.seq_length": 8, f"{LTD}.min_value": 4},
        {"data.seq_length": 8, f"{LTD}.min_value": 4, f"{LTD}.seq_per_step": 4},
        "seq_per_step=1",
    ),
    Case("middle_layers_drop_tokens", 1, {f"{LTD}.layers": [0, 2]}, {f"{LTD}.layers": [2]}, "layers=[2]"),
    Case("middle_layers_drop_tokens", 1, {f"{LTD}.layers": []}, {f"{LTD}.layers": [1]}, "layers=[1,2]"),
    Case(
        "middle_layers_drop_tokens",
        1,
        {f"{LTD}.min_value": 64, "model.num_hidden_layers": 2},
        {f"{LTD}.min_value": 64, "model.num_hidden_layers": 3},
        "random_ltd=null",
    ),
    Case(
        "sequence_parallel_ranks_share_what_is_kept",
        2,
        {"trainer.tp": 2, f"{LTD}.seq_per_step": 1},
        {"trainer.tp": 2, f"{LTD}.seq_per_step": 1, "trainer.sp": False},
        "seq_per_step=2",
    ),
    Case(
        "sequence_parallel_ranks_share_what_is_kept",
        2,
        {"trainer.tp": 2, f"{LTD}.max_value": 151},
        {"trainer.tp": 2, f"{LTD}.max_value": 152},
        "max_value=152",
    ),
    Case(
        "tokens_are_dropped_of_whole_sequences",
        1,
        {f"{LTD}.min_value": 64, "data.curriculum": [LENGTHS]},
        {f"{LTD}.min_value": 64, **FILES, "data.curriculum": [RARITY]},
        "random_ltd=null",
    ),
    Case(
        "hosts_can_be_reached", 4, {"launch.hosts": ["a", "-oProxyCommand=x"]}, {"launch.hosts": ["a", "u@b"]}, "[a,b]"
    ),
    Case("hosts_can_be_reached", 4, {"launch.hosts": ["a", "b:0"]}, {"launch.hosts": ["a:1", "b:3"]}, "name:ranks"),
    Case("hosts_can_be_reached", 4, {"launch.hosts": ["a", "a"]}, {"launch.hosts": ["a", "b"]}, "[a,b]"),
    Case("hosts_can_be_reached", 4, {"launch.hosts": ["a:2", "b"]}, {"launch.hosts": ["a:2", "b:2"]}, "[a,b]"),
    Case(
        "hosts_can_be_reached",
        4,
        {"launch.hosts": ["a"], "launch.hostfile": "f"},
        {"launch.hostfile": "f"},
        "launch.hosts=[]",
    ),
    Case("grid_divides_world", 6, {"trainer.tp": 4}, {"trainer.tp": 2, "trainer.global_batch_size": 6}, "trainer.tp=2"),
    Case("grid_divides_world", 8, {"trainer.pp": 3}, {"trainer.pp": 4}, "trainer.pp=2 or 4"),
    Case("grid_divides_world", 4, {"trainer.tp": 4, "trainer.pp": 2}, {"trainer.tp": 2, "trainer.pp": 2}, "8 devices"),
    Case(
        "dp_is_what_is_left", 8, {"trainer.tp": 2, "trainer.dp": 2}, {"trainer.tp": 2, "trainer.dp": 4}, "trainer.dp=4"
    ),
    Case(
        "profiled_steps_are_run",
        1,
        {"trainer.profile": [9, 11], "trainer.steps": 10},
        {"trainer.profile": [9, 10], "trainer.steps": 10},
        "trainer.profile=[9,10]",
    ),
    Case(
        "best_has_a_loss",
        1,
        {"checkpoint.keep_best": True, "checkpoint.every_steps": 20},
        {"checkpoint.keep_best": True, "checkpoint.every_steps": 20, "trainer.val_every_steps": 10},
        "trainer.val_every_steps=20",
    ),
    Case(
        "best_has_a_loss",
        1,
        {"checkpoint.keep_best": True, "checkpoint.every_steps": 33, "trainer.val_every_steps": 40},
        {"checkpoint.keep_best": True, "trainer.val_every_steps": 50},
        "checkpoint.every_steps=40",
    ),
    Case(
        "heads_divide_by_tp",
        16,
        {**WIDE, "model.num_attention_heads": 12, "model.hidden_size": 240, "trainer.tp": 8},
        {**WIDE, "trainer.tp": 8},
        "trainer.tp=4",
    ),
    Case(
        "kv_heads_share_out",
        12,
        {
            "model.num_attention_heads": 12,
            "model.num_key_value_heads": 4,
            "trainer.tp": 6,
            "model.intermediate_size": 480,
        },
        {
            "model.num_attention_heads": 12,
            "model.num_key_value_heads": 3,
            "trainer.tp": 6,
            "model.intermediate_size": 480,
        },
        "trainer.tp=4 or 12",
    ),
    Case(
        "feed_forward_divides_by_tp",
        4,
        {"trainer.tp": 4, "model.intermediate_size": 510},
        {"trainer.tp": 4, "model.intermediate_size": 512},
        "trainer.tp=2",
    ),
    Case(
        "kv_heads_divide_heads",
        1,
        {"model.num_key_value_heads": 3},
        {"model.num_key_value_heads": 2},
        "model.num_key_value_heads=2 or 4",
    ),
    Case(
        "hidden_divides_by_heads",
        1,
        {"model.hidden_size": 190},
        {"model.hidden_size": 192},
        "model.hidden_size=184 or 192",
    ),
    Case(
        "hidden_divides_by_heads",
        1,
        {"model.hidden_size": 190},
        {"model.hidden_size": 190, "model.head_dim": 48},
        "head_dim",
    ),
    Case("head_dim_is_even", 1, {"model.hidden_size": 60}, {"model.hidden_size": 64}, "model.hidden_size=56 or 64"),
    Case("head_dim_is_even", 1, {"model.head_dim": 33}, {"model.head_dim": 34}, "model.head_dim=32 or 34"),
    Case(
        "rope_scaling_has_a_band",
        1,
        {"model.rope_scaling.low_freq_factor": 4.0},
        {"model.rope_scaling.low_freq_factor": 3.9},
        "model.rope_scaling.high_freq_factor=16",
    ),
    Case(
        "one_pattern_of_attention",
        1,
        {"model.sliding_window": 64, "model.sparse_attention.block": 64},
        {"model.sliding_window": 64},
        "model.sliding_window=null",
    ),
    Case(
        "global_blocks_are_in_a_group",
        1,
        {"model.sparse_attention.num_global_blocks": 5},
        {"model.sparse_attention.num_global_blocks": 4},
        "model.sparse_attention.num_global_blocks=4",
    ),
    Case(
        "blocks_have_no_folder",
        1,
        {"model.sparse_attention.block": 64, "checkpoint.export_hf": True},
        {"checkpoint.export_hf": True},
        "checkpoint.export_hf=false",
    ),
    Case("layers_fill_stages", 8, {"trainer.pp": 8}, {"trainer.pp": 4}, "trainer.pp=4"),
    Case("layers_fill_stages", 2, {**TWO_STAGES, "trainer.vpp": 3}, {**TWO_STAGES, "trainer.vpp": 2}, "trainer.vpp=2"),
    Case(
        "something_is_recomputed",
        1,
        {"trainer.recompute_every": 2},
        {"trainer.recompute_every": 2, "trainer.recompute": "selective"},
        "trainer.recompute=full",
    ),
    Case("vpp_needs_a_pipeline", 1, {"trainer.vpp": 2}, {"trainer.vpp": 1}, "trainer.vpp=1"),
    Case("vpp_needs_a_pipeline", 2, {"trainer.vpp": 2}, {**TWO_STAGES, "trainer.vpp": 2}, "trainer.pp=2"),
    *(
        Case(
            "pipeline_layers_add_up",
            2,
            {**TWO_STAGES, "trainer.pipeline_layers": bad},
            {**TWO_STAGES, "trainer.pipeline_layers": [3, 1]},
            "[2,2]",
        )
        for bad in ([4], [2, 1, 1], [3, 2], [1, 1], [4, 0], [5, -1])
    ),
    Case(
        "pipeline_layers_add_up",
        2,
        {**TWO_STAGES, "trainer.vpp": 2, "trainer.pipeline_layers": [3, 1]},
        {**TWO_STAGES, "trainer.vpp": 2, "trainer.pipeline_layers": [2, 2]},
        "[2,2]",
    ),
    Case("batch_is_whole_micro_batches", 3, {}, {"trainer.global_batch_size": 9}, "trainer.global_batch_size=6 or 9"),
    Case(
        "batch_is_whole_micro_batches",
        1,
        {"trainer.micro_batch_size": 16},
        {"trainer.micro_batch_size": 4},
        "trainer.global_batch_size=16",
    ),
    Case(
        "batch_is_whole_micro_batches",
        2,
        {**TWO_STAGES, "trainer.vpp": 2, "trainer.global_batch_size": 3},
        {**TWO_STAGES, "trainer.vpp": 1, "trainer.global_batch_size": 3},
        "trainer.global_batch_size=2 or 4",
    ),
    Case(
        "sequence_divides_by_tp",
        2,
        {"trainer.tp": 2, "trainer.sp": True, "data.seq_length": 255},
        {"trainer.tp": 2, "trainer.sp": True, "data.seq_length": 256},
        "data.seq_length=254 or 256",
    ),
    Case(
        "sequence_divides_by_tp",
        2,
        {"trainer.tp": 2, "trainer.sp": True, "data.seq_length": 255},
        {"trainer.tp": 2, "trainer.sp": False, "data.seq_length": 255},
        "trainer.sp=false",
    ),
    Case(
        "onebit_adam_keeps_whole_states",
        2,
        {"optim.name": "onebit_adam", "trainer.zero": 1},
        {"optim.name": "onebit_adam", "trainer.zero": 0},
        "trainer.zero=0",
    ),
    Case(
        "onebit_adam_keeps_whole_states",
        2,
        {"optim.name": "onebit_adam", "trainer.zero": 0, "trainer.precision": "bf16_sr"},
        {"optim.name": "onebit_adam", "trainer.zero": 0, "trainer.precision": "bf16"},
        "trainer.precision=bf16",
    ),
    Case(
        "onebit_adam_keeps_whole_states", 2, {"optim.freeze_step": 3}, {"optim.freeze_step": None}, "freeze_step=null"
    ),
    Case(
        "one_exchange_of_gradients",
        2,
        {"trainer.grad_reduce": "int8", "trainer.zero": 0, "optim.name": "onebit_adam"},
        {"trainer.grad_reduce": "int8", "trainer.zero": 0},
        "trainer.grad_reduce=null",
    ),
    Case(
        "something_is_gathered",
        2,
        {"trainer.param_gather": "int8", "trainer.zero": 0},
        {"trainer.param_gather": "int8"},
        "trainer.zero=1, 2 or 3",
    ),
    Case(
        "something_is_gathered",
        2,
        {**LORA, "trainer.param_gather": "int8", "finetune.frozen_dtype": "nf4"},
        {**LORA, "trainer.param_gather": "int8"},
        "trainer.param_gather=null",
    ),
    Case(
        "two_hops_have_an_exchange",
        4,
        {"trainer.reduce_group": 2},
        {"trainer.reduce_group": 2, "trainer.grad_reduce": "bf16"},
        "trainer.grad_reduce=bf16 or int8",
    ),
    Case(
        "two_hops_have_an_exchange",
        4,
        {"trainer.reduce_group": 2, "trainer.grad_reduce": "int8", "trainer.zero": 0},
        {"trainer.reduce_group": 2, "trainer.grad_reduce": "int8", "trainer.zero": 1},
        "trainer.zero=1, 2 or 3",
    ),
    Case(
        "two_hops_have_an_exchange",
        8,
        {"trainer.reduce_group": 8, "trainer.grad_reduce": "int8"},
        {"trainer.reduce_group": 4, "trainer.grad_reduce": "int8"},
        "trainer.reduce_group=4",
    ),
    Case(
        "second_copy_is_gathered_from",
        4,
        {"trainer.secondary_group": 2},
        {"trainer.secondary_group": 2, "trainer.zero": 3},
        "trainer.zero=3",
    ),
    Case(
        "second_copy_is_gathered_from",
        8,
        {"trainer.secondary_group": 3, "trainer.zero": 3},
        {"trainer.secondary_group": 4, "trainer.zero": 3},
        "trainer.secondary_group=2 or 4",
    ),
    Case(
        "second_copy_is_gathered_from",
        8,
        {"trainer.secondary_group": 4, "trainer.zero": 3, "trainer.shard_group": 4},
        {"trainer.secondary_group": 2, "trainer.zero": 3, "trainer.shard_group": 4},
        "trainer.secondary_group=2",
    ),
    Case(
        "shard_group_divides_dp",
        8,
        {"trainer.shard_group": 3},
        {"trainer.shard_group": 4},
        "trainer.shard_group=2 or 4",
    ),
    Case(
        "shard_group_divides_dp",
        4,
        {"trainer.shard_group": 2, "trainer.zero": 0},
        {"trainer.shard_group": 2, "trainer.zero": 1},
        "trainer.zero=1",
    ),
    Case("sequence_fits_model", 1, {"data.seq_length": 4097}, {"data.seq_length": 4096}, "data.seq_length=4096"),
    Case("schedule_fits_run", 1, {"optim.warmup_steps": 101}, {"optim.warmup_steps": 100}, "optim.warmup_steps=100"),
    Case(
        "schedule_fits_run",
        1,
        {"optim.warmup_steps": 20, "optim.constant_steps": 81},
        {"optim.warmup_steps": 20, "optim.constant_steps": 80},
        "optim.warmup_steps=19",
    ),
    Case(
        "schedule_fits_run", 1, {"optim.constant_steps": 101}, {"optim.constant_steps": 100}, "optim.constant_steps=100"
    ),
    Case(
        "epochs_or_steps",
        1,
        {**FILES, "trainer.epochs": 2, "trainer.steps": 7},
        {**FILES, "trainer.epochs": 2},
        "trainer.epochs=null",
    ),
    Case(
        "epochs_or_steps",
        1,
        {**FILES, "trainer.epochs": 2, "data.schedule": [{"samples": 100, "prefixes": ["y"]}]},
        {**FILES, "trainer.epochs": 2},
        "trainer.epochs=null",
    ),
    Case("epochs_or_steps", 1, {"trainer.epochs": 2}, {"trainer.steps": 2}, "trainer.epochs=null"),
    Case(
        "epochs_or_steps",
        1,
        {**FILES, "data.prefixes": [1, "x"], "trainer.epochs": 2},
        {**FILES, "data.prefixes": ["x", "y"], "trainer.epochs": 2},
        "without weights",
    ),
    Case(
        "one_warmup",
        1,
        {"optim.warmup_ratio": 0.1, "optim.warmup_steps": 5},
        {"optim.warmup_ratio": 0.1},
        "optim.warmup_ratio=null",
    ),
    Case(
        "fine_tuning_sets_are_whole",
        1,
        {**FILES, "data.kind": "sft", "data.schedule": [{"samples": 100, "prefixes": ["y"]}]},
        {**FILES, "data.schedule": [{"samples": 100, "prefixes": ["y"]}]},
        "data.schedule=[]",
    ),
    Case(
        "fine_tuning_sets_are_whole",
        1,
        {**FILES, "data.kind": "sft", "data.prefixes": [1, "x", 2, "y"]},
        {**FILES, "data.kind": "sft", "data.prefixes": ["x", "y"]},
        "data.prefixes=[x,y]",
    ),
    Case(
        "documents_are_of_pretraining",
        1,
        {**FILES, "data.kind": "sft", "data.document_mask": True},
        {**FILES, "data.document_mask": True},
        "data.document_mask=false",
    ),
    Case(
        "documents_are_of_pretraining",
        1,
        {**FILES, "data.kind": "sft", "data.eod_mask_loss": True},
        {**FILES, "data.eod_mask_loss": True},
        "data.eod_mask_loss=null",
    ),
    Case(
        "fine_tuning_sets_are_whole",
        1,
        {**FILES, "data.pack": True},
        {**FILES, "data.pack": True, "data.kind": "sft"},
        "data.kind=sft",
    ),
    Case(
        "fine_tuning_sets_are_whole",
        1,
        {**FILES, "data.validation_prefixes": ["y"]},
        {**FILES, "data.validation_prefixes": ["y"], "data.kind": "sft"},
        "data.validation_prefixes=[]",
    ),
    Case(
        "records_can_be_prepared",
        1,
        {**RECORDS, "data.prefixes": ["x.jsonl"], "data.tokenizer": None},
        {**RECORDS, "data.prefixes": ["x.jsonl"]},
        "data.tokenizer=FOLDER",
    ),
    Case(
        "records_can_be_prepared",
        1,
        {**RECORDS, "data.prefixes": ["x.tsv"]},
        {**RECORDS, "data.prefixes": ["x.tsv"], "data.template": "qnli"},
        "data.template=qnli",
    ),
    Case("records_can_be_prepared", 1, {**RECORDS, "data.template": "qnli"}, RECORDS, "leave data.template out"),
    Case(
        "records_can_be_prepared", 1, {**RECORDS, "data.chat_template": "chatml"}, RECORDS, "leave data.chat_template"
    ),
    Case("lr_falls", 1, {"optim.min_lr": 1e-3}, {"optim.min_lr": 3e-4}, "optim.min_lr=3e-05"),
    Case(
        "schedule_has_a_class",
        1,
        {"optim.schedule": {"max_steps": 3}},
        {"optim.schedule": {"_target_": "megatron_llama.optim.schedules.Constant"}},
        "optim=cosine",
    ),
    Case(
        "schedule_may_be_built",
        1,
        {"optim.schedule": {"_target_": "torch.optim.lr_scheduler.LambdaLR", "lr_lambda": [{"_target_": "os.abort"}]}},
        {"optim.schedule": {"_target_": "torch.optim.lr_scheduler.LambdaLR"}},
        "allow_targets=[os.abort]",
    ),
    Case("data_is_there", 1, {"data.mock": False}, {"data.mock": True}, "data=mock"),
    Case(
        "validation_has_documents",
        1,
        {"data.mock": False, "data.prefixes": ["x"], "data.split": "1,0,0", "trainer.val_every_steps": 5},
        {"data.mock": False, "data.prefixes": ["x"], "data.split": "9,1,0", "trainer.val_every_steps": 5},
        "969,30,1",
    ),
    Case(
        "samples_need_a_tokenizer",
        1,
        {"logging.sample_prompts": ["Hello"]},
        {"logging.sample_prompts": ["Hello"], "data.tokenizer": "t.model"},
        "data.tokenizer=",
    ),
    Case(
        "fine_tuning_has_a_start",
        1,
        {"finetune.method": "full", "data.mock": False, "data.prefixes": ["a"]},
        {"finetune.method": "none", "data.mock": False, "data.prefixes": ["a"]},
        "init_from=",
    ),
    Case("lora_settings_are_for_lora", 1, {"finetune.lora_rank": 4}, {**LORA, "finetune.lora_rank": 4}, "method=lora"),
    Case(
        "rank_is_low",
        1,
        {**LORA, "model.num_key_value_heads": 2, "finetune.lora_rank": 97},
        {**LORA, "model.num_key_value_heads": 2, "finetune.lora_rank": 96},
        "finetune.lora_rank=96",
    ),
    Case(
        "tied_tables_stay_tied",
        1,
        {**LORA, "model.tie_word_embeddings": True, "finetune.modules_to_save": ["norm", "embed_tokens"]},
        {**LORA, "model.tie_word_embeddings": True, "finetune.modules_to_save": ["norm"]},
        "finetune.modules_to_save=[norm]",
    ),
    Case(
        "quantized_blocks_are_whole",
        1,
        {**LORA, "model.intermediate_size": 800, "finetune.frozen_dtype": "nf4"},
        {**LORA, "model.intermediate_size": 800, "finetune.frozen_dtype": "bf16"},
        "finetune.frozen_dtype=bf16",
    ),
]
