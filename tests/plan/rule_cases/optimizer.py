"""Cases of plan/rules/optimizer.py."""

from __future__ import annotations

from tests.plan.rule_cases.case import LORA, Case

CLIP = {"optim.qk_clip": 100.0}
NORMS, EAGER = {"model.model_type": "qwen3"}, "logits_are_computed_in_eager_blocks"
CASES = [
    Case("clipped_heads_have_no_norm", 1, {**CLIP, **NORMS}, NORMS, "optim.qk_clip=null"),
    Case("clipped_weights_are_trained", 1, {**CLIP, **LORA}, CLIP, "finetune.method=full"),
    Case(EAGER, 1, {**CLIP, "trainer.compile": True}, CLIP, "trainer.compile=false"),
    Case(EAGER, 1, {**CLIP, "trainer.exact": True}, CLIP, "trainer.exact=false"),
]
