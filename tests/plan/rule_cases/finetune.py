"""Cases of plan/rules/finetune.py."""

from __future__ import annotations

from tests.plan.rule_cases.case import LORA, Case

CASES = [
    Case(
        "fine_tuning_has_a_start",
        1,
        {"finetune.method": "full", "data.mock": False, "data.prefixes": ["a"]},
        {"finetune.method": "none", "data.mock": False, "data.prefixes": ["a"]},
        "init_from=",
    ),
    Case("lora_settings_are_for_lora", 1, {"finetune.lora_rank": 4}, {**LORA, "finetune.lora_rank": 4}, "method=lora"),
    Case(
        "optimizer_suits_the_method",
        1,
        {**LORA, "optim.name": "muon"},
        {"finetune.method": "full", "optim.name": "muon", "init_from": "/models/one"},
        "optim.name=adamw, or finetune.method=full",
    ),
    Case(
        "dora_has_no_dropout",
        1,
        {**LORA, "finetune.use_dora": True, "finetune.lora_dropout": 0.1},
        {**LORA, "finetune.lora_dropout": 0.1},
        "finetune.lora_dropout=0",
    ),
    Case(
        "rank_is_low",
        1,
        {**LORA, "model.num_key_value_heads": 2, "finetune.lora_rank": 97},
        {**LORA, "model.num_key_value_heads": 2, "finetune.lora_rank": 96},
        "finetune.lora_rank=96",
    ),
    Case(
        "tied_embeddings_stay_tied",
        1,
        {**LORA, "model.tie_word_embeddings": True, "finetune.modules_to_save": ["norm", "embed_tokens"]},
        {**LORA, "model.tie_word_embeddings": True, "finetune.modules_to_save": ["norm"]},
        "finetune.modules_to_save=[norm]",
    ),
]
