"""What a config means on a given number of devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron_llama.arch.shapes import StageParameters
from megatron_llama.config.precision import PRECISIONS, QUANTIZED_BITS, Precision
from megatron_llama.config.settings import Config, ModelConfig
from megatron_llama.corpus.epochs import DatasetUsage
from megatron_llama.plan.schedules import BatchSchedule, RunPosition, TokenSchedule
from megatron_llama.plan.storage import Storage
from megatron_llama.topology import Divided, Grid, Topology


@dataclass(frozen=True)
class Plan:
    """A config that works, with every derived value filled in. Made by ``resolve``; needs no device."""

    config: Config
    """The settings. Derived ones are no longer None, except facts about the device, run.dir, which depends on the time,
    the cache_dir of made-up data, and val_steps, where None means the whole set."""
    requested: Config = field(compare=False)
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
    raw_data_files: tuple[tuple[str, str], ...]
    """(setting, path) of the files of records that are still to be prepared."""
    dataset_usage: tuple[DatasetUsage, ...] = ()
    """What the run reads of each training dataset; empty for made-up data, and where a dataset is not there."""
    chosen: tuple[str, ...] = field(default=(), compare=False)
    """Defaults that were chosen by model and device, each with the reason."""
    notes: tuple[str, ...] = ()
    """What a user should know about the plan."""
    start: RunPosition = RunPosition()
    """Where the run goes on; known when its checkpoint is loaded."""

    @property
    def model(self) -> ModelConfig:
        """The model's shape."""
        return self.config.model

    @property
    def grid(self) -> Grid:
        """All ranks, numbered along the parallel axes."""
        return Grid.of(self.config.trainer)

    def topology(self, rank: int) -> Topology:
        """The place of ``rank`` in the grid. Raises ValueError for a rank outside the world."""
        topology = Topology(self.grid, rank, self.config.trainer.vpp, self.shard_size)
        assert topology.place, "ranks have a position"
        return topology

    @property
    def data_ranks(self) -> int:
        """Ranks with the same weights: they sum their gradients, and ZeRO shards over them."""
        return self.grid.product(*self.grid.same_weights)

    @property
    def stream(self) -> Divided:
        """The kind of division of a sequence between the matrices, for ``grid.share``."""
        return "activations" if self.sp else "tokens"

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
        return 1 if self.config.trainer.zero == 0 else (self.config.trainer.shard_group or self.data_ranks)

    @property
    def exchanges_signs(self) -> bool:
        """Whether data-parallel ranks exchange signs of momenta after ``optim.freeze_step`` (1-bit Adam)."""
        return self.config.optim.row.exchanges_signs

    @property
    def storage(self) -> Storage:
        """How a rank stores parameters and gradients."""
        return Storage.of(
            self.config,
            self.data_ranks,
            self.num_microbatches,
            frozen_dtype=self.frozen_dtype,
            sums_gradients=self.config.optim.row.sums_gradients,
        )

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
