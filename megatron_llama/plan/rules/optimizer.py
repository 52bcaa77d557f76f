"""Rules on attachments of the optimizer: QK-Clip."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.arch.shapes import qk_norm
from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import Config
from megatron_llama.plan.rules.rule import reads

OFF = "or optim.qk_clip=null"


@reads("optim.qk_clip", "model.model_type")
def clipped_heads_have_no_norm(config: Config, world_size: int) -> Iterator[Problem]:
    """QK-Clip scales weights before the norm of q and k, which removes any scale."""
    if config.optim.qk_clip is not None and qk_norm(config.model) is not None:
        rule = f"has no effect with model.model_type={config.model.model_type}: norms of q and k remove the scale of "
        rule += "the weights, and bound the logits already"
        yield Problem("optim.qk_clip", config.optim.qk_clip, rule, "write optim.qk_clip=null")


@reads("optim.qk_clip", "finetune.method")
def clipped_weights_are_trained(config: Config, world_size: int) -> Iterator[Problem]:
    """QK-Clip scales the weights of q and k, which LoRA freezes."""
    if config.optim.qk_clip is not None and config.finetune.method == "lora":
        rule = "scales the weights of q and k, which finetune.method=lora freezes"
        yield Problem("optim.qk_clip", config.optim.qk_clip, rule, f"write finetune.method=full, {OFF}")


@reads("optim.qk_clip", "trainer.compile", "trainer.exact")
def logits_are_computed_in_eager_blocks(config: Config, world_size: int) -> Iterator[Problem]:
    """QK-Clip computes logits next to the kernel of attention, by blocks whose number depends on documents."""
    clip, trainer = config.optim.qk_clip, config.trainer
    if clip is None:
        return
    if trainer.compile:
        rule = "reads the lengths of documents on the host for the largest logits, which compiled blocks cannot"
        yield Problem("optim.qk_clip", clip, rule, f"write trainer.compile=false, {OFF}")
    if trainer.exact:
        rule = "computes logits by matmuls whose sums depend on the layout, which trainer.exact excludes"
        yield Problem("optim.qk_clip", clip, rule, f"write trainer.exact=false, {OFF}")
