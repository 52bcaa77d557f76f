"""What a config means on a given number of devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron_llama.config.model_settings import ModelConfig
from megatron_llama.config.precision import PRECISIONS, QUANTIZED_BITS, Precision
from megatron_llama.config.settings import Config
from megatron_llama.plan.batch_schedule import BatchSchedule, Position
from megatron_llama.plan.epochs import Reading
from megatron_llama.plan.shapes import StageParameters
from megatron_llama.plan.token_schedule import TokenSchedule


@dataclass(frozen=True)
class Plan:
    """A config that works, with every derived value filled in. Made by ``resolve``; needs no device."""

    config: Config
    """The settings. Derived ones are no longer None, except facts about the device, run.dir, which depends on the time,
    the cache_dir of made-up data, and val_steps, where None means the whole set."""
    asked: Config = field(compare=False)
    """The settings as they were given: what was left to be derived is None."""
    world_size: int
    """Devices, one process each."""
    dp: int
    """Data-parallel size, world_size / (tp * pp)."""
    num_microbatches: int
    """Micro batches per data-parallel rank and step of trainer.global_batch_size."""
    stage_layers: tuple[tuple[int, ...], ...]
    """Global layer numbers of each virtual stage, pp * vpp entries; virtual stage v * pp + p is chunk v of stage p."""
    padded_vocab_size: int
    """Rows of the embedding table with padding, a multiple of tp."""
    parameters: int
    """Parameters of the whole model, as published."""
    whole: StageParameters
    """The whole model with LoRA's parameters, without padding and copies."""
    stages: tuple[StageParameters, ...]
    """What one rank of each pipeline stage holds."""
    record_files: tuple[tuple[str, str], ...]
    """(setting, path) of the files of records that are still to be prepared."""
    readings: tuple[Reading, ...] = ()
    """What the run reads of each training dataset; empty for made-up data, and where a dataset is not there."""
    chosen: tuple[str, ...] = field(default=(), compare=False)
    """Defaults that were chosen by model and device, each with the reason."""
    notes: tuple[str, ...] = ()
    """What a user should know about the plan."""
    start: Position = Position()
    """Where the run goes on; known when its checkpoint is loaded."""

    @property
    def model(self) -> ModelConfig:
        """The model's shape."""
        return self.config.model

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        assert self.config.run.dir is not None, "the starter sets it before a rank starts"
        return Path(self.config.run.dir)

    @property
    def precision(self) -> Precision:
        """What ``trainer.precision`` means."""
        return PRECISIONS[str(self.config.trainer.precision)]

    @property
    def frozen_dtype(self) -> str:
        """torch's name of the dtype of weights that are neither trained nor quantized."""
        kept = None if self.quantized else self.config.finetune.frozen_dtype
        return {"fp32": "float32", "bf16": "bfloat16"}[kept or self.precision.compute_format]

    @property
    def quantized(self) -> str | None:
        """int8 or nf4, where the blocks' matrices are kept so."""
        kept = self.config.finetune.frozen_dtype
        return kept if self.config.finetune.method == "lora" and kept in QUANTIZED_BITS else None

    @property
    def shard_size(self) -> int:
        """Data-parallel ranks that share one copy of what is sharded; 1 where zero=0."""
        return 1 if self.config.trainer.zero == 0 else (self.config.trainer.shard_group or self.dp)

    @property
    def exchanges_signs(self) -> bool:
        """Whether data-parallel ranks exchange signs of momenta after ``optim.freeze_step`` (1-bit Adam)."""
        return self.config.optim.row.exchanges_signs

    @property
    def plain_parameters(self) -> bool:
        """Whether a rank's layers compute with its parameters themselves: one data-parallel rank has nobody to share
        with, and weights and gradients have one dtype throughout."""
        precision = self.precision
        one_dtype = precision.param_dtype == precision.compute_dtype == precision.grad_accum_dtype
        return self.dp == 1 and one_dtype and self.frozen_dtype == precision.compute_dtype

    @property
    def working_copies(self) -> bool:
        """Whether a rank without data-parallel peers casts its weights itself, all of them for a whole pass. ZeRO 3
        casts block by block, which takes less memory."""
        return self.dp == 1 and not self.plain_parameters and self.config.trainer.zero < 3

    @property
    def one_micro_batch(self) -> bool:
        """Whether each step has one forward and one backward pass."""
        return self.num_microbatches == 1 and not self.config.trainer.batch_schedule

    def frees_table(self, *, is_first: bool, is_last: bool) -> bool:
        """Whether a stage frees its working copy of the embedding table once it has been read: in the step nothing
        reads it again. LoRA's is frozen, and has none by default."""
        read_again = is_last and self.model.tie_word_embeddings
        alone = self.working_copies and self.one_micro_batch and self.config.finetune.method != "lora"
        return alone and is_first and not read_again

    @property
    def narrow_gradients(self) -> bool:
        """Whether gradients keep the compute dtype until the update: those of working copies, to which nothing is
        added, on a CPU, where the optimizers upcast them in chunks (devices/cpu/updates.py). LoRA's are small."""
        on_cpu = self.config.device.name == "cpu" and "optimizer" not in self.config.trainer.offload
        plain = self.config.finetune.method != "lora" and not self.config.optim.row.sums_gradients
        return self.working_copies and self.one_micro_batch and on_cpu and plain

    @property
    def batches(self) -> BatchSchedule:
        """Which samples each step trains on."""
        return BatchSchedule.of(self.config, self.start)

    @property
    def random_ltd(self) -> TokenSchedule | None:
        """How many tokens the layers of random-LTD see in each step; None without it."""
        return TokenSchedule.of(self.config)

    def recompute(self, layer: int) -> str:
        """What the backward pass recomputes in the layer with this global number, one of RECOMPUTE."""
        trainer = self.config.trainer
        return "none" if layer % trainer.recompute_every else trainer.recompute

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a global batch of trainer.global_batch_size."""
        return self.config.trainer.global_batch_size * self.config.data.length

    @property
    def sp(self) -> bool:
        """Whether activations are split along the sequence."""
        return bool(self.config.trainer.sp)
