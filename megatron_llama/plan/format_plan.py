"""The plan as text, for ``plan.txt`` and ``--dry-run``; the files with which a run starts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from megatron_llama.arch.attention_pattern import pattern_of
from megatron_llama.arch.exact_blocks import num_blocks
from megatron_llama.arch.flops import with_random_ltd
from megatron_llama.config import ConfigError, Problem, to_yaml
from megatron_llama.config.data_settings import PERCENTILE, VALUE, curriculum_metrics, validation_sets
from megatron_llama.config.precision import QUANTIZATION_BLOCK, STATE_BLOCK, quantized_bytes, state_bytes_8bit
from megatron_llama.config.settings import KEPT_BY_TIME, Config
from megatron_llama.config.stored_settings import NAME
from megatron_llama.devices import find_device
from megatron_llama.plan.build_steps import applied_steps, recomputation
from megatron_llama.plan.data_schedules import BatchSchedule, curriculum_lengths
from megatron_llama.plan.memory import Footprint, stage_footprints
from megatron_llama.plan.plan import Plan
from megatron_llama.system.files import write_atomically
from megatron_llama.system.programs import name_commands
from megatron_llama.system.tables import column_widths, gib, plural, short_count, text_table
from megatron_llama.system.wrapping import WIDTH, fill, wrap_lines
from megatron_llama.topology import virtual_stages_of

PLAN_FILE = "plan.txt"
LABEL = 14
MOST_ROWS = 16
MOST_COLUMNS = 4
MOST_SHAPES = 4
LEAST_LETTERS = 19  # of a dataset; counts are abbreviated if they leave fewer
SHARDED = {1: "optimizer", 2: "optimizer and gradients", 3: "optimizer, gradients and parameters"}


def format_plan(plan: Plan) -> str:
    """Format a plan as text of at most WIDTH columns where the content allows it."""
    memory = stage_footprints(plan)
    heaviest = max(memory, key=lambda rank: rank.total)
    sections = (
        _head(plan),
        _grid(plan),
        _table(plan, memory),
        _work(plan, heaviest),
        _readings(plan),
        _listed("chosen", plan.chosen),
        _listed("note", plan.notes),
    )
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines) + "\n"


def write_config_and_plan(plan: Plan) -> None:
    """Write config.yaml and plan.txt of the run, which only the user may read. Raises ConfigError.

    A later start takes its settings from config.yaml, so a rejected start must not replace it.
    """
    try:
        write_atomically(plan.run_dir / NAME, to_yaml(plan.config, plan.requested), private=True)
        write_atomically(plan.run_dir / PLAN_FILE, format_plan(plan), private=True)
    except OSError as error:
        rule, instead = f"cannot write: {error.strerror}", "free disk space, or write another run.dir=PATH"
        raise ConfigError([Problem("run.dir", str(plan.run_dir), rule, instead)]) from error


def layout_lines(plan: Plan, hardware: str | None = None) -> Iterator[str]:
    """Yield layout, batch and hardware, as a head for the output of tools."""
    trainer = plan.config.trainer
    virtual, sequence = f" (x {trainer.vpp} virtual)" if trainer.vpp > 1 else "", " + sp" if plan.sp else ""
    shard = f" in groups of {plan.shard_size}" if 1 < plan.shard_size < plan.data_ranks else ""
    yield f"{plan.model.name}: {_product(plan, 'x', pp=virtual, tp=sequence)} = {plan.world_size}"
    batches = "micro batch" if plan.num_microbatches == 1 else "micro batches"
    micro = f"{plan.num_microbatches:,} {batches} of {trainer.micro_batch_size}"
    chunks = f", MLP in {trainer.mlp_chunks} chunks" if trainer.mlp_chunks > 1 else ""
    yield from wrap_lines(f"zero {trainer.zero}{shard}, {recomputation(plan)}{chunks}, {micro}", rest="  ")
    yield batch_line(plan.config, hardware)


def batch_line(config: Config, hardware: str | None = None) -> str:
    """Format batch, sequence length, precision and hardware, for the title of a report.

    Args:
        hardware: Name of the hardware; default: the device.
    """
    trainer = config.trainer
    size = f"batch {trainer.global_batch_size:,} x {config.data.length:,} tokens"
    return f"{size}, {trainer.precision}, {hardware or f'device={config.device.name}'}"


def _product(plan: Plan, sign: str, **remarks: str) -> str:
    """Format the sizes of all axes, slowest first, each with its remark."""
    names = reversed(plan.grid.listed)
    return f" {sign} ".join(f"{name} {plan.grid.sizes[name]}{remarks.get(name, '')}" for name in names)


def _head(plan: Plan) -> Iterator[str]:
    """Yield the lines on the model and its parameters."""
    model, count = plan.model, plan.parameters
    ranks = f"{plan.world_size} {plural(plan.world_size, 'rank')}"
    yield f" {model.name} · {short_count(count)} parameters · {ranks} ".center(WIDTH, "─")
    yield ""
    kv, queries = model.num_key_value_heads, model.num_attention_heads
    heads = f"{queries} heads" + (f" ({kv} kv)" if kv != queries else "")
    shape = f"{model.num_hidden_layers} layers · hidden {model.hidden_size} · {heads} · ffn {model.intermediate_size}"
    shape += f" · {model.model_type}" if model.model_type != "llama" else ""
    yield _line("model", shape)
    padding = plan.padded_vocab_size - model.vocab_size
    padded = f" + {padding} of padding" if padding else ""
    tied = "tied" if model.tie_word_embeddings else "untied"
    scaling = model.rope_scaling
    scaled = f", {scaling.rope_type} x {scaling.factor:g}" if scaling else ""
    window = f" · window {model.sliding_window:,}" if model.sliding_window else ""
    positions = f"sequence {plan.config.data.length:,} · rope {model.rope_theta:g}{scaled}{window}"
    yield _line("", f"vocabulary {model.vocab_size:,}{padded} · {tied} · {positions}")
    held = [stage.held for stage in plan.stages]
    least, most = min(held), max(held)
    on_a_rank = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    share = f" in all · {on_a_rank} on a rank" if plan.world_size > 1 else ""
    yield _line("parameters", f"{count:,}{share}")
    if plan.config.finetune.method == "lora":
        yield from _lora(plan)


def _lora(plan: Plan) -> Iterator[str]:
    """Yield the lines on LoRA: trained parameters and their share of all parameters, LoRA's included, as in PEFT."""
    finetune, trained = plan.config.finetune, plan.whole.trained
    percent = 100 * trained / plan.whole.held
    dtype = plan.precision.compute_format if plan.quantized else finetune.frozen_dtype
    yield _line("trained", f"{trained:,} · {percent:.4g} % · frozen weights in {dtype}")
    if plan.quantized:
        share = quantized_bytes(plan.quantized, QUANTIZATION_BLOCK) / QUANTIZATION_BLOCK
        yield _line("", f"blocks' frozen matrices in {plan.quantized}: {share:g} bytes per value")
    dropout = f" · dropout {finetune.lora_dropout:g}" if finetune.lora_dropout else ""
    scale = " · rsLoRA" * finetune.use_rslora + " · DoRA" * finetune.use_dora
    yield _line("LoRA", f"rank {finetune.lora_rank} · alpha {finetune.lora_alpha:g}{scale}{dropout}")
    yield _line("", f"on {', '.join(finetune.lora_target_modules)}")
    changes = {"without": finetune.exclude_modules, "in layers": [str(i) for i in finetune.layers_to_transform]}
    for label, pattern in (("rank", finetune.rank_pattern), ("alpha", finetune.alpha_pattern)):
        changes[label] = [f"{value:g} for {key}" for key, value in pattern.items()]
    yield from (_line("", f"{label} {', '.join(parts)}") for label, parts in changes.items() if parts)
    if finetune.bias != "none":
        yield _line("", {"all": "and all biases", "lora_only": "and the biases of these matrices"}[finetune.bias])
    if finetune.modules_to_save:
        yield _line("", f"and in full {', '.join(finetune.modules_to_save)}")
    if rows := len(finetune.trainable_token_indices):
        yield _line("", f"and the embeddings of {rows} {plural(rows, 'token')}")
    if finetune.adapter:
        yield _line("", f"continues from {finetune.adapter}")


def _grid(plan: Plan) -> Iterator[str]:
    trainer = plan.config.trainer
    virtual = f", {trainer.vpp} virtual stages on each rank" if trainer.vpp > 1 else ""
    yield _line("rank grid", f"{_product(plan, '×')} = {plan.world_size}{virtual}")
    if plan.world_size > max(plan.grid.sizes.values()):
        formula, *others = reversed(plan.grid.listed)
        for name in others:
            formula = f"({formula})" if "+" in formula else formula
            formula += f" · {plan.grid.sizes[name]} + {name}"
        yield _line("", f"rank = {formula}")


def _table(plan: Plan, memory: list[Footprint]) -> list[str]:
    """Return one row per pipeline stage: layers, parameters and memory per rank, and rank numbers."""
    for columns in range(MOST_COLUMNS, 0, -1):
        rows = _cells(plan, memory, columns)
        if _width(rows) <= WIDTH:
            break
    most = plan.config.trainer.vpp
    while _width(rows) > WIDTH and most > 2:
        most -= 1
        rows = _cells(plan, memory, 1, most)
    return _aligned(rows, left=2)


def _width(rows: list[list[str]], gap: int = 3) -> int:
    """Return the columns of the lines that ``_aligned`` makes."""
    widths = column_widths(rows)
    return 2 + sum(widths) + gap * (len(widths) - 1)


def _aligned(rows: list[list[str]], left: int, gap: int = 3) -> list[str]:
    """Return ``rows``, of which the first is the header, as lines; ``left`` columns are left-aligned."""
    rule = ["─" * width for width in column_widths(rows)]
    return [f"  {line}" for line in text_table([rows[0], rule, *rows[1:]], left, gap)]


def _cells(plan: Plan, memory: list[Footprint], columns: int, most_chunks: int | None = None) -> list[list[str]]:
    """Return the table's cells, with at most ``columns`` data-parallel replicas and spans of ``most_chunks`` chunks."""
    grid = plan.grid
    pp, inner = grid.sizes["pp"], [name for name in grid.sizes if name not in ("dp", "pp")]
    replicas = _some(grid.sizes["dp"], columns)
    header = ["stage", "layers", "parameters", "memory", *(f"dp {d}" if d is not None else "…" for d in replicas)]
    rows = [header]
    for stage in _some(pp, MOST_ROWS):
        if stage is None:
            rows.append(["…"] + [""] * (len(header) - 1))
            continue
        chunks = [plan.stage_layers[chunk] for chunk in virtual_stages_of(stage, pp, plan.config.trainer.vpp)]
        shown = _some(len(chunks), most_chunks or len(chunks))
        spans = ["…" if chunk is None else _span(chunks[chunk]) for chunk in shown]
        layers = f"{sum(map(len, chunks)):>3}  " + " + ".join(spans)
        firsts = [None if replica is None else grid.rank(pp=stage, dp=replica) for replica in replicas]
        ranks = ["…" if first is None else _span(grid.ranks(first, *inner)) for first in firsts]
        rows.append([f"pp {stage}", layers, short_count(plan.stages[stage].held), gib(memory[stage].total), *ranks])
    return rows


def _some(count: int, most: int) -> list[int | None]:
    """Return 0 to count - 1; more than ``most`` are abbreviated with a None."""
    if count <= most:
        return list(range(count))
    return [*range(max(most - 2, 1)), None, *([count - 1] if most > 2 else [])]


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _work(plan: Plan, heaviest: Footprint) -> Iterator[str]:
    trainer, data, optim = plan.config.trainer, plan.config.data, plan.config.optim
    micro, whole = trainer.micro_batch_size, trainer.global_batch_size
    batch = f"micro batch {micro} × {plan.num_microbatches} × dp {plan.dp} = {whole} {plural(whole, 'sequence')}"
    yield _line("batch", batch)
    yield _line("tokens", f"{whole} × {data.length:,} = {plan.tokens_per_step:,} per step")
    for samples, size in plan.batches.sizes[1:]:
        yield _line("", f"from sample {samples:,} on: {size} × {data.length:,} = {size * data.length:,} per step")
    steps, tokens = f"{trainer.steps:,} {plural(trainer.steps, 'step')}", plan.batches.after(trainer.steps).tokens
    yield _line("", f"{steps} · {short_count(tokens)} tokens in all · data {data.name}")
    yield _line("validation", _validation(plan))
    yield from _curriculum(plan)
    yield from _random_ltd(plan)
    precision = str(trainer.precision)
    yield _line("precision", precision if precision == "fp32" else f"{precision}: {plan.precision}")
    yield _line("sharding", _sharding(plan))
    applied = [*applied_steps(plan).values(), *["deterministic"] * bool(trainer.deterministic)]
    yield _line("applied", " · ".join(applied) or "nothing")
    if trainer.exact:
        blocks = num_blocks(plan.model)
        yield _line("exact", f"{blocks} blocks per matrix · sums of gradients and their messages in int64")
    betas = f" · betas {optim.betas[0]:g}, {optim.betas[1]:g}" if optim.row.betas == 2 else ""
    clip = f" · clip {optim.clip:g}" if optim.clip is not None else ""
    schedule = str(optim.schedule.get("_target_", "")).removeprefix("megatron_llama.optim.schedules.")
    rates = f"lr {optim.lr:g}" if schedule == "Constant" else f"lr {optim.lr:g} to {optim.min_lr:g}"
    yield _line("optimizer", f"{optim.name} · {rates}{betas} · weight decay {optim.weight_decay:g}{clip}")
    if optim.state_bits:
        share = state_bytes_8bit(STATE_BLOCK) / STATE_BLOCK
        yield _line("", f"states of matrices in {optim.state_bits} bits: {share:g} bytes per value")
    warmup = f"{optim.warmup_steps} warm-up {plural(optim.warmup_steps or 0, 'step')}"
    end = f" · {optim.constant_steps} at the end" if optim.constant_steps else ""
    yield _line("schedule", f"{schedule} · {warmup}{end}")
    if plan.config.allow_targets:
        yield _line("", f"may also run {', '.join(plan.config.allow_targets)} (allow_targets)")
    terms = [f"{name} {gib(size)}" for name, size in heaviest.parts().items() if size]
    within = 13 if trainer.exact else 10  # tests/tools/forecast/test_traffic.py
    yield _line("memory", f"{gib(heaviest.total)} of tensors at the heaviest rank's peak, within {within} %:")
    yield _line("", " + ".join(terms[:3]))
    if terms[3:]:
        yield _line("", " + ".join(["", *terms[3:]]).strip())
    if (device := find_device(plan.config.device.name)) is not None:
        yield _line("", f"not counted: {device.uncounted_memory}")
    if heaviest.host:
        offloaded = " and ".join(plan.config.trainer.offload)
        yield _line("", f"and {gib(heaviest.host)} of host memory: {offloaded}")
    if plan.config.init_from:
        yield _line("weights from", plan.config.init_from)
    yield _line("run folder", plan.config.run.dir or f"runs/{plan.model.name}-{data.name}-<time>")
    yield _line("checkpoints", _checkpoints(plan))
    if plan.config.hook.on_event is not None:
        yield _line("at events", f"{plan.config.hook.on_event} (hook.on_event)")


def _checkpoints(plan: Plan) -> str:
    """Describe when checkpoints are saved, which are kept, and when ranks compare copies of weights and states."""
    saves = plan.config.checkpoint
    parts = [f"every {saves.every_steps:,} {plural(saves.every_steps, 'step')}"] if saves.every_steps else []
    if saves.every_minutes:
        minutes = f"{saves.every_minutes:g}"
        parts.append(f"every {minutes} {'minute' if minutes == '1' else 'minutes'}")
    if saves.memory_every_steps:
        parts.append(f"in memory every {saves.memory_every_steps:,} {plural(saves.memory_every_steps, 'step')}")
    parts += ["at the end"] * saves.save_last + ["when stopped by a signal"]
    parts += [f"in {saves.dir}"] if saves.dir else []
    keep = KEPT_BY_TIME if plan.replaces_checkpoints else saves.keep
    retained = "all are kept" if keep is None else f"the newest {'is' if keep == 1 else f'{keep:,} are'} kept"
    lines = [", ".join(parts)] + [retained] * bool(saves.every_steps or saves.every_minutes)
    if plan.copies:
        often = plan.config.trainer.check_copies_every
        when = f"every {often:,} {plural(often, 'step')}" if often else "before each save"
        lines.append(f"copies compared {when}")
    return " · ".join(lines)


def _validation(plan: Plan) -> str:
    """Describe validation: steps, batches and data; without it, the setting that enables it."""
    trainer, data = plan.config.trainer, plan.config.data
    every, shares = trainer.val_every_steps, [float(share) for share in data.split.split(",")]
    if not every or every > trainer.steps:
        hint = f" · trainer.val_every_steps={max(1, trainer.steps // 10)} turns it on"
        return "off" if data.kind == "sft" and not every else f"off{hint}"  # sft: no examples are held out
    source = f"{100 * shares[1] / sum(shares):.3g} % of the data (data.split)"
    if data.validation_prefixes:
        names = [name for name in validation_sets(data) if name]
        source = f"sets {', '.join(names[:4])}{', …' * (len(names) > 4)}" if names else "data.validation_prefixes"
    elif data.mock:
        source = "random tokens"
    batches, size = trainer.val_steps, trainer.global_batch_size
    amount = "the whole set" if batches is None else f"{batches} {'batch' if batches == 1 else 'batches'} of {size}"
    often = "after each step" if every == 1 else f"every {every:,} steps"
    default = "" if plan.requested.trainer.val_every_steps else " · by default; trainer.val_every_steps=0 turns it off"
    return f"{often} · {amount} · {source}{default}"


def _curriculum(plan: Plan) -> Iterator[str]:
    """Yield the lines on the difficulty and the sequence lengths of a curriculum."""
    data, last = plan.config.data, max(1, plan.config.trainer.steps)
    for metric in curriculum_metrics(data.curriculum):
        rises = metric.rises(last)
        (_, least), (step, most) = rises[0], rises[-1]
        unit = {VALUE: "", PERCENTILE: f"/{metric.highest} of the samples"}[metric.difficulty_type]
        levels = f"{len(rises)} {plural(len(rises), 'level')}"
        yield _line("curriculum", f"{metric.metric} {least:,} to {most:,}{unit} by step {step:,} · {levels}")
        if metric.is_length:
            cuts = [f"{cut.chunks} × {cut.length:,} from {since:,}" for since, cut in curriculum_lengths(data, last)]
            cuts = cuts if len(cuts) <= MOST_SHAPES else [*cuts[: MOST_SHAPES - 1], "…", cuts[-1]]
            yield _line("", f"sequence lengths (from step): {', '.join(cuts)}")
            if plan.config.trainer.compile:
                yield _line("", f"each of the {levels} compiles separate graphs")


def _random_ltd(plan: Plan) -> Iterator[str]:
    """Yield the lines on the layers, the retained tokens and the saved FLOPs of random-LTD."""
    ltd, steps = plan.random_ltd, plan.config.trainer.steps
    if ltd is None:
        return
    lengths, of = list(ltd.lengths(steps).items()), f"{ltd.seq_length:,} tokens"
    runs = groupby(enumerate(ltd.layers), lambda numbered: numbered[1] - numbered[0])  # consecutive numbers
    names = ", ".join(_span([layer for _, layer in run]) for _, run in runs)
    yield _line("random-LTD", f"layers {names} process {lengths[0][1]:,} of {of} at first")
    if len(lengths) > 1:
        yield _line("", f"{lengths[-1][1]:,} from step {lengths[-1][0]:,} on, {len(lengths)} lengths in all")
    model, finetune, span = plan.model, plan.config.finetune, pattern_of(plan.model).span(ltd.seq_length)
    stretches = list(ltd.sequences(steps, BatchSchedule.of(plan.config)))
    used = sum(count * with_random_ltd(model, span, finetune, retained).causal for retained, count in stretches)
    whole = sum(count for _, count in stretches) * with_random_ltd(model, span, finetune, None).causal
    if whole:
        yield _line("", f"{1 - used / whole:.1%} fewer FLOPs in {steps:,} {plural(steps, 'step')} than with all tokens")


def _readings(plan: Plan) -> list[str]:
    """Return one row per dataset: size of an epoch, and sequences that the run reads."""
    numbers, rows, room = _some(len(plan.dataset_usage), MOST_ROWS), [[""]], 0
    shown = [plan.dataset_usage[number] for number in numbers if number is not None]
    if not shown:
        return []
    for count in ("{:,}".format, short_count):
        rows = [["per epoch", "tokens", "share", "read", "tokens", "epochs"]]
        for each in shown:
            tokens = short_count(each.tokens), short_count(each.tokens * each.epochs)
            amounts = count(each.sequences), tokens[0], f"{100 * each.share:.3g} %", count(each.read), tokens[1]
            rows.append([*amounts, short_count(float(f"{each.epochs:.3g}"))])
        room = WIDTH - _width([["", *row] for row in rows], gap=2)
        if room >= LEAST_LETTERS:
            break
    unit = "sequences" if plan.config.data.kind == "pretrain" else "examples"
    names = _short_names([each.prefix for each in shown], max(room, LEAST_LETTERS))
    rows = [[name, *row] for name, row in zip([f"dataset ({unit})", *names], rows, strict=True)]
    if None in numbers:
        rows.insert(numbers.index(None) + 1, ["…"] + [""] * (len(rows[0]) - 1))
    return _aligned(rows, left=1, gap=2)


def _short_names(names: Sequence[str], most: int) -> list[str]:
    """Shorten names to ``most`` letters: by the folders and then the ending that all share, then in the middle."""
    if max(map(len, names)) > most:
        start = os.path.commonprefix(names).rfind("/") + 1
        names = ["…" * bool(start) + name[start:] for name in names]
    if len(names) > 1 and max(map(len, names)) > most:
        end = len(re.sub("^[^/_]*", "", os.path.commonprefix([name[::-1] for name in names])[::-1]))
        names = [name[: len(name) - end] + "…" * bool(end) for name in names]
    return [name if len(name) <= most else f"{name[: most // 2]}…{name[-((most - 1) // 2) :]}" for name in names]


def _sharding(plan: Plan) -> str:
    zero = plan.config.trainer.zero
    if zero == 0 or plan.data_ranks == 1:
        return f"zero {zero}: nothing" + (" to share at dp 1" if zero else "")
    copies = plan.data_ranks // plan.shard_size
    groups = f", {copies} copies" if copies > 1 else ""
    return f"zero {zero}: {SHARDED[zero]} over {plan.shard_size} ranks{groups}"


def _listed(label: str, texts: Sequence[str]) -> list[str]:
    return [fill(_line("" if number else label, ""), name_commands(text)) for number, text in enumerate(texts)]


def _line(label: str, text: str) -> str:
    """Return a labeled line; longer ones continue below, split at " · ", or at spaces. Paths are not split."""
    lines = [""]
    for part in text.split(" · "):
        longer = f"{lines[-1]} · {part}" if lines[-1] else part
        if lines[-1] and len(longer) > WIDTH - LABEL - 2:
            lines.append(part)
        else:
            lines[-1] = longer
    indent = " " * (LABEL + 2)
    start = f"  {label:<{LABEL}}"
    filled = [fill(indent, line) if line else indent for line in lines]
    return start + "\n".join(filled)[len(indent) :]
