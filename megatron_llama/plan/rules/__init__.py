"""Why a config is refused: rules on settings that must go together. ``paths.py`` has the checks of files instead."""

from __future__ import annotations

from megatron_llama.plan.rules import datasets, finetune, layout, schedule
from megatron_llama.plan.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    layout.grid_divides_world,
    layout.dp_is_what_is_left,
    layout.heads_divide_by_tp,
    layout.kv_heads_share_out,
    layout.feed_forward_divides_by_tp,
    layout.kv_heads_divide_heads,
    layout.hidden_divides_by_heads,
    layout.head_dim_is_even,
    layout.rope_scaling_has_a_band,
    layout.layers_fill_stages,
    layout.vpp_needs_a_pipeline,
    layout.pipeline_layers_add_up,
    layout.batch_is_whole_micro_batches,
    layout.sequence_divides_by_tp,
    layout.shard_group_divides_dp,
    layout.hosts_can_be_reached,
    schedule.schedule_fits_run,
    schedule.epochs_or_steps,
    schedule.one_warmup,
    schedule.lr_falls,
    schedule.schedule_has_a_class,
    schedule.best_has_a_loss,
    datasets.sequence_fits_model,
    datasets.fine_tuning_sets_are_whole,
    datasets.data_is_there,
    datasets.validation_has_documents,
    datasets.samples_need_a_tokenizer,
    datasets.records_can_be_prepared,
    finetune.fine_tuning_has_a_start,
    finetune.lora_settings_are_for_lora,
    finetune.rank_is_low,
    finetune.tied_tables_stay_tied,
    finetune.quantized_blocks_are_whole,
)
"""Every rule, in the order of its messages."""
