"""Storage of parameters and gradients on a rank, by layout, precision and device."""

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
    """``plain``: layers compute with the parameters (dp=1 and one dtype throughout). ``copies``: dp=1 with copies of
    all weights in the compute dtype (parallel/compute_copies.py). ``shards``: ``fully_shard`` gathers and casts; also
    for dp=1 with ZeRO 3, which casts block by block and needs less memory."""
    one_micro_batch: bool
    """Each step has one forward and one backward pass."""
    keeps_bf16_grads: bool
    """Whether gradients keep the compute dtype until the update, as no other gradient is added to them. False for LoRA,
    whose gradients are small."""
    frees_embedding: bool
    """Whether the first stage frees its copy of the embedding after the lookup, unless it also has the tied output
    head. LoRA's embedding is frozen and has no copy by default."""
    tied: bool = False
    """Whether output head and embedding share a weight."""

    @classmethod
    def of(cls, config: Config, dp: int, num_microbatches: int, *, frozen_dtype: str, sums_gradients: bool) -> Storage:
        """Return the storage of a derived config.

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
        keeps_bf16_grads = alone and on_device and not sums_gradients and not trainer.exact
        return cls(kind, one_micro_batch, keeps_bf16_grads, alone, config.model.tie_word_embeddings)

    def frees_embedding_of(self, *, is_first: bool, is_last: bool) -> bool:
        """Return whether a pipeline stage frees its copy of the embedding after the lookup."""
        return self.frees_embedding and is_first and not (is_last and self.tied)
