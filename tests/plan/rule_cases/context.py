"""Cases of plan/rules/context.py."""

from __future__ import annotations

from tests.plan.rule_cases.case import Case

CP4 = {"trainer.cp": 4}
CP2 = {"trainer.cp": 2}
HEADS = {"model.num_attention_heads": 8, "model.num_key_value_heads": 2, "model.hidden_size": 256}
LTD = {"trainer.random_ltd.min_value": 16}
OVERLAPPED = {"trainer.tp": 2, "trainer.sp": True, "trainer.compile": True, "trainer.async_tp": True}
SHORT = {"metric": "seqlen_truncate", "schedule_type": "fixed_discrete", "max_step": [9]}
CASES = [
    Case(
        "chunks_are_equal", 4, {**CP4, "data.seq_length": 100}, {**CP4, "data.seq_length": 104}, "data.seq_length=96 or"
    ),
    Case(
        "chunks_are_equal",
        6,
        {"trainer.cp": 2, "trainer.tp": 3, **HEADS, "model.num_attention_heads": 6, "model.num_key_value_heads": 3}
        | {"model.hidden_size": 240, "model.intermediate_size": 480, "data.seq_length": 50},
        {"trainer.cp": 2, "trainer.tp": 3, **HEADS, "model.num_attention_heads": 6, "model.num_key_value_heads": 3}
        | {"model.hidden_size": 240, "model.intermediate_size": 480, "data.seq_length": 60},
        "data.seq_length=48 or 60",
    ),
    Case(
        "heads_divide_by_cp",
        3,
        {"trainer.cp": 3, "trainer.cp_comm": "ulysses", **HEADS, "data.seq_length": 96},
        {"trainer.cp": 3, **HEADS, "data.seq_length": 96},
        "trainer.cp=2 or 4",
    ),
    Case("whole_sequences_drop_tokens", 2, {**CP2, **LTD}, LTD, "trainer.random_ltd=null"),
    Case("context_is_not_overlapped", 4, {**CP2, **OVERLAPPED}, OVERLAPPED, "trainer.async_tp=false"),
    Case("grid_divides_world", 8, {"trainer.cp": 3, "data.seq_length": 96}, CP2, "trainer.cp=2 or 4"),
    Case(
        "curriculum_lengths_fit",
        4,
        {**CP4, "data.seq_length": 256, "data.curriculum": [{**SHORT, "difficulty": [60, 256]}]},
        {**CP4, "data.seq_length": 256, "data.curriculum": [{**SHORT, "difficulty": [64, 256]}]},
        "such lengths",
    ),
]
