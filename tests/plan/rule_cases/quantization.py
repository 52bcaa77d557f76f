"""Cases of plan/rules/finetune.py."""

from __future__ import annotations

from tests.plan.rule_cases.case import LORA, Case

EIGHT = {"optim.state_bits": 8}
LLAMA_7B = {"model.hidden_size": 4096, "model.intermediate_size": 11008, "model.num_attention_heads": 32}
CASES = [
    Case(
        "quantized_blocks_are_whole",
        1,
        {**LORA, "model.intermediate_size": 800, "finetune.frozen_dtype": "nf4"},
        {**LORA, "model.intermediate_size": 800, "finetune.frozen_dtype": "bf16"},
        "finetune.frozen_dtype=bf16",
    ),
    Case(
        "state_blocks_are_whole",
        1,
        {**EIGHT, "model.intermediate_size": 720},
        {**EIGHT, "model.intermediate_size": 704},
        "optim.state_bits=null",
    ),
    Case(
        "state_blocks_are_whole",
        16,
        {**EIGHT, **LLAMA_7B, "trainer.tp": 16},
        {**EIGHT, **LLAMA_7B, "trainer.tp": 8},
        "trainer.tp=8",
    ),
    Case(
        "state_blocks_are_whole",
        2,
        {**EIGHT, "optim.name": "onebit_adam", "trainer.zero": 0},
        {**EIGHT, "optim.name": "adam", "trainer.zero": 0},
        "optim.state_bits=null",
    ),
]
