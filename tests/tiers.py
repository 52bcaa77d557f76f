"""Rows of parametrized tests that ``make test`` runs; ``make test-slow`` runs the others.

A function that is not listed runs whole. Tables of layouts list their rows next to the table (``rows`` of
tests/rows.py). A listed function without rows belongs to ``make test-slow``: it repeats, in a whole run or a campaign,
what smaller tests of ``make test`` check.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

ROWS: dict[str, tuple[str, ...]] = {
    "arch/test_hf_tp_mapping.py::test_rectangles_cover_every_tensor_once_and_copies_are_counted": (
        "1-True",
        "2-False",
        "3-True",
        "5-True",
    ),
    "checkpoint/test_data_stream.py::test_a_batch_schedule_is_that_counted_by_hand": (),
    "checkpoint/test_folder.py::test_killed_within_a_save": ("prune",),
    "checkpoint/test_folder.py::test_saved_steps": ("default", "keep_every", "by steps, keep"),
    "checkpoint/test_foreign.py::test_a_run_continues": ("trainer-layouts0",),
    "checkpoint/test_huggingface.py::test_transformers_folder_gives_its_logits_and_comes_back": (
        "llama_2,_bf16,_sharded,_old_spelling",
        "llama_3,_fp32,_sharded,_tied",
        "qwen3,_bf16,_wide_heads",
        "olmo2,_biases,_wide_heads,_sharded",
    ),
    "checkpoint/test_jobs.py::test_a_failing_step_finishes_the_save_of_the_previous_step": ("failed",),
    "checkpoint/test_jobs.py::test_a_flipped_bit_stops_the_run_before_a_checkpoint_has_it": ("0",),
    "checkpoint/test_megatron.py::test_a_run_continues_in_megatrons_order": (),
    "checkpoint/test_megatron.py::test_moments_by_buffers_are_rejected": (),
    "checkpoint/test_resume.py::test_any_layout_loads_into_any": (
        "odd vocabulary: dp2, zero 2 to cp2·dp2, zero 3",
        "odd vocabulary: tp4, kv heads < tp to tp2",
        "tied: dp2, zero 2 to dp4, hybrid",
    ),
    "data/test_finetuning_set.py::test_loss_is_per_learned_token_of_the_global_batch_in_every_layout": ("True",),
    "data_prep/test_file_kinds.py::test_pipes": ("fifo-False",),
    "data_prep/test_join_parts.py::test_part_resumes_after_kill": (
        "in the part",
        "while it joins",
        "in the index",
        "among the final names",
    ),
    "data_prep/test_resume.py::test_kill_9_in_each_phase": (
        "True-after some blocks",
        "True-between a block's tokens and lengths",
        "True-in a checkpoint",
        "True-while the index is written",
        "True-after the second rename",
    ),
    "data_prep/test_resume.py::test_signal_exits_with_75_and_run_resumes": ("12-process", "2-group"),
    "devices/test_shared_memory.py::test_the_same_bits": ("pp2·vpp2", "pp3, uneven"),
    "experiments/test_plans.py::test_one_trains": (),
    "experiments/test_plans.py::test_the_extension_trains_scaled_down": (),
    "finetuning/test_lora.py::test_a_resumed_run_is_the_uninterrupted_one": ("zero 3",),
    "finetuning/test_lora.py::test_frozen_weights_in_bf16_under_fp32_lora": ("one", "tp2+sp"),
    "finetuning/test_quantized.py::test_every_layout_has_the_same_values_and_trains_alike": (
        "nf4-tp2+sp·zero 3, recompute",
        "nf4-cp2",
    ),
    "finetuning/test_quantized.py::test_memory_is_that_of_the_plan": ("nf4-1",),
    "launch/test_cli.py::test_torchrun_shows_the_first_failure": (),
    "launch/test_cli.py::test_under_srun_a_mistake_is_said_once": (),
    "launch/test_environment.py::test_a_variable_that_torch_rejects_gives_no_traceback": ("TORCH_LOGS",),
    "launch/test_faults.py::test_import_path_of_a_spawned_rank": (),
    "launch/test_signals.py::test_ctrl_c_to_all_processes": ("2-130",),
    "launch/test_ssh.py::test_failing_rank_ends_all_hosts_and_is_printed_last": (),
    "launch/test_ssh.py::test_ranks_on_two_hosts_meet": (),
    "layouts/test_exact.py::test_bf16": ("pp2·dp2",),
    "layouts/test_bf16.py::test_layouts_in_bf16_differ_by_independent_errors": (),
    "layouts/test_bf16.py::test_scales_of_a_part_are_seen": (),
    "layouts/test_layouts.py::test_chunks_of_the_loss_change_nothing": (
        "chunks_of_12-tp2+sp, tied, odd vocabulary",
        "passes_of_the_compiled_loss-one process",
        "passes_of_the_compiled_loss-tp2+sp, tied, odd vocabulary",
    ),
    "layouts/test_precision.py::test_live_tensors_have_the_dtypes_of_the_table": ("3",),
    "model/test_fused_operators.py::test_a_step_has_the_same_bits": (
        "tp2+sp, elementwise",
        "full, chunks",
        "zero 3, qwen3",
        "olmo2",
        "random-LTD",
        "offload",
        "bf16",
    ),
    "optim/test_optimizer.py::test_a_run_of_one_micro_batch_keeps_them_narrow_and_trains_the_same": (
        "1-layout0",
        "2-layout1",
        "2-layout3",
    ),
    "optim/test_muon.py::test_update_is_torch_muons": ("match_rms_adamw",),
    "optim/test_new_optimizer.py::test_it_trains_and_resumes_bit_identically": ("fp32",),
    "optim/test_onebit_adam.py::test_copies_stay_equal_and_the_loss_falls": ("dp2",),
    "parallel/test_data_parallel.py::test_a_run_is_bit_identical_to_fully_shards": ("1-layout0", "2-layout3"),
    "system/test_errors.py::test_scripts_end_quietly_with_their_reader": ("compare.py", "plan.py"),
    "system/test_missing_packages.py::test_a_run_needs_all_packages_before_it_starts": ("torch", "rich,matplotlib"),
    "tools/compare/test_verdict.py::test_report_files": ("1.3-1",),
    "tools/inference/test_evaluate.py::test_perplexity_of_divided_sequences": ("llama3-cp2", "dynamic-cp2 tp2"),
    "tools/inference/test_generator.py::test_divided_prompts_are_continued_as_whole_ones": (
        "llama3-cp2-drawn",
        "window-cp2-greedy",
        "dynamic-cp4-drawn",
        "llama3-cp2 tp2-drawn",
    ),
    "tools/inference/test_generator.py::test_other_types_as_transformers_generates": ("qwen2-layout0", "qwen3-layout2"),
    "tools/inference/test_generator.py::test_several_ranks_as_one": ("tp2 drawn", "tp4"),
    "tools/profile/test_profile.py::test_the_script_runs_and_prints_a_profile": (),
    "tools/rehearse/test_operators.py::test_host_reads_with_other_optimizers": (),
    "tools/rehearse/test_operators.py::test_operators_of_a_step": ("Gaudi",),
    "tools/sweep/test_sweep.py::test_a_run_prints_the_path_of_its_plan": (),
    "tools/sweep/test_sweep.py::test_two_real_runs": (),
    "tools/test_planned_run.py::test_all_tools_agree_on_one_command": ("device0", "device2"),
    "tools/tune/test_tune_script.py::test_the_page_is_the_forecast": (),
    "tools/tune/test_tune_script.py::test_context_parallelism_and_recomputation_in_the_table": (),
    "train/test_spike_guard.py::test_a_rewind_continues_in_each_dataset_of_a_blend": (),
    "train/test_spike_guard.py::test_a_run_that_is_killed_after_a_rewind_repeats_it": (),
    "train/test_spike_guard.py::test_a_skipped_step_changes_no_weight_and_no_state": (),
    "train/test_spike_guard.py::test_a_stop_signal_during_the_spike_saves_nothing": (),
    "train/test_spike_guard.py::test_resume_keeps_the_means_and_the_skipped_data": ("rewind",),
    "train/test_spike_guard.py::test_rewinds_are_bounded": (),
    "train/test_host_waits.py::test_steps_do_not_synchronize_with_the_whole_device": ("2",),
    "train/test_step_checks.py::test_batches_without_labels": ("1",),
    "train/test_step_checks.py::test_samples_are_the_same_in_every_layout": ("pp2·vpp2", "cp2·tp2+sp"),
    "train/test_token_counts.py::test_consumed_tokens_are_exact_over_a_resume_in_another_layout": ("packed",),
}
"""Test functions below tests/, and the ids of the rows that ``make test`` runs."""


def selected_by_tier(item: pytest.Item) -> bool:
    """Return whether ``make test`` runs the test."""
    function, _, row = item.nodeid.removeprefix("tests/").partition("[")
    rows = ROWS.get(function)
    return rows is None or row.removesuffix("]") in map(escaped, rows)


def escaped(row: str) -> str:
    """Return the id of a row as pytest writes it."""
    return row.encode("unicode_escape").decode()


COMPILED_ROWS = ("compiled", "async_tp")
"""Words in the names of rows that compile for a minute or more. ``--sample`` skips them, as tests marked ``long``."""


def sample(items: Sequence[pytest.Item], rows: int) -> set[pytest.Item]:
    """Return the fast tests, and of each slow one ``rows`` rows from the first to the last."""
    slow: dict[str, list[pytest.Item]] = {}
    selected = set[pytest.Item]()
    for item in items:
        name, _, row = item.nodeid.partition("[")
        if not item.get_closest_marker("slow"):
            selected.add(item)
        elif not item.get_closest_marker("long") and not any(word in row for word in COMPILED_ROWS):
            slow.setdefault(name, []).append(item)
    for table in slow.values():
        count = min(rows, len(table))
        selected |= {table[number * (len(table) - 1) // max(1, count - 1)] for number in range(count)}
    return selected
