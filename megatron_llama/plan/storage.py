"""How a rank stores parameters and gradients between steps and within one: by the layout, the precision, the device."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.config.precision import PRECISIONS
from megatron_llama.config.settings import Config
from megatron_llama.devices import find_device

PLAIN, COPIES, SHARDS = "plain", "copies", "shards"


@dataclass(frozen=True)
class Storage:
    """Parameters and gradients of one rank; model, optimizer and memory read it."""

    kind: str
    """``plain``: layers compute with the parameters themselves. One data-parallel rank has no peers to share with, and
    weights and gradients have one dtype throughout. ``copies``: such a rank casts all weights itself for a pass
    (parallel/fsdp.py). ``shards``: ``fully_shard`` gathers and casts, also for one rank under ZeRO 3, which
    casts block by block in less memory."""
    one_micro_batch: bool
    """Each step has one forward and one backward pass."""
    keeps_bf16_grads: bool
    """Gradients keep the compute dtype until the update: no other gradient is added to them. LoRA's are small."""
    frees_embedding: bool
    """The first stage frees its copy of the embedding after the lookup, unless it also has the output head of tied
    embeddings. LoRA's embedding is frozen and has no copy by default."""
    tied: bool = False
    """The output head is the embedding."""

    @classmethod
    def of(cls, config: Config, dp: int, num_microbatches: int, *, frozen_dtype: str, sums_gradients: bool) -> Storage:
        """The storage of a derived config.

        Args:
            config: Settings with all derived values.
            dp: Data-parallel size.
            num_microbatches: Micro batches of a rank and step.
            frozen_dtype: torch's name of the dtype of frozen weights.
            sums_gradients: The optimizer sums gradients over the data-parallel ranks itself.
        """
        trainer, precision = config.trainer, PRECISIONS[str(config.trainer.precision)]
        compute, lora = precision.compute_dtype, config.finetune.method == "lora"
        one_dtype = precision.param_dtype == compute == precision.grad_accum_dtype == frozen_dtype
        kind = SHARDS
        if dp == 1 and one_dtype:
            kind = PLAIN
        elif dp == 1 and trainer.zero < 3:
            kind = COPIES
        one_micro_batch = num_microbatches == 1 and not trainer.batch_schedule
        alone = kind == COPIES and one_micro_batch and not lora
        device = find_device(config.device.name)
        on_device = device is not None and device.keeps_bf16_grads and "optimizer" not in trainer.offload
        keeps_bf16_grads = alone and on_device and not sums_gradients
        return cls(kind, one_micro_batch, keeps_bf16_grads, alone, config.model.tie_word_embeddings)

    def frees_embedding_of(self, *, is_first: bool, is_last: bool) -> bool:
        """Whether a pipeline stage frees its copy of the embedding after the lookup."""
        return self.frees_embedding and is_first and not (is_last and self.tied)
