"""Cases of plan/rules/exact.py."""

from __future__ import annotations

from tests.plan.rule_cases.case import LENGTHS, LORA, Case

EXACT = {"trainer.exact": True}
SIX = {"model.num_attention_heads": 6, "model.num_key_value_heads": 6, "model.hidden_size": 96}
SIX |= {"model.intermediate_size": 96}
EIGHT = {"model.num_attention_heads": 24, "model.num_key_value_heads": 24, "model.hidden_size": 384}
EIGHT |= {"model.intermediate_size": 384}
ONEBIT = {"optim.name": "onebit_adam", "trainer.zero": 0}
ULYSSES = {"trainer.cp": 2, "trainer.cp_comm": "ulysses", "data.seq_length": 1024}
ULYSSES |= {"model.max_position_embeddings": 1024}
THREE = {**ULYSSES, "trainer.cp": 3, "data.seq_length": 1056, "model.max_position_embeddings": 1056}
REPLACED, DEVICES = "exact_replaces_matmuls_and_sums", "exact_excludes"
SPANS = "exact_spans_divide_by_cp"
CASES = [
    Case(DEVICES, 1, {**EXACT, "device.name": "neuron"}, {**EXACT, "device.name": "cpu"}, "trainer.exact=false"),
    Case(DEVICES, 1, {**EXACT, **LORA}, LORA, "finetune.method=full"),
    Case(DEVICES, 1, {**EXACT, **ONEBIT}, ONEBIT, "optim.name=adamw"),
    Case(REPLACED, 1, {**EXACT, "trainer.compile": True}, {"trainer.compile": True}, "trainer.compile=false"),
    Case(REPLACED, 1, {**EXACT, "trainer.float8": "rowwise"}, EXACT, "trainer.float8=null"),
    Case(REPLACED, 2, {**EXACT, "trainer.grad_reduce": "bf16"}, EXACT, "trainer.grad_reduce=null"),
    Case(REPLACED, 2, {**EXACT, "trainer.param_gather": "int8"}, EXACT, "trainer.param_gather=null"),
    Case(REPLACED, 1, {**EXACT, "trainer.mlp_chunks": 2}, {"trainer.mlp_chunks": 2}, "trainer.mlp_chunks=1"),
    Case(
        "exact_blocks_divide_by_tp",
        12,
        {**EXACT, **EIGHT, "trainer.tp": 12},
        {**EXACT, **EIGHT, "trainer.tp": 4, "trainer.global_batch_size": 6},
        "write trainer.tp=8, or trainer.exact=false",
    ),
    Case(SPANS, 2, {**EXACT, **ULYSSES, "trainer.cp_comm": "all_gather"}, {**EXACT, **ULYSSES}, "cp_comm=ulysses"),
    Case(SPANS, 6, {**EXACT, **THREE}, {**EXACT, **ULYSSES, "trainer.global_batch_size": 6}, "trainer.cp=2 or 4"),
    Case(SPANS, 2, {**EXACT, **ULYSSES, "data.seq_length": 512}, {**EXACT, **ULYSSES}, "data.seq_length=1024"),
    Case(SPANS, 2, {**EXACT, **ULYSSES, "data.curriculum": [LENGTHS]}, {**EXACT, **ULYSSES}, "trainer.cp=1"),
]
