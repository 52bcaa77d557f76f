"""Settings that each rule of plan/rules/ refuses, and a change of them that passes, of tests/golden/plan/rules.txt.

Section names are omitted where a setting's name is unique. Capitals stand for the text in ``SHORT``.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import yaml

from megatron_llama.config.settings_table import settings_by_name
from tests.golden import GoldenFiles

LENGTHS = "metric: seqlen_truncate, schedule_type: fixed_discrete, difficulty: [64,256], max_step: [9]"
LONGROPE = f"rope_type=longrope short_factor={[1.0] * 24} long_factor={[1.0] * 24}"
TUNED = "method=full init_from=/models/one kind=sft mock=false prefixes=[x]"
SHORT = {
    "LORA": "method=lora",
    "TUNED": TUNED,
    "DPO": f"{TUNED} objective=dpo",
    "FILES": "mock=false prefixes=[x]",
    "SFT": "kind=sft",
    "TEXTS": "mock=false prefixes=[x.jsonl] kind=sft tokenizer=t data.format=text response_marker=a",
    "ONEBIT": "optim.name=onebit_adam zero=0",
    "LENGTHS": LENGTHS,
    "RARITY": "metric: rarity, min_difficulty: 1, max_difficulty: 10, total_curriculum_step: 5",
    "CURRICULUM": f"curriculum=[{{{LENGTHS}}}]",
    "LONGROPE": LONGROPE,
    "FACTORS_23": str([1.0] * 23),
    "EXACT_CP": "exact=true cp=2 cp_comm=ulysses seq_length=1024 max_position_embeddings=1056",
    "HEADS_6": "num_attention_heads=6 num_key_value_heads=3 hidden_size=240 intermediate_size=480",
    "HEADS_8": "num_attention_heads=8 num_key_value_heads=2 hidden_size=256",
    "HEADS_12": "num_attention_heads=12 num_key_value_heads=4",
    "HEADS_24": "num_attention_heads=24 num_key_value_heads=24 hidden_size=384 intermediate_size=384",
    "TOKENS": "trainable_token_indices=[7]",
    "TIED": "tie_word_embeddings=true",
    "WIDE": "hidden_size=512 num_attention_heads=8 num_key_value_heads=8",
    "SHAPE_7B": "hidden_size=4096 intermediate_size=11008 num_attention_heads=32",
    "STEP_LR": "_target_: torch.optim.lr_scheduler.StepLR",
}
FULL_NAMES = {name.rpartition(".")[2]: name for name in settings_by_name()}


class Case(NamedTuple):
    rule: str
    world: int
    bad: str
    change: str
    """Settings that replace some of ``bad``, after which it passes."""


def parse_settings(text: str) -> dict[str, Any]:
    """Return the settings in a text such as ``tp=2 optim.name=sgd``, by full name."""
    text = re.sub(r"\b[A-Z][A-Z_\d]+\b", lambda name: SHORT.get(name[0], name[0]), text)
    words = (word.partition("=") for word in re.split(r" (?=[\w.]+=)", text) if word)
    return {name if "." in name else FULL_NAMES[name]: yaml.safe_load(value) for name, _, value in words}


CASES = [
    Case(rule, int(world), bad, change)
    for rule, world, bad, change in (line.split(" | ") for line in GoldenFiles.commands("plan/rules.txt"))
]
