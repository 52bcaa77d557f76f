"""Cases of plan/rules/layout.py."""

from __future__ import annotations

from tests.plan.rule_cases.case import FILES, LENGTHS, RARITY, Case

LTD = "trainer.random_ltd"
CASES = [
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
        "retained_tokens_divide_by_tp",
        2,
        {"trainer.tp": 2, f"{LTD}.seq_per_step": 1},
        {"trainer.tp": 2, f"{LTD}.seq_per_step": 1, "trainer.sp": False},
        "seq_per_step=2",
    ),
    Case(
        "retained_tokens_divide_by_tp",
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
]
