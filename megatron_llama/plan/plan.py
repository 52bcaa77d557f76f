"""The ``Plan``: a config with derived values on a given number of devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron_llama.arch.parameters import StageParameters, kv_copies
from megatron_llama.config.precision import BYTES, PRECISIONS, QUANTIZED_BITS, Precision
from megatron_llama.config.settings import Config, ModelConfig
from megatron_llama.corpus.splits import DatasetUsage
from megatron_llama.devices import find_device
from megatron_llama.plan.data_schedules import BatchSchedule, RunPosition, TokenSchedule
from megatron_llama.topology import Divided, Grid, Topology

PLAIN, COPIES, SHARDS = "plain", "copies", "shards"


@dataclass(frozen=True)
class Storage:
    """Parameters and gradients of one rank; model, optimizer and memory read it."""

    kind: str
    """``plain``: layers compute with the parameters (dp * cp = 1 and one dtype throughout). ``copies``: dp * cp = 1
    with copies of all weights in the compute dtype (parallel/dp1_weight_casts.py). ``shards``: ``fully_shard`` gathers
    and casts; also for one rank with ZeRO 3, which casts block by block and needs less memory."""
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

    def frees_embedding_of(self, *, is_first: bool, is_last: bool) -> bool:
        """Return whether a pipeline stage frees its copy of the embedding after the lookup."""
        return self.frees_embedding and is_first and not (is_last and self.tied)


@dataclass(frozen=True)
class Plan:
    """A valid config with all derived values, made by ``resolve`` without devices."""

    config: Config
    """Settings with derived values. Exceptions that may stay None: facts about the device, run.dir (depends on the
    time), cache_dir of mock data, and val_steps (None: the whole dataset)."""
    requested: Config = field(compare=False)
    """Settings before derivation: unset ones are None."""
    world_size: int
    """Number of devices, one process each."""
    dp: int
    """Data-parallel size, world_size / (tp * cp * pp)."""
    num_microbatches: int
    """Micro batches per data-parallel rank and step of trainer.global_batch_size."""
    stage_layers: tuple[tuple[int, ...], ...]
    """Global layer numbers of each virtual stage, pp * vpp entries; virtual stage v * pp + p is chunk v of stage p."""
    padded_vocab_size: int
    """Rows of the embedding with padding, a multiple of tp."""
    parameters: int
    """Parameters of the whole model, as published."""
    whole: StageParameters
    """Parameters of the whole model, including LoRA, without padding and copies."""
    stages: tuple[StageParameters, ...]
    """Parameters of one rank of each pipeline stage."""
    raw_data_files: tuple[tuple[str, str], ...]
    """(setting, path) of raw data files that are not prepared yet."""
    dataset_usage: tuple[DatasetUsage, ...] = ()
    """Use of each training dataset; empty for mock data and if a dataset is missing."""
    chosen: tuple[str, ...] = field(default=(), compare=False)
    """Defaults chosen by model and device, each with its reason."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    start: RunPosition = RunPosition()
    """Position at which the run resumes; set when its checkpoint is loaded."""

    @property
    def model(self) -> ModelConfig:
        """Shape of the model."""
        return self.config.model

    @property
    def grid(self) -> Grid:
        """All ranks, numbered along the parallel axes."""
        return Grid.of(self.config.trainer)

    def topology(self, rank: int) -> Topology:
        """Return the position of ``rank`` in the grid. Raises ValueError for a rank outside the world."""
        topology = Topology(self.grid, rank, self.config.trainer.vpp, self.shard_size)
        assert topology.place, "ranks have a position"
        return topology

    @property
    def data_ranks(self) -> int:
        """Ranks with the same weights: they sum their gradients, and ZeRO shards over them."""
        return self.grid.product(*self.grid.same_weights)

    @property
    def sequence_split(self) -> Divided:
        """Kind of work that divides a sequence outside the matmuls, for ``grid.share``."""
        return "activations" if self.sp else "tokens"

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation of a micro batch [s, b, h] on a rank."""
        trainer, length = self.config.trainer, self.config.data.length
        tokens = trainer.micro_batch_size * length // self.grid.divisor(self.sequence_split)
        return tokens * self.model.hidden_size * BYTES[self.precision.compute_dtype]

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        assert self.config.run.dir is not None, "the launcher sets it before a rank starts"
        return Path(self.config.run.dir)

    @property
    def replaces_checkpoints(self) -> bool:
        """Whether checkpoints before the last step are replaced by later ones: the default of every_minutes."""
        by_default = self.requested.checkpoint.every_minutes is None and self.config.checkpoint.keep is None
        return by_default and bool(self.config.checkpoint.every_minutes)

    @property
    def precision(self) -> Precision:
        """Dtypes of ``trainer.precision``."""
        return PRECISIONS[str(self.config.trainer.precision)]

    @property
    def frozen_dtype(self) -> str:
        """torch's name of the dtype of weights that are neither trained nor quantized."""
        dtype = None if self.quantized else self.config.finetune.frozen_dtype
        return {"fp32": "float32", "bf16": "bfloat16"}[dtype or self.precision.compute_format]

    @property
    def quantized(self) -> str | None:
        """Format of the blocks' frozen matrices, int8 or nf4; None if they are not quantized."""
        dtype = self.config.finetune.frozen_dtype
        return dtype if self.config.finetune.method == "lora" and dtype in QUANTIZED_BITS else None

    @property
    def shard_size(self) -> int:
        """Data-parallel ranks of a shard group, which share one copy of the sharded state; 1 with zero=0."""
        return 1 if self.config.trainer.zero == 0 else (self.config.trainer.shard_group or self.data_ranks)

    @property
    def copies(self) -> list[str]:
        """Tensors that several ranks hold in copies: a name for each different group of ranks with the same copies."""
        trainer, model = self.config.trainer, self.model
        copies_of_kv_head = kv_copies(model, trainer.tp)
        groups = {
            "data-parallel replicas": self.data_ranks > self.shard_size,
            "norms": trainer.tp > 1 and copies_of_kv_head < trainer.tp,
            "norms and kv heads": 1 < copies_of_kv_head == trainer.tp,
            "kv heads": 1 < copies_of_kv_head < trainer.tp,
            "tied embeddings": model.tie_word_embeddings and trainer.pp > 1,
        }
        return [name for name, has_copies in groups.items() if has_copies]

    @property
    def exchanges_signs(self) -> bool:
        """Whether data-parallel ranks exchange signs of momenta after ``optim.freeze_step`` (1-bit Adam)."""
        return self.config.optim.row.exchanges_signs

    @property
    def storage(self) -> Storage:
        """Storage of parameters and gradients on a rank."""
        trainer, precision, tied, kind = self.config.trainer, self.precision, self.model.tie_word_embeddings, SHARDS
        dtypes = {precision.param_dtype, precision.compute_dtype, precision.grad_accum_dtype, self.frozen_dtype}
        if self.data_ranks == 1 and len(dtypes) == 1:
            kind = PLAIN
        elif self.data_ranks == 1 and trainer.zero < 3:
            kind = COPIES
        one_micro_batch = self.num_microbatches == 1 and not trainer.batch_schedule
        alone = kind == COPIES and one_micro_batch and self.config.finetune.method != "lora"
        device = find_device(self.config.device.name)
        on_device = device is not None and device.keeps_bf16_grads and "optimizer" not in trainer.offload
        keeps_bf16_grads = alone and on_device and not self.config.optim.row.sums_gradients and not trainer.exact
        return Storage(
            kind, one_micro_batch=one_micro_batch, keeps_bf16_grads=keeps_bf16_grads, frees_embedding=alone, tied=tied
        )

    @property
    def batches(self) -> BatchSchedule:
        """Schedule of the samples of each step."""
        return BatchSchedule.of(self.config, self.start)

    @property
    def random_ltd(self) -> TokenSchedule | None:
        """Schedule of the tokens that random-LTD retains; None without random-LTD."""
        return TokenSchedule.of(self.config)

    def recompute(self, layer: int) -> str:
        """Return the recomputation policy (one of RECOMPUTE) of the layer with this global number."""
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
