"""All settings: name, type, default, unit and meaning.

The string under a field is its documentation; docs/reference/config.md is generated from it. A default of ``None``
means "derived": the documentation states the rule, and ``resolve`` sets the value. Annotations hold the limit of a
value, and the reaction of a resumed run to a change (``limits.py``). ``conf/`` has named sets of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_llama.config.limits import (
    ALLOWED,
    BATCH,
    BLEND,
    BLEND_SCHEDULE,
    DATA,
    FIRST_AND_LAST,
    FIXED,
    LOGGED,
    OPTIM,
    POSITIVE_NUMBERS,
    PROM_FILE,
    RISING_SAMPLES,
    SHARE,
    THREE_SHARES,
    VALIDATION_SETS,
    above_zero,
    at_least,
    between,
    module_endings,
    not_blank,
    numbers_of,
    one_of,
    patterns,
    plain_url,
    some_of,
)
from megatron_llama.config.optimizers import OptimConfig
from megatron_llama.config.precision import EXCHANGES, PRECISIONS

# The model: shape and attention pattern.

MOST_LAYERS = 10_000
"""The plan lists each layer; the deepest published Llama has 126."""
MOST_HEADS = 10_000
"""Upper bound of the divisor search; published Llamas have up to 128 heads."""
MOST_ROWS = 10**9
MOST_WIDTH = 10**7
MOST_HEAD_DIM = 10**6
"""torch counts the bytes of a tensor in 63 bits. Within these limits no weight exceeds them."""


ROPE_TYPES = ("llama3", "linear", "dynamic", "yarn", "longrope")


@dataclass
class RopeScaling:
    """Frequency scaling of rotary embeddings, under the names of Hugging Face's ``rope_parameters``."""

    rope_type: Annotated[str, one_of(*ROPE_TYPES), FIXED] = "llama3"
    """Kind of scaling."""
    factor: Annotated[float, at_least(1), FIXED] = 8.0
    """Context after the scaling divided by the context before it. Low frequencies are divided by this."""
    low_freq_factor: Annotated[float, above_zero(), FIXED] = 1.0
    """llama3: wavelengths above original_max_position_embeddings / this are scaled fully."""
    high_freq_factor: Annotated[float, above_zero(), FIXED] = 4.0
    """llama3: wavelengths below original_max_position_embeddings / this are not scaled."""
    original_max_position_embeddings: Annotated[int | None, at_least(1), FIXED] = None
    """llama3, yarn, longrope: context before the scaling, tokens. Derived: 8192 with llama3; otherwise
    model.max_position_embeddings, which is then multiplied by factor."""
    attention_factor: Annotated[float | None, above_zero(), FIXED] = None
    """yarn, longrope: factor of cosines and sines. Derived: from factor, as the papers suggest."""
    beta_fast: Annotated[float | None, above_zero("32"), FIXED] = None
    """yarn: dimensions with more rotations than this over the original context are not scaled. Derived: 32."""
    beta_slow: Annotated[float | None, at_least(0), FIXED] = None
    """yarn: dimensions with fewer rotations than this are scaled fully. Derived: 1."""
    mscale: Annotated[float | None, at_least(0), FIXED] = None
    """yarn: with mscale_all_dim, factor of log(factor) in the numerator of attention_factor."""
    mscale_all_dim: Annotated[float | None, at_least(0), FIXED] = None
    """yarn: with mscale, factor of log(factor) in the denominator of attention_factor."""
    truncate: Annotated[bool | None, FIXED] = None
    """yarn: whether the bounds of the scaled dimensions are rounded to whole dimensions. Derived: true."""
    short_factor: Annotated[list[float] | None, POSITIVE_NUMBERS, FIXED] = None
    """longrope: divisor of each frequency in sequences within the original context, head_dim / 2 numbers."""
    long_factor: Annotated[list[float] | None, POSITIVE_NUMBERS, FIXED] = None
    """longrope: divisor of each frequency in longer sequences, head_dim / 2 numbers."""


@dataclass
class SparseAttention:
    """Fixed block-sparse attention (Child et al. 2019, arXiv:1904.10509) under DeepSpeed's names: mode ``fixed``,
    unidirectional, the same pattern for all heads."""

    block: Annotated[int, at_least(1), FIXED] = 64
    """Tokens per block. Positions count from the beginning of a document."""
    num_local_blocks: Annotated[int, at_least(1), FIXED] = 4
    """Blocks per group; a token attends to earlier tokens of its group."""
    num_global_blocks: Annotated[int, at_least(1), FIXED] = 1
    """Blocks at the end of each earlier group that a token also attends to."""


MODEL_TYPES = ("llama", "qwen2", "qwen3", "olmo2")


@dataclass
class ModelConfig:
    """Shape of the model, under Hugging Face's names."""

    name: str = "llama"
    """Name of the preset; shown in plans and used in the default run folder."""
    model_type: Annotated[str, one_of(*MODEL_TYPES), FIXED] = "llama"
    """Hugging Face's name of the architecture. With qwen2, q, k and v have biases. With qwen3, each head of q and k has
    an RMSNorm. With olmo2, q and k have one RMSNorm over all heads, and a block's norms follow attention and
    feed-forward. A Mistral is a llama with sliding_window."""
    vocab_size: Annotated[int, between(2, MOST_ROWS), FIXED] = 4096
    """Tokens in the vocabulary. The embedding is padded to a multiple of tp; the loss masks the padding."""
    hidden_size: Annotated[int, between(1, MOST_WIDTH), FIXED] = 192
    """Width of the residual stream."""
    intermediate_size: Annotated[int, between(1, MOST_ROWS), FIXED] = 512
    """Width of the SwiGLU feed-forward."""
    num_hidden_layers: Annotated[int, between(1, MOST_LAYERS), FIXED] = 4
    """Transformer blocks."""
    num_attention_heads: Annotated[int, between(1, MOST_HEADS), FIXED] = 4
    """Query heads."""
    num_key_value_heads: Annotated[int | None, between(1, MOST_HEADS), FIXED] = None
    """Key and value heads (grouped-query attention). Derived: num_attention_heads."""
    head_dim: Annotated[int | None, between(1, MOST_HEAD_DIM), FIXED] = None
    """Width of a head. Derived: hidden_size / num_attention_heads."""
    max_position_embeddings: Annotated[int, at_least(1), LOGGED] = 4096
    """Longest sequence that the model supports, tokens."""
    rms_norm_eps: Annotated[float, above_zero(), FIXED] = 1e-5
    """Added to the mean square inside RMSNorm."""
    rope_theta: Annotated[float, above_zero(), FIXED] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Frequency scaling for long contexts; null for Llama 2."""
    sliding_window: Annotated[int | None, at_least(1), FIXED] = None
    """Tokens that a token attends to, itself included, as in Mistral; null: all earlier tokens."""
    sparse_attention: SparseAttention | None = None
    """Block-sparse attention to local and global blocks; null: all earlier tokens."""
    attention_bias: Annotated[bool, FIXED] = False
    """Whether q_proj, k_proj, v_proj and o_proj have biases. model_type llama, qwen3 and olmo2 only."""
    mlp_bias: Annotated[bool, FIXED] = False
    """Whether gate_proj, up_proj and down_proj have biases. model_type llama only."""
    tie_word_embeddings: Annotated[bool, FIXED] = False
    """Whether the output head shares the embedding's weight."""
    initializer_range: Annotated[float, above_zero()] = 0.02
    """Standard deviation of initial weights; for o_proj and down_proj divided by sqrt(2 * num_hidden_layers)."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Build a ModelConfig from the result of ``asdict``. Raises TypeError for unknown names."""
        sections = {"rope_scaling": RopeScaling, "sparse_attention": SparseAttention}
        given = {name: kind(**values[name]) for name, kind in sections.items() if values.get(name)}
        return cls(**{**values, **given})


DEVICES = ("auto", "cuda", "neuron", "hpu", "cpu")  # auto tries them in this order
DEVICE_ALIASES = {
    **dict.fromkeys(("gpu", "nvidia", "nccl", "a100", "h100", "h200", "b200", "gb"), "cuda"),
    **dict.fromkeys(("gaudi", "habana", "hccl", "hl"), "hpu"),
    **dict.fromkeys(("trainium", "trn", "inferentia", "inf", "neuroncore", "neuronx"), "neuron"),
    **dict.fromkeys(("host", "x86", "gloo", "none"), "cpu"),
    **dict.fromkeys(("tpu", "xla", "mps", "xpu", "rocm", "amd", "hip"), "auto"),
}
"""Other names of devices, in lower case without a number at the end, and the device to suggest."""
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL_LINEAR = "all-linear"
"""PEFT's name for all linear modules."""
SAVED_MODULES = (
    *("embed_tokens", "lm_head", "norm"),
    *("input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"),
)
CHAT_TEMPLATES = ("own", "chatml", "prompter", "dialogue", "plain")
LABEL_TEMPLATES = ("qnli", "sst2")
CHAT_FORMATS = ("messages", "sharegpt", "prompt_completion", "preference", "alpaca", "gsm8k")
RENDERED = "text"
"""Format of rendered chats."""
RECOMPUTE = ("none", "elementwise", "selective", "full")
"""Policies of activation recomputation, from none to all of a block."""
CP_COMMS = ("all_gather", "ulysses")
OFFLOADED = ("activations", "optimizer")
MOST_REPLICAS = 1_000_000
"""Upper bound of the divisor search."""
LARGEST_SEED = 2**31 - 1
"""Ranks add an offset to the seed, and libraries use 32 bits of it."""


@dataclass
class DataConfig:
    """Training data."""

    name: str = "python_stdlib"
    """Name of the data; shown in plans and used in the default run folder."""
    kind: Annotated[str, one_of("pretrain", "sft"), DATA] = "pretrain"
    """pretrain: documents are concatenated and cut into sequences. sft: whole examples with loss masks, as written by
    data_prep/sft.py."""
    pack: Annotated[bool, DATA] = False
    """Pack several examples into a sequence, without attention between them; false pads each example to a sequence.
    For sft."""
    document_mask: Annotated[bool, LOGGED] = False
    """Restrict attention to a token's document and restart positions at each document, as Megatron's
    reset_attention_mask and reset_position_ids. For pretraining; packed examples always have such a mask."""
    eod_mask_loss: Annotated[bool | None, LOGGED] = None
    """Mask the loss of a document's last token, whose label is the next document's first token. Derived: document_mask.
    For pretraining."""
    mock: Annotated[bool, DATA] = False
    """Random tokens of the model's vocabulary instead of files."""
    prefixes: Annotated[list[Any], BLEND, DATA] = field(default_factory=list)
    """Indexed datasets: paths or URLs without .bin/.idx, or weight, path, weight, path, ... for a blend, with weights
    as shares of the samples. Without weights also patterns, e.g. corpora/*_text_document. For sft also raw data files
    and folders (.jsonl, .parquet, .csv, .tsv, ...) and datasets of the Hugging Face hub, which the run prepares at its
    start."""
    schedule: Annotated[list[Any], BLEND_SCHEDULE, DATA] = field(default_factory=list)
    """Later blends: [{samples: 100000, prefixes: [0.3, one, 0.7, two]}, ...], each from that consumed sample on, with
    ascending samples. Each dataset continues at its position. Validation uses the first blend. For pretraining."""
    curriculum: Annotated[list[Any], DATA] = field(default_factory=list)
    """Curriculum: [{metric: seqlen_truncate, min_difficulty: 64, max_difficulty: 256, ...}, ...]. The keys of an entry
    are listed below, under data.curriculum. All metrics apply together. Validation has no curriculum."""
    validation_prefixes: Annotated[list[Any], VALIDATION_SETS, DATA] = field(default_factory=list)
    """Validation datasets; all of ``prefixes`` is then for training, and ``split`` is ignored. Paths, or named sets, as
    {wiki: PATH, code: [PATH, PATH]}, in a file as a list of such entries: val_loss/wiki is the loss of a set, val_loss
    the mean of all. For pretraining each sequence of a set counts once, up to trainer.val_steps batches. Derived for
    sft: PREFIX_validation_sft if all of ``prefixes`` are PREFIX_train_sft, as written by data_prep/sft.py --split."""
    chat_template: Annotated[str, one_of(*CHAT_TEMPLATES, suffix=".jinja"), DATA] = "own"
    """Chat template for raw data files: own (the tokenizer's), FILE.jinja, chatml, prompter, dialogue or plain; see
    docs/guides/data/sft_data.md."""
    chat_template_kwargs: Annotated[dict[str, Any], DATA] = field(default_factory=dict)
    """Variables of a Jinja chat template for raw data files, e.g. {enable_thinking: false}. A record's own
    chat_template_kwargs have priority."""
    any_template: bool = False
    """Train on datasets whose chat template is not the one that exported folders get."""
    format: Annotated[str, one_of("auto", *CHAT_FORMATS, RENDERED), DATA] = "auto"
    """Record format of raw data files; auto: by their keys, except text (rendered chats)."""
    response_marker: Annotated[str | None, not_blank("must be text that begins an answer", "assistant"), DATA] = None
    """For data.format=text: loss only after the last occurrence."""
    template: Annotated[str | None, one_of(*LABEL_TEMPLATES), DATA] = None
    """Prompt template for .tsv, .csv, .parquet and .jsonl files with labels: qnli or sst2."""
    split: Annotated[str, THREE_SHARES, DATA] = "969,30,1"
    """Shares of documents for training, validation and test, in Megatron's format."""
    seq_length: Annotated[int | None, at_least(1), DATA] = None
    """Tokens in a training sequence. Derived: model.max_position_embeddings, at most 8,192 on an accelerator and 256 on
    a CPU."""
    tokenizer: str | None = None
    """sentencepiece model or Hugging Face folder of the dataset's tokenizer; null: init_from. It is checked against the
    dataset, prints samples (sentencepiece), and prepares raw data files."""
    add_tokens: Annotated[list[str], FIXED] = field(default_factory=list)
    """Tokens to add to the tokenizer, a tokenizer.json. Their rows of embedding and output head start as the mean of
    the rows in init_from. docs/guides/data/finetuning.md"""
    add_special_tokens: Annotated[list[str], FIXED] = field(default_factory=list)
    """Special tokens to add after add_tokens: only a chat template writes them, and decoded text omits them."""
    cache_dir: str | None = None
    """Folder for shuffle and sample indices and for prepared raw data files. Derived: index_cache in the first
    dataset's folder; for raw data ~/.cache/megatron_llama/data, for object stores index_cache there."""
    cache_gib: Annotated[float, at_least(0)] = 100.0
    """Disk space in GiB for parts of datasets in object stores, for all runs of a host. The parts that were not used
    for the longest time are removed. docs/guides/data/object_stores.md"""
    prepare: str | None = None
    """Command that makes the dataset; shown if the dataset is missing."""

    @property
    def length(self) -> int:
        """``seq_length``, which ``choose_defaults`` sets in every plan."""
        assert self.seq_length is not None, "choose_defaults fills it in"
        return self.seq_length


@dataclass
class RandomLTD:
    """Random layer-wise token dropping (Yao et al. 2022, arXiv:2211.11586) under DeepSpeed's names: in training, middle
    layers process a random subset of each sequence, which grows. docs/guides/methods/random_ltd.md"""

    min_value: Annotated[int, at_least(1), LOGGED] = 128
    """Tokens of a sequence that these layers process in the first step; a multiple of seq_per_step."""
    max_value: Annotated[int | None, at_least(1), LOGGED] = None
    """Tokens after require_steps. Derived: data.seq_length, which drops no token."""
    require_steps: Annotated[int | None, at_least(1), LOGGED] = None
    """Steps in which the length grows from min_value to max_value. Derived: two thirds of the steps."""
    seq_per_step: Annotated[int, at_least(1), LOGGED] = 16
    """The length grows by multiples of this many tokens. trainer.compile compiles a graph for each length."""
    layers: Annotated[list[int] | None, LOGGED] = None
    """Numbers of the layers that drop tokens, from 0. Derived: all except the first and the last."""


@dataclass
class TrainerConfig:
    """Layout over devices, batch, length and numerics of the run."""

    tp: Annotated[int, at_least(1)] = 1
    """Tensor-parallel size: devices that share each matrix."""
    pp: Annotated[int, at_least(1)] = 1
    """Pipeline-parallel size: number of stages."""
    cp: Annotated[int, at_least(1)] = 1
    """Context-parallel size: ranks that divide the tokens of each sequence. Only attention communicates over them; ZeRO
    shards over cp * dp ranks. docs/guides/training/context_parallelism.md"""
    cp_comm: Annotated[str, one_of(*CP_COMMS)] = "all_gather"
    """Communication of attention over cp: all_gather collects the keys and values of the sequence; ulysses exchanges
    heads for tokens."""
    vpp: Annotated[int, at_least(1)] = 1
    """Virtual stages per device (interleaved schedule); 1 is plain 1F1B."""
    pipeline_layers: list[int] | None = None
    """Layers of each stage, pp numbers. Derived: even, the first stages taking the remainder. If the output head is
    costly, vpp is 1 and there are several micro batches, the last stage has fewer."""
    sp: bool | None = None
    """Sequence parallelism: activations outside the matmuls are split over tp along the sequence. Derived: tp > 1."""
    zero: Annotated[int, one_of(0, 1, 2, 3)] = 1
    """ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    dp: Annotated[int | None, between(1, MOST_REPLICAS)] = None
    """Data-parallel size. Derived: world / (tp * cp * pp). A given value is checked. It sets the world size on CPU and
    in dry runs, and may use a part of this machine's devices."""
    shard_group: Annotated[int | None, at_least(1)] = None
    """Shard inside groups of this many data-parallel ranks and replicate across groups. Derived: cp * dp."""
    grad_reduce: Annotated[str | None, one_of(*EXCHANGES, note="; null is the precision's own sum"), LOGGED] = None
    """Format in which data-parallel ranks exchange gradients. null: summed in the dtype in which trainer.precision
    accumulates them; bf16: sent in bf16, added in fp32; int8: sent in int8 blocks (ZeRO++ qgZ), added in fp32.
    docs/guides/methods/less_communication.md"""
    reduce_group: Annotated[int | None, at_least(2), LOGGED] = None
    """For grad_reduce, the number of neighboring data-parallel ranks that first sum gradients among themselves. The
    sums are then exchanged with other groups (qgZ's two hops). Usually the ranks of a node; a divisor of
    shard_group."""
    param_gather: Annotated[str | None, one_of("int8", note="; null is the precision's compute dtype"), LOGGED] = None
    """Format in which sharded weights are gathered. null: trainer.precision's compute dtype; int8: in blocks (ZeRO++
    qwZ), so that layers compute with rounded weights and updates apply to exact ones. For zero 1 to 3."""
    secondary_group: Annotated[int | None, at_least(2)] = None
    """For zero=3, the number of neighboring data-parallel ranks that keep a second copy of the weights (ZeRO++ hpZ).
    The backward pass gathers weights inside this group. Usually the ranks of a node; a divisor of shard_group."""
    micro_batch_size: Annotated[int, at_least(1)] = 1
    """Sequences in one forward pass of a data-parallel rank."""
    global_batch_size: Annotated[int, at_least(1), BATCH] = 8
    """Sequences per optimizer step, over all devices."""
    batch_schedule: Annotated[list[Any], RISING_SAMPLES, BATCH] = field(default_factory=list)
    """Later global batch sizes, [[consumed samples, sequences], ...]: each holds from that number of consumed samples
    on. Before the first entry, and in validation, the size is global_batch_size."""
    random_ltd: RandomLTD | None = None
    """Random layer-wise token dropping; null: every layer processes every token."""
    steps: Annotated[int, at_least(0), LOGGED] = 100
    """Optimizer steps of the whole run; 0 initializes (or loads), saves and ends."""
    epochs: Annotated[int | None, at_least(1)] = None
    """Instead of steps: epochs over the training data; steps are epochs * samples // global_batch_size."""
    seed: Annotated[int, between(0, LARGEST_SEED), DATA] = 1234
    """Seed of initial weights and data order."""
    precision: Annotated[
        str | None, one_of(*PRECISIONS, note="; float8 matmuls: trainer.float8=tensorwise"), LOGGED
    ] = None
    """Dtypes of weights, gradients and optimizer states: fp32, bf16, bf16_sr or bf16_pure. With bf16, master weights,
    gradient sums and optimizer states are fp32. With bf16_sr all are bf16, and updates are rounded stochastically; with
    bf16_pure they are rounded to nearest, as a control. The Trainium recipe's names are also valid: bf16SR,
    fp32_OptStates, fp32_ZeroOptMaster, fp32_ZeroOptMasterGradAcc, megatron_amp_O2. Derived: bf16 on accelerators with
    bf16 units, else fp32. docs/guides/training/precision.md"""
    recompute: Annotated[str, one_of(*RECOMPUTE)] = "none"
    """Activation recomputation: none, elementwise, selective or full. With elementwise, norms, RoPE and SwiGLU are
    recomputed: half the memory at little cost. With selective, attention is recomputed too, for kernels that save its
    scores. With full, blocks are recomputed from their saved input."""
    offload: Annotated[list[str], some_of(OFFLOADED)] = field(default_factory=list)
    """State kept in host memory. activations: tensors that blocks save for the backward pass. optimizer: its states;
    the update then runs on the host."""
    recompute_every: Annotated[int, at_least(1)] = 1
    """Recompute in every n-th block only, from the first on: less recomputation, more memory."""
    mlp_chunks: Annotated[int, at_least(1)] = 1
    """Compute the feed-forward network of each block in this number of chunks of tokens, again in the backward pass.
    For long sequences: tensors of intermediate_size exist for one chunk only. docs/guides/methods/mlp_chunks.md"""
    compile: bool | None = None
    """torch.compile each block; on CPU this needs a C++ compiler. Derived: on a GPU true for 100 steps or more and with
    trainer.epochs, on other accelerators for 1,000 steps or more, on all of them with trainer.profile; on a CPU false.
    Also false with trainer.mlp_chunks, trainer.exact and optim.qk_clip."""
    compile_strict: bool = False
    """Treat a graph break, or a graph compiled after the first two batches, as an error."""
    compile_cache: str | None = None
    """Folder of compiled graphs, on a file system that all hosts of the job share. Its files are run as code, so other
    users must not own or change them. Derived: ~/.cache/megatron_llama/compile."""
    float8: Annotated[str | None, one_of("tensorwise", "rowwise"), LOGGED] = None
    """Multiply the blocks' matrices in float8, with torchao's recipe of this name; weights stay in ``precision``. For
    GPUs from compute capability 8.9 on; a CPU emulates it slowly. docs/guides/training/float8.md"""
    z_loss: Annotated[float, at_least(0), OPTIM] = 0.0
    """Coefficient of z-loss, an additional term of a token's training loss. The term is
    z_loss * log(sum(exp(logits)))^2 and keeps logits small (Chowdhery et al. 2022, arXiv:2204.02311, section 5, with
    1e-4). Losses of validation and evaluation exclude it."""
    async_tp: bool = False
    """Overlap sequence parallelism's communication with matmuls (torch's asynchronous tensor parallelism). For compiled
    blocks with tp > 1 on GPUs with peer-to-peer access. docs/guides/methods/async_tp.md"""
    deterministic: bool = False
    """Use deterministic algorithms only (torch.use_deterministic_algorithms); an operation without one is an error."""
    exact: Annotated[bool, LOGGED] = False
    """Compute bit-identical results in every layout. Implies ``deterministic``. docs/guides/methods/exact.md"""
    skip_nonfinite_steps: Annotated[int, at_least(0)] = 0
    """Number of steps with a NaN or Inf loss or gradient that are skipped; one more stops the run."""
    check_copies_every: Annotated[int | None, at_least(0)] = 100
    """Steps between comparisons of the weights and optimizer states that several ranks hold in copies. A difference
    stops the run. 0 or null: only at the start, saves and the end. docs/guides/training/copies.md"""
    spike_guard: Annotated[str, one_of("off", "skip", "rewind"), LOGGED] = "off"
    """Action on a spike of loss or gradient norm. skip: no update. rewind: load the newest checkpoint and skip the data
    read since. docs/guides/training/spikes.md"""
    spike_factor: Annotated[float, above_zero(), LOGGED] = 6.0
    """A spike is this number of standard deviations above the mean of the last spike_window steps."""
    spike_window: Annotated[int, at_least(4), LOGGED] = 128
    """Steps for mean and standard deviation of spike_guard, which begins after half as many."""
    spike_rewinds: Annotated[int, at_least(1)] = 3
    """Rewinds of a run with spike_guard=rewind; one more spike stops the run."""
    hang_timeout_seconds: Annotated[float | None, above_zero()] = 1800.0
    """Seconds without progress in a step or validation batch after which the job fails. The report has each rank's
    phase and stacks, and the culprit rank. The limit of starting, loading, compiling, saving and ending is eight times
    as long; null: no limit."""
    profile: Annotated[list[int] | None, FIRST_AND_LAST] = None
    """Steps to profile, as [first, last]. The folder <run.dir>/profile gets times and FLOP/s by module, the waits of
    each rank, and for the last step a trace and a memory snapshot. docs/guides/tools/profiling.md"""
    max_restarts: Annotated[int, at_least(0)] = 0
    """Number of times that a failed run is restarted on this host, from its newest checkpoint."""
    val_every_steps: Annotated[int | None, at_least(0)] = None
    """Steps between validations; 0: never. Derived: never for pretraining on data.split. With data.validation_prefixes,
    or for data.kind=sft with a second share of data.split, a tenth of the steps, but at least the number of batches per
    validation."""
    val_at_start: bool = False
    """Also validate before the first step of a new run, which metrics.jsonl has as step 0."""
    val_steps: Annotated[int | None, at_least(1), LOGGED] = None
    """Global batches per validation. Derived: 4; for data.kind=sft null means the whole set, each example once."""


PREFERENCE_METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected"),
)
"""TRL's metrics of pairs, means over a batch."""
KTO_METRICS = (
    *("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"),
    *("share/chosen", "share/rejected", "kl"),
)
"""Means over a batch's answers, from which TRL's metrics of KTO follow (model/preference.py)."""


@dataclass
class FinetuneConfig:
    """Fine-tuning: which weights are trained. Names and meanings follow PEFT."""

    method: Annotated[str, one_of("none", "full", "lora"), FIXED] = "none"
    """none and full train all weights, full from the weights in init_from; lora trains low-rank adapters of frozen
    matrices."""
    lora_rank: Annotated[int, at_least(1), FIXED] = 8
    """Rank of the adapters (PEFT's r)."""
    lora_alpha: Annotated[float, above_zero(), FIXED] = 16.0
    """Scale: the adapters' output is multiplied by lora_alpha / lora_rank."""
    use_rslora: Annotated[bool, FIXED] = False
    """Multiply by lora_alpha / sqrt(lora_rank) instead (rank-stabilized LoRA, Kalajdzievski 2023,
    arXiv:2312.03732)."""
    use_dora: Annotated[bool, FIXED] = False
    """Train also the norm of each row of the adapted matrices (weight-decomposed adapters, DoRA, Liu et al. 2024,
    arXiv:2402.09353)."""
    lora_dropout: Annotated[float, SHARE, LOGGED] = 0.0
    """Dropout on the adapters' inputs; its masks depend on the layout."""
    lora_target_modules: Annotated[list[str], module_endings(LORA_TARGETS, least=1), FIXED] = field(
        default_factory=lambda: list(LORA_TARGETS[:4])
    )
    """Matrices with adapters, of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; all-linear means all
    seven. Longer names, such as model.layers.0.self_attn.q_proj, mean the matrices whose full name ends so."""
    exclude_modules: Annotated[list[str], module_endings(LORA_TARGETS), FIXED] = field(default_factory=list)
    """Matrices without adapters, named as in lora_target_modules."""
    layers_to_transform: Annotated[list[int], numbers_of("layers"), FIXED] = field(default_factory=list)
    """Layers with adapters, counted from 0; empty: all. Full names in lora_target_modules ignore it, as in PEFT."""
    rank_pattern: Annotated[dict[str, int], patterns("'{layers.0.self_attn.q_proj:16}'", whole=True), FIXED] = field(
        default_factory=dict
    )
    """Other ranks than lora_rank by regular expressions of the ends of full names; the first match applies."""
    alpha_pattern: Annotated[dict[str, float], patterns("'{layers.0.self_attn.q_proj:32}'"), FIXED] = field(
        default_factory=dict
    )
    """Other values than lora_alpha, as rank_pattern."""
    bias: Annotated[str, one_of("none", "all", "lora_only"), FIXED] = "none"
    """Biases that are also trained: none, all, or of the adapted matrices."""
    modules_to_save: Annotated[list[str], some_of(SAVED_MODULES), FIXED] = field(default_factory=list)
    """Modules that are also trained in full. Names are embed_tokens, lm_head, norm (all norms, by the ending, as in
    PEFT), input_layernorm, post_attention_layernorm and post_feedforward_layernorm."""
    trainable_token_indices: Annotated[list[int], numbers_of("tokens"), FIXED] = field(default_factory=list)
    """Ids of tokens whose rows of the embedding are also trained; if it is tied, in the output head too."""
    objective: Annotated[str, one_of("sft", "dpo", "orpo", "kto"), OPTIM] = "sft"
    """Loss: the cross entropy (sft), or of pairs of answers (dpo, orpo), or of labeled answers (kto). DPO (Rafailov
    et al. 2023, arXiv:2305.18290) and KTO (Ethayarajh et al. 2024, arXiv:2402.01306) compare with the initial weights;
    ORPO (Hong et al. 2024, arXiv:2403.07691) has no reference. See docs/guides/data/preferences.md"""
    beta: Annotated[float, above_zero(), OPTIM] = 0.1
    """Beta of DPO and KTO: a larger value keeps the weights closer to the initial ones. Weight of ORPO's odds ratio."""
    loss_type: Annotated[str, one_of("sigmoid", "hinge", "ipo"), OPTIM] = "sigmoid"
    """DPO's loss of a pair, with TRL's names. Hinge is of SLiC (Zhao et al. 2023, arXiv:2305.10425); ipo compares log
    probabilities per token (Azar et al. 2023, arXiv:2310.12036)."""
    label_smoothing: Annotated[float, SHARE, OPTIM] = 0.0
    """Assumed share of pairs with swapped answers, for loss_type=sigmoid (conservative DPO)."""
    desirable_weight: Annotated[float, above_zero(), OPTIM] = 1.0
    """Factor of KTO's losses of desirable answers."""
    undesirable_weight: Annotated[float, above_zero(), OPTIM] = 1.0
    """Factor of KTO's losses of undesirable answers."""
    neftune_noise_alpha: Annotated[float | None, above_zero(example="5"), OPTIM] = None
    """Add uniform noise to the embeddings in training, at most alpha / sqrt(tokens * hidden_size) (NEFTune, Jain et al.
    2023, arXiv:2310.05914). It is the same in every layout."""
    frozen_dtype: Annotated[str | None, one_of("fp32", "bf16", "int8", "nf4", example="bf16"), LOGGED] = None
    """Storage of LoRA's frozen weights: fp32 or bf16; or int8 or nf4 for the blocks' matrices and the compute dtype for
    the rest. Derived: the compute dtype. Matmuls always run in the compute dtype."""
    adapter: str | None = None
    """Folder of a PEFT adapter to continue from (adapter_config.json, adapter_model.safetensors). It sets rank, alpha,
    use_rslora, use_dora, bias, modules, layers and patterns."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the means that a step computes in addition to the loss."""
        return {"sft": (), "kto": KTO_METRICS}.get(self.objective, PREFERENCE_METRICS)


@dataclass
class DeviceConfig:
    """Kind, speed and memory of the devices."""

    name: Annotated[str, one_of(*DEVICES)] = "auto"
    """Kind of device; auto chooses the best device of this host."""
    peak_tflops: Annotated[float | None, above_zero()] = None
    """Dense TFLOP/s of one device at the run's precision, for MFU. Derived: by model name; measured on CPU."""
    memory_gib: Annotated[float | None, above_zero()] = None
    """Memory of one device, GiB; runs that cannot fit are rejected. Derived: read from the device."""


@dataclass
class LoggingConfig:
    """Output while training."""

    every_steps: Annotated[int, at_least(1)] = 1
    """Steps between console lines (metrics.jsonl and TensorBoard get every step)."""
    tensorboard: bool = True
    """Write TensorBoard events to <run.dir>/tensorboard."""
    csv: bool = False
    """Also write <run.dir>/metrics.csv, a row per step."""
    prometheus: Annotated[str | None, PROM_FILE] = None
    """File for the newest step's metrics in Prometheus's text format (node exporter's textfile collector)."""
    wandb: Annotated[str, one_of("off", "offline", "online")] = "off"
    """Weights & Biases: online, or offline to <run.dir>/wandb for a later `wandb sync`. Needs the extra wandb."""
    wandb_project: Annotated[str, not_blank("must be the name of a project", "megatron_llama")] = "megatron_llama"
    """Weights & Biases project."""
    trackio: Annotated[str | None, not_blank("must be the name of a project", "megatron_llama")] = None
    """Project of trackio to log to; null: none. Needs the extra trackio."""
    mlflow: Annotated[str | None, not_blank("must be the name of an experiment", "megatron_llama")] = None
    """Experiment of MLflow to log to; null: none. Needs the extra mlflow."""
    parameter_norm: bool = False
    """Also log parameter_norm, the global 2-norm of all weights (costs one read of all weights)."""
    sample_prompts: list[str] = field(default_factory=list)
    """Prompts to continue at the end of the run, on the console and in samples.json; needs data.tokenizer."""
    sample_tokens: Annotated[int, at_least(1)] = 48
    """Tokens to generate per prompt."""


SAVE_MINUTES, KEPT_BY_TIME = 15.0, 2
"""Default of checkpoint.every_minutes, and the number of newest checkpoints that it keeps."""


@dataclass
class CheckpointConfig:
    """Checkpoints: when they are saved and deleted, and where a run resumes."""

    dir: Annotated[str | None, plain_url("s3://bucket/run")] = None
    """Folder of the checkpoints in an object store, such as s3://bucket/run; null: <run.dir>/checkpoints. See
    docs/guides/data/object_stores.md."""
    every_steps: Annotated[int | None, at_least(1)] = None
    """Steps between checkpoints; null: by time (every_minutes)."""
    every_minutes: Annotated[float | None, at_least(0)] = None
    """Minutes between checkpoints, by rank 0's clock; 0: none by time. Derived: 15 if every_steps is null and save_last
    is true, else 0. With this default, the newest 2 are kept if keep is null."""
    keep: Annotated[int | None, at_least(1)] = None
    """Number of newest checkpoints to keep; null keeps all, except by the default of every_minutes."""
    keep_every: Annotated[int | None, at_least(1)] = None
    """Always keep checkpoints at multiples of this many steps, regardless of ``keep``."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss, which checkpoints/best points to. Only checkpoints of
    validated steps (trainer.val_every_steps) count."""
    resume: Annotated[str, not_blank("must be auto, never or the path of a checkpoint", "auto")] = "auto"
    """auto resumes from the newest complete checkpoint in run.dir; never starts at step 0; a path loads that
    checkpoint. The path may be another program's: docs/guides/data/import_checkpoint.md"""
    allow: Annotated[list[str], some_of(ALLOWED)] = field(default_factory=list)
    """Groups of settings that may change on resume. The groups are data (datasets, blend, split, sequence length,
    seed), batch (global batch size) and optim (learning rate, schedule, weight decay, clipping). See
    docs/guides/training/resume.md."""
    save_last: bool = True
    """Save a checkpoint of the last step."""
    export_hf: bool = False
    """At the end of the run, export the last checkpoint as a Hugging Face folder. With keep_best it is the best
    checkpoint. The folder is <run.dir>/hf, or hf_step_N after an extension of the run."""
    asynchronous: bool = True
    """Write in the background; training only waits for a copy of weights and optimizer states to host memory."""
    save_timeout_seconds: Annotated[float, at_least(0)] = 60.0
    """Seconds for which a failed save is tried again, after 1, 2, 4 and more seconds. Then training continues."""
    max_failed_saves: Annotated[int, at_least(1)] = 3
    """Failed saves in a row after which the run stops with status 1. It also stops if its last checkpoint fails."""
    fallback_dir: Annotated[str | None, not_blank("must be a folder", "/scratch/checkpoints")] = None
    """Another folder, where a run that stops for failed saves tries to save its last checkpoint."""
    memory_every_steps: Annotated[int | None, at_least(1)] = None
    """Steps between copies of the training state in host memory, from which a restarted run resumes; null: none. Needs
    2 copies on each host's /dev/shm, 4 with several hosts. See docs/guides/training/faults.md."""


@dataclass
class LaunchConfig:
    """Hosts to start ranks on by ssh; not needed under torchrun and srun."""

    hosts: list[Any] = field(default_factory=list)
    """Hosts as name, user@name or name:ranks; the first one has rank 0. Without numbers, each host starts one rank per
    device, on a CPU an equal share of tp * cp * pp * dp."""
    hostfile: str | None = None
    """Instead of hosts: a file with a line "name slots=N" per host."""
    ssh: str = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=3 -o ServerAliveCountMax=2"
    """Command that runs a command line on a host; the host's name and the command line follow."""


@dataclass
class HookConfig:
    """A command of the user."""

    on_event: Annotated[str | None, not_blank("must be a command", "./notify.sh")] = None
    """Shell command that runs at the start, the end and other events of the run, and gets the event as JSON on stdin.
    On the command line only: a recipe must not run programs. See docs/guides/training/faults.md."""


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
    hook: HookConfig = field(default_factory=HookConfig)
    init_from: Annotated[str | None, LOGGED] = None
    """Folder with initial weights, or the hub name of a model, as org/name or org/name@revision. The folder is a
    Hugging Face model, or a checkpoint of Megatron, NeMo 2, torchtitan, accelerate or the Trainer. See
    docs/guides/data/import_checkpoint.md"""
    allow_targets: list[str] = field(default_factory=list)
    """Further classes that optim.schedule may have as _target_, in addition to the schedules of torch, NeMo and this
    project. On the command line only: a recipe must not run programs."""
    dry_run: bool = False
    """Print the plan and start nothing (same as --dry-run)."""
