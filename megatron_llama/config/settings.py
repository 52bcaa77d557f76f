"""Every setting: its name, type, default, unit and meaning.

The string under a field is its documentation; docs/reference/config.md is generated from it. ``None`` as a default
means
"derived": the field's documentation says from what, and ``resolve`` fills it in. Beside a type is the limit of its
value (``limits.py``). ``conf/`` has named sets of values to choose from.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_llama.config.limits import (
    above_zero,
    at_least,
    between,
    blend,
    blend_schedule,
    first_and_last,
    not_blank,
    one_of,
    rising_samples,
    share,
    some_of,
    three_shares,
    two_betas,
)
from megatron_llama.config.optimizers import OPTIMIZERS, OptimizerRow
from megatron_llama.config.precision import EXCHANGES, PRECISIONS

# The settings of the model: its shape, and the tokens that a token sees.

MOST_LAYERS = 10_000
"""The plan lists layers one by one; the deepest published Llama has 126."""
MOST_HEADS = 10_000
"""Advice looks through them one by one for what divides; published Llamas have up to 128."""


@dataclass
class RopeScaling:
    """Llama 3's frequency scaling of rotary embeddings (Hugging Face's ``rope_type: llama3``)."""

    rope_type: Annotated[str, one_of("llama3")] = "llama3"
    """Kind of scaling; only ``llama3`` is supported."""
    factor: Annotated[float, at_least(1)] = 8.0
    """Low frequencies are divided by this."""
    low_freq_factor: Annotated[float, above_zero()] = 1.0
    """Wavelengths above original_max_position_embeddings / this are scaled fully."""
    high_freq_factor: Annotated[float, above_zero()] = 4.0
    """Wavelengths below original_max_position_embeddings / this are left alone."""
    original_max_position_embeddings: Annotated[int, at_least(1)] = 8192
    """Sequence length before scaling, tokens."""


@dataclass
class SparseAttention:
    """The fixed pattern of blocks (Child et al. 2019, arXiv:1904.10509), under DeepSpeed's names: its mode ``fixed``,
    unidirectional, the same for all heads."""

    block: Annotated[int, at_least(1)] = 64
    """Tokens of a block. Positions count from the beginning of a document."""
    num_local_blocks: Annotated[int, at_least(1)] = 4
    """A token sees what precedes it in its group of this many blocks."""
    num_global_blocks: Annotated[int, at_least(1)] = 1
    """It also sees this many blocks at the end of each earlier group."""


@dataclass
class ModelConfig:
    """The Llama's shape, under Hugging Face's names."""

    name: str = "llama"
    """Preset's name; shown in plans and used for the default run folder."""
    vocab_size: Annotated[int, at_least(2)] = 4096
    """Tokens in the vocabulary. Rows that pad the embedding table for tensor parallelism are added, and masked in
    the loss, on top."""
    hidden_size: Annotated[int, at_least(1)] = 192
    """Width of the residual stream."""
    intermediate_size: Annotated[int, at_least(1)] = 512
    """Width of the SwiGLU feed-forward."""
    num_hidden_layers: Annotated[int, between(1, MOST_LAYERS)] = 4
    """Transformer blocks."""
    num_attention_heads: Annotated[int, between(1, MOST_HEADS)] = 4
    """Query heads."""
    num_key_value_heads: Annotated[int | None, between(1, MOST_HEADS)] = None
    """Key and value heads (grouped-query attention). Derived: num_attention_heads."""
    head_dim: Annotated[int | None, at_least(1)] = None
    """Width of a head. Derived: hidden_size / num_attention_heads."""
    max_position_embeddings: Annotated[int, at_least(1)] = 4096
    """Longest sequence that the model supports, tokens."""
    rms_norm_eps: Annotated[float, above_zero()] = 1e-5
    """Added to the mean square inside RMSNorm."""
    rope_theta: Annotated[float, above_zero()] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Frequency scaling for long contexts; null for Llama 2."""
    sliding_window: Annotated[int | None, at_least(1)] = None
    """A token sees this many tokens, itself included, as in Mistral; null for all before it."""
    sparse_attention: SparseAttention | None = None
    """A token sees local and global blocks only; null for all before it."""
    tie_word_embeddings: bool = False
    """The output head is the embedding table."""
    initializer_range: Annotated[float, above_zero()] = 0.02
    """Standard deviation of initial weights; o_proj and down_proj get it divided by sqrt(2 * num_hidden_layers)."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ModelConfig:
        """From what ``asdict`` gives. Raises TypeError for names that are none of a model's."""
        sections = {"rope_scaling": RopeScaling, "sparse_attention": SparseAttention}
        given = {name: kind(**values[name]) for name, kind in sections.items() if values.get(name)}
        return cls(**{**values, **given})


DEVICES = ("auto", "cuda", "neuron", "hpu", "cpu")  # in the order in which auto tries them
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL_LINEAR = "all-linear"
"""PEFT's name of all of them."""
SAVED_MODULES = ("embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm")
CHAT_TEMPLATES = ("own", "chatml", "prompter", "dialogue", "plain")
LABEL_TEMPLATES = ("qnli", "sst2")
RECOMPUTE = ("none", "elementwise", "selective", "full")
"""What the backward pass computes again, from nothing to all."""
OFFLOADED = ("activations", "optimizer")
ALLOWED = ("data", "batch", "optim")
MOST_REPLICAS = 1_000_000
"""Advice looks through them one by one for what divides."""
LARGEST_SEED = 2**31 - 1
"""Ranks add to the seed, and libraries take 32 bits of it."""


@dataclass
class DataConfig:
    """The training data."""

    name: str = "python_stdlib"
    """The data's name; shown in plans and used for the default run folder."""
    kind: Annotated[str, one_of("pretrain", "sft")] = "pretrain"
    """pretrain (documents are concatenated and cut into sequences) or sft (whole examples with loss masks, as
    data_prep/sft.py writes them)."""
    pack: bool = False
    """Pack several examples into a sequence, each attending only to itself; false pads each example to a sequence.
    For sft."""
    document_mask: bool = False
    """Keep attention inside documents where a sequence holds several, and restart positions with each, as Megatron's
    reset_attention_mask and reset_position_ids do. For pretraining; packed examples always are so."""
    eod_mask_loss: bool | None = None
    """Leave out the loss of a document's last token, whose label is the next document's first. Derived: document_mask.
    For pretraining."""
    mock: bool = False
    """Random tokens of the model's vocabulary instead of files."""
    prefixes: Annotated[list[Any], blend()] = field(default_factory=list)
    """Indexed datasets, each a path without .bin/.idx; or weight, path, weight, path, ... for a blend (a weight is
    a share of the samples). For sft also files and folders of records (.jsonl, .parquet, .csv, .tsv, ...) and names of
    datasets on the Hugging Face hub, prepared at the start."""
    schedule: Annotated[list[Any], blend_schedule()] = field(default_factory=list)
    """Other blends from a number of samples on: [{samples: 100000, prefixes: [0.3, one, 0.7, two]}, ...], samples
    ascending. Every dataset goes on where it stood. Validation stays on the first blend. For pretraining."""
    curriculum: list[Any] = field(default_factory=list)
    """From easy to difficult: [{metric: seqlen_truncate, min_difficulty: 64, max_difficulty: 256, ...}, ...], the keys
    of each entry below, under data.curriculum. Several metrics hold at once. Validation has no curriculum."""
    validation_prefixes: list[str] = field(default_factory=list)
    """Datasets to validate on; then all of ``prefixes`` is for training, and ``split`` is not used. For sft."""
    chat_template: Annotated[str, one_of(*CHAT_TEMPLATES)] = "own"
    """For files of records: how conversations become text, own (the tokenizer's), chatml, prompter, dialogue or
    plain; see docs/guides/data/sft_data.md."""
    template: Annotated[str | None, one_of(*LABEL_TEMPLATES)] = None
    """For .tsv, .csv and .parquet files of labels: the prompt that a line is put into, qnli or sst2."""
    split: Annotated[str, three_shares()] = "969,30,1"
    """Shares of documents for training, validation, test, as Megatron writes them."""
    seq_length: Annotated[int | None, at_least(1)] = None
    """Tokens in a training sequence. Derived: on an accelerator model.max_position_embeddings, at most 8,192; on a CPU
    at most 256."""
    tokenizer: str | None = None
    """sentencepiece model, or Hugging Face folder, that made the dataset; checked against it, and used to print
    samples (a sentencepiece model). For files of records, what prepares them; init_from where it is null."""
    cache_dir: str | None = None
    """Folder for Megatron's shuffle and sample indices, and for prepared files of records. Derived: beside the
    first dataset, mock has none; for records ~/.cache/megatron_llama/data."""
    prepare: str | None = None
    """The command that makes this dataset; shown when the dataset is missing."""

    @property
    def length(self) -> int:
        """``seq_length`` of a config that plan/choices.py has seen, as in every plan."""
        assert self.seq_length is not None, "choose_defaults fills it in"
        return self.seq_length


@dataclass
class RandomLTD:
    """Random layer-wise token dropping (Yao et al. 2022, arXiv:2211.11586), under DeepSpeed's names: in training, the
    layers between the first and the last see a random part of each sequence, which grows.
    docs/guides/methods/random_ltd.md"""

    min_value: Annotated[int, at_least(1)] = 128
    """Tokens of a sequence that these layers see in the first step; a multiple of seq_per_step."""
    max_value: Annotated[int | None, at_least(1)] = None
    """Tokens after require_steps. Derived: data.seq_length, where no token is dropped any more."""
    require_steps: Annotated[int | None, at_least(1)] = None
    """Steps in which the length grows from min_value to max_value. Derived: two thirds of the steps."""
    seq_per_step: Annotated[int, at_least(1)] = 16
    """It grows by multiples of this many tokens. With trainer.compile each length is a graph of its own."""
    layers: list[int] | None = None
    """Numbers of these layers, counted from 0. Derived: all but the first and the last."""


@dataclass
class TrainerConfig:
    """Layout over devices, batch, length and numerics of the run."""

    tp: Annotated[int, at_least(1)] = 1
    """Tensor-parallel size: devices that share each matrix."""
    pp: Annotated[int, at_least(1)] = 1
    """Pipeline-parallel size: stages of layers."""
    vpp: Annotated[int, at_least(1)] = 1
    """Virtual stages per device (interleaved schedule); 1 is plain 1F1B."""
    pipeline_layers: list[int] | None = None
    """Layers of each stage, pp numbers. Derived: spread evenly, the first stages taking what is left over; where the
    output head is much work, vpp is 1 and there are several micro batches, the last has fewer."""
    sp: bool | None = None
    """Sequence parallelism: activations between the matrices are split over tp along the sequence. Derived: tp > 1."""
    zero: Annotated[int, one_of(0, 1, 2, 3)] = 1
    """Data-parallel sharding: 0 nothing, 1 optimizer, 2 and gradients, 3 and parameters."""
    dp: Annotated[int | None, between(1, MOST_REPLICAS)] = None
    """Data-parallel size. Derived: world / (tp * pp); if given it is checked, and sets the world on CPU and in dry
    runs."""
    shard_group: Annotated[int | None, at_least(1)] = None
    """Shard inside groups of this many data-parallel ranks and replicate across groups. Derived: dp."""
    grad_reduce: Annotated[str | None, one_of(*EXCHANGES, note="; null is the precision's own sum")] = None
    """How data-parallel ranks exchange gradients. null: summed in the dtype in which trainer.precision accumulates
    them; bf16: sent in bf16, added in fp32; int8: sent in int8 by blocks (ZeRO++'s qgZ), added in fp32.
    docs/guides/methods/less_communication.md"""
    reduce_group: Annotated[int | None, at_least(2)] = None
    """For grad_reduce: neighbouring data-parallel ranks, those of one node, that add up gradients among themselves
    before they exchange the sums with others (qgZ's two hops). A part of shard_group."""
    param_gather: Annotated[str | None, one_of("int8", note="; null is the precision's compute dtype")] = None
    """How sharded weights are gathered. null: in trainer.precision's compute dtype; int8: by blocks (ZeRO++'s qwZ), so
    that the layers compute with rounded weights, while updates go to exact ones. For zero 1 to 3."""
    secondary_group: Annotated[int | None, at_least(2)] = None
    """For zero=3: neighbouring data-parallel ranks, those of one node, that keep a second copy of the weights from the
    forward to the backward pass, which gathers inside the group (ZeRO++'s hpZ). A part of shard_group."""
    micro_batch_size: Annotated[int, at_least(1)] = 1
    """Sequences in one forward pass of a data-parallel rank."""
    global_batch_size: Annotated[int, at_least(1)] = 8
    """Sequences per optimizer step, over all devices."""
    batch_schedule: Annotated[list[Any], rising_samples()] = field(default_factory=list)
    """Later sizes of the global batch, [[consumed samples, sequences], ...]: a step that begins at so many samples or
    more takes so many sequences. Until then it is global_batch_size, which validation always takes."""
    random_ltd: RandomLTD | None = None
    """Random layer-wise token dropping; null: every layer sees every token."""
    steps: Annotated[int, at_least(0)] = 100
    """Optimizer steps of the whole run; 0 initialises (or loads), saves and ends."""
    epochs: Annotated[int | None, at_least(1)] = None
    """Instead of steps: passes over the training data; steps are epochs * samples // global_batch_size."""
    seed: Annotated[int, between(0, LARGEST_SEED)] = 1234
    """Seeds initial weights and data order."""
    precision: Annotated[str | None, one_of(*PRECISIONS, note="; there is no fp8 yet")] = None
    """fp32, bf16 (computes in bf16; master weights, gradient accumulation and optimizer states in fp32), bf16_sr
    (all in bf16, updates rounded stochastically), bf16_pure (the same, rounded to nearest: the control), or one of
    the Trainium recipe's bf16SR, fp32_OptStates, fp32_ZeroOptMaster, fp32_ZeroOptMasterGradAcc, megatron_amp_O2;
    see docs/guides/training/precision.md. Derived: bf16 on an accelerator that multiplies it fast, else fp32."""
    recompute: Annotated[str, one_of(*RECOMPUTE)] = "none"
    """What the backward pass makes again instead of keeping it: none, elementwise (norms, rotations and SwiGLU, all but
    products and attention: half the memory, little time), selective (that and attention, for devices whose kernels keep
    its scores), full (each block, all but its input)."""
    offload: Annotated[list[str], some_of(OFFLOADED)] = field(default_factory=list)
    """What waits in the host's memory while the device does not need it: activations (what blocks keep for the backward
    pass) and optimizer (its states, and its step: gradients go to the host, weights come back)."""
    recompute_every: Annotated[int, at_least(1)] = 1
    """Recompute in every n-th block only, the first included: less to compute again, more to keep."""
    compile: bool | None = None
    """torch.compile each block; on CPU this needs a C++ compiler. Derived: on an accelerator true for 1,000 steps or
    more, on a CPU false."""
    compile_strict: bool = False
    """Make a graph break, and a graph compiled after the first two batches, an error."""
    compile_cache: str | None = None
    """Folder of compiled graphs, on a file system that all machines of the job share. Derived:
    ~/.cache/megatron_llama/compile."""
    async_tp: bool = False
    """Let sequence parallelism's gathers and scatters run piece by piece beside the matrix products that they belong
    to, in compiled blocks (torch's asynchronous tensor parallelism). For tp > 1 on GPUs that reach each other's memory;
    docs/guides/methods/async_tp.md"""
    deterministic: bool = False
    """Use deterministic algorithms only (torch.use_deterministic_algorithms); an operation without one is an error."""
    skip_nonfinite_steps: Annotated[int, at_least(0)] = 0
    """Steps with a non-finite (NaN or Inf) loss or gradient that are skipped; one more stops the run."""
    hang_timeout_seconds: Annotated[float | None, above_zero()] = 1800.0
    """Seconds without progress in a step or a batch of validation after which the job fails: every rank's phase and
    stacks are printed, and who is to blame. Starting, loading, compiling, saving and ending may take eight times as
    long; null waits for ever."""
    profile: Annotated[list[int] | None, first_and_last()] = None
    """[first, last]: profile these steps, to <run.dir>/profile: a tree of modules with times and FLOP/s, what each rank
    waited for, and of the last step a trace and its memory. docs/guides/tools/profiling.md"""
    max_restarts: Annotated[int, at_least(0)] = 0
    """Times that a failed run is started again on this machine, from its newest checkpoint."""
    val_every_steps: Annotated[int | None, at_least(1)] = None
    """Steps between validations; null means never."""
    val_steps: Annotated[int | None, at_least(1)] = None
    """Global batches per validation. Derived: 4; for data.kind=sft null means the whole set, each example once."""


@dataclass
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: Annotated[str, one_of(*OPTIMIZERS)] = "adamw"
    """adamw, adam or sgd, from torch.optim, or onebit_adam, which after freeze_step exchanges signs of momenta instead
    of gradients; for trainer.zero=0."""
    freeze_step: Annotated[int | None, at_least(1)] = None
    """For onebit_adam: steps of plain Adam, without bias correction, before the exchange of signs. Derived: 15 % of
    the steps."""
    state_bits: Annotated[int | None, one_of(8)] = None
    """8 keeps what the optimizer remembers of matrices in 8 bits, with an fp32 scale for 32 values of a row (Dettmers
    et al. 2022, arXiv:2110.02861); null keeps it in 16 or 32, as trainer.precision says."""
    lr: Annotated[float, above_zero()] = 3e-4
    """Highest learning rate."""
    min_lr: Annotated[float | None, at_least(0)] = None
    """Lowest learning rate after the decay. Derived: lr / 10."""
    warmup_steps: Annotated[int | None, at_least(0)] = None
    """Steps of linear warm-up. Derived: a tenth of the steps, at most 2000."""
    warmup_ratio: Annotated[float | None, between(0, 1, "0.03")] = None
    """Instead of warmup_steps: the share of the run's steps that is warm-up, rounded up as transformers does."""
    constant_steps: Annotated[int | None, at_least(0)] = None
    """Steps at min_lr at the end of the run (NeMo's constant_steps); for wsd, steps of the final decay. Derived: 0;
    for wsd a tenth of the steps."""
    betas: Annotated[list[float], two_betas()] = field(default_factory=lambda: [0.9, 0.95])
    """Adam's averaging factors for gradient and squared gradient."""
    eps: Annotated[float, above_zero()] = 1e-8
    """Added to the denominator of Adam's update."""
    weight_decay: Annotated[float, at_least(0)] = 0.1
    """Decoupled weight decay; norms are exempt."""
    clip: Annotated[float | None, above_zero()] = 1.0
    """Largest global gradient norm; larger gradients are scaled down. null: no clipping."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """What Hydra instantiates as the schedule: _target_ and its arguments, beside the optimizer. Derived: a cosine."""

    @property
    def row(self) -> OptimizerRow:
        """The properties of the optimizer."""
        return OPTIMIZERS[self.name]


@dataclass
class FinetuneConfig:
    """Which weights are trained. Names and meanings are those of PEFT."""

    method: Annotated[str, one_of("none", "full", "lora")] = "none"
    """none and full train every weight, full from the weights in init_from; lora trains low-rank adapters of frozen
    matrices."""
    lora_rank: Annotated[int, at_least(1)] = 8
    """Rank of the adapters (PEFT's r)."""
    lora_alpha: Annotated[float, above_zero()] = 16.0
    """The adapters' output is multiplied by lora_alpha / lora_rank."""
    lora_dropout: Annotated[float, share()] = 0.0
    """Dropout on the adapters' inputs; its masks depend on the layout."""
    lora_target_modules: Annotated[list[str], some_of(LORA_TARGETS, least=1)] = field(
        default_factory=lambda: list(LORA_TARGETS[:4])
    )
    """The matrices with adapters, of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; all-linear
    names all seven."""
    modules_to_save: Annotated[list[str], some_of(SAVED_MODULES)] = field(default_factory=list)
    """Modules that LoRA trains in full besides: embed_tokens, lm_head, norm (as in PEFT all norms, by the ending),
    input_layernorm, post_attention_layernorm."""
    frozen_dtype: Annotated[str | None, one_of("fp32", "bf16", "int8", "nf4", example="bf16")] = None
    """Storage of LoRA's frozen weights: fp32, bf16, or the blocks' matrices in int8 or nf4 and the rest in the
    precision's compute dtype, which is also the default. Matrix products run in the compute dtype in any case."""
    adapter: str | None = None
    """Folder of a PEFT adapter (adapter_config.json, adapter_model.safetensors) to continue from; rank, alpha and
    modules are then the adapter's."""


@dataclass
class DeviceConfig:
    """The kind of device, its speed and its memory."""

    name: Annotated[str, one_of(*DEVICES)] = "auto"
    """auto takes the best device of this machine; cpu always works."""
    peak_tflops: Annotated[float | None, above_zero()] = None
    """Dense TFLOP/s of one device at the run's precision, for MFU. Derived: by model name; measured on CPU."""
    memory_gib: Annotated[float | None, above_zero()] = None
    """Memory of one device, GiB; a layout that can't fit is refused. Derived: read from the device."""


@dataclass
class LoggingConfig:
    """Output while training."""

    every_steps: Annotated[int, at_least(1)] = 1
    """Steps between lines on the console (metrics.jsonl and TensorBoard get every step)."""
    tensorboard: bool = True
    """Write TensorBoard events to <run.dir>/tensorboard."""
    csv: bool = False
    """Write <run.dir>/metrics.csv too, a row for each step."""
    wandb: Annotated[str, one_of("off", "offline", "online")] = "off"
    """Log to Weights & Biases: offline, to <run.dir>/wandb, which `wandb sync` uploads later, or online with an
    account. Needs the extra wandb."""
    wandb_project: Annotated[str, not_blank("must be the name of a project", "megatron_llama")] = "megatron_llama"
    """The project there."""
    parameter_norm: bool = False
    """Also log parameter_norm, the global 2-norm of all weights (one more pass over them)."""
    sample_prompts: list[str] = field(default_factory=list)
    """Prompts whose continuations are printed at the end of the run; needs data.tokenizer."""
    sample_tokens: Annotated[int, at_least(1)] = 48
    """Tokens generated for each prompt."""


@dataclass
class CheckpointConfig:
    """Checkpoints: when they are saved, which are kept, and where a run resumes."""

    every_steps: Annotated[int | None, at_least(1)] = None
    """Steps between checkpoints; null means only at the end."""
    keep: Annotated[int | None, at_least(1)] = None
    """Number of newest checkpoints that are kept; null keeps all."""
    keep_every: Annotated[int | None, at_least(1)] = None
    """Checkpoints at multiples of this many steps are kept for good, regardless of ``keep``."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss, which checkpoints/best names. Only checkpoints of
    steps that trainer.val_every_steps validates take part."""
    resume: Annotated[str, not_blank("must be auto, never or the path of a checkpoint", "auto")] = "auto"
    """auto continues from the newest complete checkpoint in run.dir, never starts from step 0, a path loads that
    checkpoint."""
    allow: Annotated[list[str], some_of(ALLOWED)] = field(default_factory=list)
    """In what a run may differ from the checkpoint that it goes on from: data (datasets, blend, split, sequence length,
    seed), batch (sizes of the global batch), optim (learning rate, schedule, weight decay, clipping).
    docs/guides/training/resume.md
    has every setting."""
    save_last: bool = True
    """Save the last step."""
    export_hf: bool = False
    """At the end of the run, export its last checkpoint, with keep_best the best one, as a Hugging Face folder to
    <run.dir>/hf."""
    asynchronous: bool = True
    """Write in the background; training waits only for a copy to host memory, as large as weights and optimizer
    states."""


@dataclass
class LaunchConfig:
    """Machines to start ranks on by ssh; not needed under torchrun and srun."""

    hosts: list[Any] = field(default_factory=list)
    """Machines, each name, user@name or name:ranks; the first one has rank 0. Without numbers, each machine starts
    one rank per device, on a CPU an equal share of tp * pp * dp."""
    hostfile: str | None = None
    """Instead of hosts: a file with a line "name slots=N" for each machine."""
    ssh: str = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=3 -o ServerAliveCountMax=2"
    """Command that takes a host's name and a command line to run there."""


@dataclass
class RunConfig:
    """The folder of a run."""

    dir: str | None = None
    """Folder of the run. Derived: runs/<model>-<data>-<time>."""


@dataclass
class Config:
    """All settings of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    init_from: str | None = None
    """Hugging Face folder whose weights the run starts from, or the hub's name of a model in the local cache."""
    allow_targets: list[str] = field(default_factory=list)
    """Classes that optim.schedule may name as a _target_ besides the schedules of torch, NeMo and this project. On the
    command line only, never in a file: a recipe must not run programs."""
    dry_run: bool = False
    """Print the plan and start nothing (same as --dry-run)."""
