"""Rules on the layout of model and batch over devices, on overlap and on token dropping.

One function per rule; its suggestion has the nearest valid values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from megatron_llama.arch.parameters import can_cut, head_dim, kv_heads, kv_heads_per_rank
from megatron_llama.config.hf_config import ARCHITECTURES, BIASES, MISTRAL, WINDOWS, hf_type
from megatron_llama.config.hostfile import HOST_FORMS, check_hosts
from megatron_llama.config.problems import Problem, format_value
from megatron_llama.config.rope import check_rope_scaling
from megatron_llama.config.settings import Config, RopeScaling
from megatron_llama.plan.rules.rule import nearest_legal, reads
from megatron_llama.plan.stage_split import check_split, split_evenly
from megatron_llama.topology import AXES, Grid

BLOCK = tuple(axis.name for axis in AXES if not axis.is_derived)
"""Axes whose sizes are set; the world size is a multiple of their product."""
BLOCK_SETTINGS = tuple(f"trainer.{name}" for name in BLOCK)
_MOST_CP = 4096
"""Largest context-parallel size that a suggestion considers."""


def layout_tp(config: Config, world_size: int) -> list[int]:
    """Return all tensor-parallel sizes that suit the model and, at this pp, the number of devices."""
    model, trainer = config.model, config.trainer
    grid = Grid.of(trainer)
    # On a CPU and in a dry run, the world size is tp * cp * pp * dp, so another tp changes it.
    follows = world_size == grid.world_size
    return [
        tp
        for tp in range(1, model.num_attention_heads + 1)
        if (follows or world_size % grid.resized(tp=tp).ranks_per_replica == 0)
        and can_cut(model, tp)
        and not (trainer.sp and config.data.length % grid.resized(tp=tp).divisor("activations"))
    ]


def grid_in(config: Config, world_size: int) -> Grid | None:
    """Return the grid of a world; None if the world size is not a multiple of tp * cp * pp."""
    grid = Grid.of(config.trainer)
    return grid.with_world(world_size) if world_size % grid.ranks_per_replica == 0 else None


def data_ranks(config: Config, world_size: int) -> int | None:
    """Return the number of ranks with the same weights; None if the world size is not a multiple of tp * cp * pp."""
    grid = grid_in(config, world_size)
    return None if grid is None else grid.product(*grid.same_weights)


def _factors(grid: Grid) -> tuple[str, str]:
    """Return the names and the sizes of the axes in ``BLOCK``, multiplied, without cp=1."""
    names = [name for name in grid.listed if name in BLOCK]
    return " * ".join(names), " * ".join(str(grid.sizes[name]) for name in names)


@reads(*BLOCK_SETTINGS)
def grid_divides_world(config: Config, world_size: int) -> Iterator[Problem]:
    """The world size is a multiple of tp * cp * pp, the ranks of one model replica."""
    tp, pp, cp, grid = config.trainer.tp, config.trainer.pp, config.trainer.cp, Grid.of(config.trainer)
    if world_size % grid.ranks_per_replica == 0:
        return
    name, value = ("trainer.pp", pp) if tp == 1 else ("trainer.tp", tp)
    names, factors = _factors(grid)
    rule = f"{names} = {factors} = {grid.ranks_per_replica} must divide the number of devices, {world_size}"
    pipelines = range(1, config.model.num_hidden_layers + 1)
    smaller = [size for size in pipelines if world_size % grid.resized(pp=size).ranks_per_replica == 0]
    sizes = range(1, min(world_size, _MOST_CP) + 1) if cp > 1 else ()
    contexts = [size for size in sizes if world_size % grid.resized(cp=size).ranks_per_replica == 0]
    if contexts:
        name, value = "trainer.cp", cp
        advice = nearest_legal("trainer.cp", cp, contexts)
    elif world_size % pp == 0:
        advice = nearest_legal("trainer.tp", tp, layout_tp(config, world_size))
    else:
        advice = nearest_legal("trainer.pp", pp, smaller)
    whole = world_size // grid.ranks_per_replica * grid.ranks_per_replica
    devices = f"start it on {f'{whole} or ' if whole else ''}{whole + grid.ranks_per_replica} devices"
    yield Problem(name, value, rule, f"{advice}; or {devices}" if advice else devices)


@reads("trainer.dp", *BLOCK_SETTINGS)
def dp_is_derived_size(config: Config, world_size: int) -> Iterator[Problem]:
    """A given data-parallel size equals the derived size."""
    dp, grid = config.trainer.dp, grid_in(config, world_size)
    if dp is not None and grid is not None and dp != (left := grid.sizes["dp"]):
        names, sizes = _factors(grid)
        rule = f"must be world / ({names}) = {world_size} / ({sizes}) = {left}"
        yield Problem("trainer.dp", dp, rule, f"write trainer.dp={left}, or omit it")


@reads("trainer.tp", "model.num_attention_heads", "model.num_key_value_heads", "model.intermediate_size")
def tp_divides_the_model(config: Config, world_size: int) -> Iterator[Problem]:
    """Each tensor-parallel rank has as many query heads and units of the feed-forward as the others.

    It has whole kv heads, or a group of ranks shares one.
    """
    model, tp, kv = config.model, config.trainer.tp, kv_heads(config.model)
    rules = []
    if model.num_attention_heads % tp:
        rules.append(f"must divide model.num_attention_heads={model.num_attention_heads}")
    if kv % tp and tp % kv:
        rules.append(f"must divide model.num_key_value_heads={kv}, or be a multiple of it (ranks then share a kv head)")
    if model.intermediate_size % tp:
        rules.append(f"must divide model.intermediate_size={model.intermediate_size}")
    for rule in rules:
        advice = nearest_legal("trainer.tp", tp, layout_tp(config, world_size)) or "write trainer.tp=1"
        yield Problem("trainer.tp", tp, rule, advice)


@reads("model.num_attention_heads", "model.num_key_value_heads")
def kv_heads_divide_heads(config: Config, world_size: int) -> Iterator[Problem]:
    """Every kv head serves the same number of query heads."""
    heads, kv = config.model.num_attention_heads, kv_heads(config.model)
    if heads % kv:
        advice = nearest_legal("model.num_key_value_heads", kv, [n for n in range(1, heads + 1) if heads % n == 0])
        yield Problem("model.num_key_value_heads", kv, f"must divide model.num_attention_heads={heads}", advice)


@reads("model.hidden_size", "model.num_attention_heads", "model.head_dim")
def hidden_divides_by_heads(config: Config, world_size: int) -> Iterator[Problem]:
    """Without head_dim, the heads divide the hidden size."""
    hidden, heads = config.model.hidden_size, config.model.num_attention_heads
    if config.model.head_dim is None and hidden % heads:
        even = hidden // heads // 2 * 2  # an even head dimension near the given one
        legal = [heads * dim for dim in (even, even + 2) if dim]
        advice = nearest_legal("model.hidden_size", hidden, legal) + ", or set model.head_dim"
        yield Problem("model.hidden_size", hidden, f"must be a multiple of model.num_attention_heads={heads}", advice)


@reads("model.hidden_size", "model.num_attention_heads", "model.head_dim")
def head_dim_is_even(config: Config, world_size: int) -> Iterator[Problem]:
    """Rotary embeddings rotate pairs of values."""
    model = config.model
    dim = head_dim(model)
    if (model.head_dim is None and model.hidden_size % model.num_attention_heads) or (dim and dim % 2 == 0):
        return
    rule = f"head_dim={dim} must be even and above 0, because rotary embeddings rotate pairs of values"
    name, value, legal = "model.head_dim", dim, [dim - 1 or 2, dim + 1]
    if model.head_dim is None:
        name, value = "model.hidden_size", model.hidden_size
        legal = [model.num_attention_heads * (dim + step) for step in (-1, 1) if dim + step > 0]
    yield Problem(name, value, rule, nearest_legal(name, value, legal))


@reads(
    *(f"model.rope_scaling.{field.name}" for field in fields(RopeScaling)),
    *("model.head_dim", "model.rope_theta", "model.max_position_embeddings"),
)
def rope_scaling_fits_its_type(config: Config, world_size: int) -> Iterator[Problem]:
    """The values of the scaling belong to its type, and its bounds are in order."""
    yield from check_rope_scaling(config.model, head_dim(config.model))


@reads("model.model_type", "model.attention_bias", "model.mlp_bias", "model.sliding_window")
def biases_and_window_fit_the_type(config: Config, world_size: int) -> Iterator[Problem]:
    """Hugging Face has a class for the model."""
    model, kind = config.model, hf_type(config.model)
    for name, kinds in BIASES.items():
        if getattr(model, name) and kind not in kinds:
            rule, other = f"{ARCHITECTURES[kind]} has no such biases", f"model.model_type={' or '.join(kinds)}"
            if kind == MISTRAL:
                rule, other = f"conflicts with model.sliding_window: {rule}", "model.sliding_window=null"
            yield Problem(f"model.{name}", True, rule, f"write model.{name}=false, or {other}")
    if model.sliding_window is not None and kind not in WINDOWS:
        rule = f"{ARCHITECTURES[kind]} has no window"
        yield Problem("model.sliding_window", model.sliding_window, rule, "write model.sliding_window=null")


@reads("model.sparse_attention.num_local_blocks", "model.sparse_attention.num_global_blocks")
def global_blocks_are_in_a_group(config: Config, world_size: int) -> Iterator[Problem]:
    """Global blocks are the last blocks of a group of local blocks."""
    sparse = config.model.sparse_attention
    if sparse is not None and sparse.num_global_blocks > sparse.num_local_blocks:
        most = sparse.num_local_blocks
        rule = f"must be at most model.sparse_attention.num_local_blocks={most}, the blocks of a group"
        name = "model.sparse_attention.num_global_blocks"
        yield Problem(name, sparse.num_global_blocks, rule, f"write {name}={most}, or fewer")


@reads("trainer.pp", "trainer.vpp", "model.num_hidden_layers")
def layers_fill_stages(config: Config, world_size: int) -> Iterator[Problem]:
    """Every virtual stage has a layer."""
    pp, vpp, layers = config.trainer.pp, config.trainer.vpp, config.model.num_hidden_layers
    if pp > 1 and layers < pp * vpp:
        rule = f"pp * vpp = {pp} * {vpp} = {pp * vpp} must be at most model.num_hidden_layers={layers}"
        sizes = range(min(vpp, 2), layers // vpp + 1)  # virtual stages need pp > 1
        legal = [n for n in sizes if world_size % Grid.of(config.trainer).resized(pp=n).ranks_per_replica == 0]
        advice = [nearest_legal("trainer.pp", pp, legal)] if legal else []
        advice += [f"write trainer.vpp={layers // pp}"] if vpp > 1 and layers >= pp else []
        advice += [f"write model.num_hidden_layers={pp * vpp} or more"] if not advice else []
        yield Problem("trainer.pp", pp, rule, ", or ".join(advice))


@reads("trainer.pipeline_layers", "trainer.pp", "trainer.vpp", "model.num_hidden_layers")
def pipeline_layers_add_up(config: Config, world_size: int) -> Iterator[Problem]:
    """A given split has a number above 0 for every stage and adds up to all layers."""
    split, pp, layers = config.trainer.pipeline_layers, config.trainer.pp, config.model.num_hidden_layers
    if split is None:
        return
    rule = check_split(split, layers, pp, config.trainer.vpp)
    if rule is not None:
        advice = f"write trainer.pipeline_layers={format_value(split_evenly(layers, pp))}, or omit it"
        yield Problem("trainer.pipeline_layers", split, rule, advice)


@reads(
    "trainer.global_batch_size", "trainer.batch_schedule", "trainer.micro_batch_size", *BLOCK_SETTINGS, "trainer.vpp"
)
def batch_is_whole_micro_batches(config: Config, world_size: int) -> Iterator[Problem]:
    """Data-parallel ranks have the same number of micro batches; the interleaved schedule needs a multiple of pp."""
    trainer, grid = config.trainer, grid_in(config, world_size)
    if grid is None:
        return
    dp = grid.divisor("samples")
    unit = trainer.micro_batch_size * dp * (trainer.pp if trainer.vpp > 1 else 1)
    sizes = f"{trainer.micro_batch_size} * {dp}"
    rule = f"must be a multiple of micro_batch_size * dp = {sizes} = {trainer.micro_batch_size * dp}"
    if trainer.vpp > 1:
        rule = f"must be a multiple of micro_batch_size * dp * pp = {sizes} * {trainer.pp} = {unit}, with vpp above 1"
    if trainer.global_batch_size % unit:
        whole = trainer.global_batch_size // unit * unit
        advice = nearest_legal("trainer.global_batch_size", trainer.global_batch_size, {whole, whole + unit} - {0})
        yield Problem("trainer.global_batch_size", trainer.global_batch_size, rule, advice)
    if any(size % unit for _, size in trainer.batch_schedule):
        whole_sizes = [[samples, max(unit, size // unit * unit)] for samples, size in trainer.batch_schedule]
        advice = f"write trainer.batch_schedule={format_value(whole_sizes)}"
        yield Problem("trainer.batch_schedule", trainer.batch_schedule, f"each size {rule}", advice)


def sequence_parts(grid: Grid) -> str:
    """Return the settings that divide a sequence with sequence parallelism, with their product."""
    if grid.sizes["cp"] == 1:
        return f"trainer.tp={grid.sizes['tp']}"
    return f"trainer.tp * trainer.cp = {grid.divisor('activations')}"


@reads("trainer.sp", "trainer.tp", "trainer.cp", "data.seq_length")
def sequence_divides_by_tp(config: Config, world_size: int) -> Iterator[Problem]:
    """Sequence parallelism splits the sequence, or a context-parallel rank's part of it, into equal parts."""
    grid, length = Grid.of(config.trainer), config.data.length
    if length % grid.sequence_unit(sp=False):
        return  # the rule of trainer.cp reports it
    parts = grid.sequence_unit(sp=True)
    if config.trainer.sp and length % parts:
        rule = f"must be a multiple of {sequence_parts(grid)}, because trainer.sp=true"
        legal = (length // parts * parts, (length // parts + 1) * parts)
        advice = nearest_legal("data.seq_length", length, {size for size in legal if size}) + ", or trainer.sp=false"
        yield Problem("data.seq_length", length, rule, advice)


@reads("trainer.shard_group", "trainer.zero", *BLOCK_SETTINGS)
def shard_group_divides_dp(config: Config, world_size: int) -> Iterator[Problem]:
    """Hybrid sharding divides the data-parallel ranks into equal groups."""
    group, dp = config.trainer.shard_group, data_ranks(config, world_size)
    if group is None or dp is None:
        return
    if dp % group:
        advice = nearest_legal("trainer.shard_group", group, [size for size in range(1, dp + 1) if dp % size == 0])
        rule = f"must divide the data-parallel size, dp={dp}"
        yield Problem("trainer.shard_group", group, rule, f"{advice}, or omit it")
    elif config.trainer.zero == 0 and group not in (1, dp):
        rule = "conflicts with trainer.zero=0, which shards nothing"
        advice = "write trainer.zero=1, 2 or 3, or omit trainer.shard_group"
        yield Problem("trainer.shard_group", group, rule, advice)


@reads("trainer.reduce_group", "trainer.secondary_group", "trainer.shard_group", *BLOCK_SETTINGS)
def groups_divide_a_shard_group(config: Config, world_size: int) -> Iterator[Problem]:
    """Groups of ranks inside a shard group have equal sizes."""
    trainer, shared = config.trainer, config.trainer.shard_group or data_ranks(config, world_size)
    groups = {"trainer.reduce_group": trainer.reduce_group, "trainer.secondary_group": trainer.secondary_group}
    for name, group in groups.items():
        if shared is not None and group is not None and (shared % group or group == shared):
            rule = f"must divide the {shared} ranks of a shard group, and be smaller"
            advice = nearest_legal(name, group, [size for size in range(2, shared) if shared % size == 0])
            yield Problem(name, group, rule, f"{advice}, or omit it" if advice else f"write {name}=null")


@reads("launch.hosts")
def hosts_can_be_reached(config: Config, world_size: int) -> Iterator[Problem]:
    """Hosts have valid names, each once."""
    hosts = config.launch.hosts
    if wrong := check_hosts(hosts):
        yield Problem("launch.hosts", hosts, wrong, f"write launch.hosts=[a,b], each {HOST_FORMS}")


@reads("trainer.async_tp", "trainer.tp", "trainer.sp", "data.seq_length")
def overlapped_sequences_divide_by_tp(config: Config, world_size: int) -> Iterator[Problem]:
    """trainer.async_tp overlaps the collectives of sequence parallelism, which is off for other lengths."""
    trainer, length = config.trainer, config.data.length
    parts = Grid.of(trainer).sequence_unit(sp=True)
    if trainer.async_tp and trainer.tp > 1 and trainer.sp is None and length % parts:
        rule = f"needs sequence parallelism; data.seq_length={length} is not a multiple of trainer.tp={trainer.tp}"
        longer = -(-length // parts) * parts
        yield Problem("trainer.async_tp", True, rule, f"write data.seq_length={longer}, or trainer.async_tp=false")


# Rules on random layer-wise token dropping (trainer.random_ltd).


SECTION = "trainer.random_ltd"


@reads(f"{SECTION}.min_value", f"{SECTION}.max_value", f"{SECTION}.seq_per_step", "data.seq_length")
def lengths_grow_within_the_sequence(config: Config, world_size: int) -> Iterator[Problem]:
    """min_value is a multiple of seq_per_step and at most max_value, which is at most data.seq_length."""
    ltd, length = config.trainer.random_ltd, config.data.length
    if ltd is None:
        return
    most = ltd.max_value or length
    if most > length:
        rule = f"must be at most data.seq_length={length}"
        yield Problem(f"{SECTION}.max_value", most, rule, f"write {SECTION}.max_value={length}, or omit it")
    legal = range(ltd.seq_per_step, min(most, length) + 1, ltd.seq_per_step)
    if ltd.min_value not in legal:
        rule = f"must be a multiple of {SECTION}.seq_per_step={ltd.seq_per_step}, and at most {min(most, length)}"
        advice = nearest_legal(f"{SECTION}.min_value", ltd.min_value, legal)
        advice = advice or f"write {SECTION}.seq_per_step=1, or {SECTION}=null"
        yield Problem(f"{SECTION}.min_value", ltd.min_value, rule, advice)


@reads(f"{SECTION}.layers", "model.num_hidden_layers")
def middle_layers_drop_tokens(config: Config, world_size: int) -> Iterator[Problem]:
    """The first and the last layer process all tokens."""
    ltd, count = config.trainer.random_ltd, config.model.num_hidden_layers
    if ltd is None:
        return
    middle = list(range(1, count - 1))
    if not middle:
        rule = f"needs 3 layers or more: the first and the last of {count} layers process all tokens"
        yield Problem(SECTION, ltd.layers or None, rule, f"write {SECTION}=null, or a model of 3 layers or more")
    elif ltd.layers is not None and (
        not ltd.layers or len(set(ltd.layers)) < len(ltd.layers) or set(ltd.layers) - set(middle)
    ):
        rule = f"must be distinct numbers from 1 to {count - 2}: the first and the last layer process all tokens"
        right = sorted(set(ltd.layers) & set(middle)) or middle
        advice = f"write {SECTION}.layers=[{','.join(map(str, right))}], or omit it"
        yield Problem(f"{SECTION}.layers", ltd.layers, rule, advice)


@reads(f"{SECTION}.max_value", f"{SECTION}.seq_per_step", "trainer.tp", "trainer.sp", "data.seq_length")
def retained_tokens_divide_by_tp(config: Config, world_size: int) -> Iterator[Problem]:
    """Sequence parallelism splits the tokens that a layer processes into equal parts."""
    ltd, length = config.trainer.random_ltd, config.data.length
    parts = Grid.of(config.trainer).divisor("activations")
    if ltd is None or config.trainer.sp is False or length % parts:
        return
    for name, value in (("seq_per_step", ltd.seq_per_step), ("max_value", ltd.max_value or length)):
        if value % parts:
            rule = f"must be a multiple of trainer.tp={parts}, because trainer.sp=true"
            nearest = min(-(-value // parts) * parts, length)
            yield Problem(f"{SECTION}.{name}", value, rule, f"write {SECTION}.{name}={nearest}, or trainer.sp=false")
            return


@reads("trainer.cp", "trainer.tp", "trainer.sp", "data.seq_length")
def chunks_are_equal(config: Config, world_size: int) -> Iterator[Problem]:
    """Each context-parallel rank has two chunks of a sequence, all of one length."""
    cp, length = config.trainer.cp, config.data.length
    if cp == 1 or length % (2 * cp) == 0:
        return
    rule = f"must be a multiple of 2 * trainer.cp = {2 * cp}: each context-parallel rank has two chunks of a sequence"
    unit = Grid.of(config.trainer).sequence_unit(sp=config.trainer.sp is not False)
    legal = {size for size in (length // unit * unit, -(-length // unit) * unit) if size}
    advice = f"{nearest_legal('data.seq_length', length, legal)}, or trainer.cp=1"
    yield Problem("data.seq_length", length, rule, advice)


@reads("trainer.cp", "trainer.cp_comm", "trainer.tp", "model.num_attention_heads", "model.num_key_value_heads")
def heads_divide_by_cp(config: Config, world_size: int) -> Iterator[Problem]:
    """Ulysses gives each context-parallel rank the same number of heads, or a copy of a kv head."""
    cp, tp, model = config.trainer.cp, config.trainer.tp, config.model
    if config.trainer.cp_comm != "ulysses" or cp == 1 or model.num_attention_heads % tp:
        return
    heads, kv = model.num_attention_heads // tp, kv_heads_per_rank(model, tp)
    legal = [size for size in range(1, heads + 1) if heads % size == 0 and (kv % size == 0 or size % kv == 0)]
    if cp not in legal:
        each = " of a tensor-parallel rank" if tp > 1 else ""
        rule = f"trainer.cp_comm=ulysses must divide the {heads} query heads{each} and share out the {kv} kv heads"
        advice = f"{nearest_legal('trainer.cp', cp, legal)}, or trainer.cp_comm=all_gather"
        yield Problem("trainer.cp", cp, rule, advice)
