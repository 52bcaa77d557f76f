"""Cases of plan/rules/data.py."""

from __future__ import annotations

from tests.plan.rule_cases.case import FILES, LENGTHS, RARITY, Case

RESHAPED = {**LENGTHS, "metric": "seqlen_reshape"}
ODD = {**LENGTHS, "difficulty": [65, 256]}
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
            ({**LENGTHS, "min_difficulty": 64}, "omit min_difficulty"),
            ({**LENGTHS, "difficulty_type": "percentile"}, "difficulty_type: value"),
            ({**LENGTHS, "index": "folder"}, "omit index"),
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
]
