"""The plan as a page of text: ``plan.txt``, and what ``--dry-run`` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from megatron_llama.config.precision import QUANTIZATION_BLOCK, quantized_bytes
from megatron_llama.config.problems import format_problems
from megatron_llama.plan.memory import RankMemory, stage_memory
from megatron_llama.plan.parameters import (
    layers_per_stage,
    lora_parameters,
    parameters,
    parameters_per_stage,
    trained_parameters,
)
from megatron_llama.plan.plan import Plan
from megatron_llama.system.units import gib, plural, short_count

__all__ = ["format_plan", "format_problems"]

WIDTH = 96
LABEL = 14
MOST_ROWS = 16
MOST_COLUMNS = 4
SHARDED = {1: "optimizer", 2: "optimizer and gradients", 3: "optimizer, gradients and parameters"}


def format_plan(plan: Plan) -> str:
    """Everything that ``resolve`` decided, as text."""
    sections = (_head(plan), _grid(plan), _table(plan), _work(plan), _notes(plan))
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines) + "\n"


def _head(plan: Plan) -> Iterator[str]:
    model = plan.model
    ranks = f"{plan.world_size} {plural(plan.world_size, 'rank')}"
    yield f" {model.name} · {short_count(parameters(model))} parameters · {ranks} ".center(WIDTH, "─")
    yield ""
    kv, queries = model.num_key_value_heads, model.num_attention_heads
    heads = f"{queries} heads" + (f" ({kv} kv)" if kv != queries else "")
    shape = f"{model.num_hidden_layers} layers · hidden {model.hidden_size} · {heads} · ffn {model.intermediate_size}"
    yield _line("model", shape)
    padding = plan.padded_vocab_size - model.vocab_size
    padded = f" + {padding} of padding" if padding else ""
    tied = "tied" if model.tie_word_embeddings else "untied"
    yield _line("", f"vocabulary {model.vocab_size:,}{padded} · {tied} · {_positions(plan)}")
    per_stage = [stage.held for stage in parameters_per_stage(plan)]
    least, most = min(per_stage), max(per_stage)
    on_a_rank = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    share = f" in all · {on_a_rank} on a rank" if plan.world_size > 1 else ""
    yield _line("parameters", f"{parameters(model):,}{share}")
    yield from _trained(plan)


def _trained(plan: Plan) -> Iterator[str]:
    """What LoRA trains, with its share of all parameters, LoRA's included, as PEFT prints it."""
    finetune, model = plan.config.finetune, plan.model
    if finetune.method != "lora":
        return
    trained, added = trained_parameters(model, finetune), lora_parameters(model, finetune)
    percent = 100 * trained / (parameters(model) + added)
    kept = plan.precision.compute_format if plan.quantized else finetune.frozen_dtype
    yield _line("trained", f"{trained:,} · {percent:.4g} % · the rest is kept in {kept}")
    if plan.quantized:
        share = quantized_bytes(plan.quantized, QUANTIZATION_BLOCK) / QUANTIZATION_BLOCK
        yield _line("", f"but for the blocks' matrices, in {plan.quantized}: {share:g} bytes a value")
    dropout = f" · dropout {finetune.lora_dropout:g}" if finetune.lora_dropout else ""
    yield _line("LoRA", f"rank {finetune.lora_rank} · alpha {finetune.lora_alpha:g}{dropout}")
    yield _line("", f"on {', '.join(finetune.lora_target_modules)}")
    if finetune.modules_to_save:
        yield _line("", f"and all of {', '.join(finetune.modules_to_save)}")
    if finetune.adapter:
        yield _line("", f"going on from {finetune.adapter}")


def _positions(plan: Plan) -> str:
    scaling = plan.model.rope_scaling
    scaled = f", scaled by {scaling.factor:g}" if scaling else ""
    return f"sequence {plan.config.data.seq_length:,} · rope {plan.model.rope_theta:g}{scaled}"


def _grid(plan: Plan) -> Iterator[str]:
    trainer = plan.config.trainer
    yield _line("rank grid", f"pp {trainer.pp} × dp {plan.dp} × tp {trainer.tp} = {plan.world_size}" + _virtual(plan))
    if plan.world_size > max(trainer.tp, trainer.pp, plan.dp):
        yield _line("", f"rank = (pp · {plan.dp} + dp) · {trainer.tp} + tp")


def _virtual(plan: Plan) -> str:
    vpp = plan.config.trainer.vpp
    return f", {vpp} virtual stages on each rank" if vpp > 1 else ""


def _table(plan: Plan) -> Iterator[str]:
    """One row per pipeline stage: its layers, what a rank of it holds, and which ranks those are."""
    for columns in range(MOST_COLUMNS, 0, -1):
        lines = _aligned(_cells(plan, columns))
        if max(map(len, lines)) <= WIDTH:
            break
    yield from lines


def _cells(plan: Plan, columns: int) -> list[list[str]]:
    """The table's text, with at most ``columns`` data-parallel replicas."""
    pp = plan.config.trainer.pp
    replicas = _some(plan.dp, columns)
    header = ["stage", "layers", "parameters", "memory", *(f"dp {d}" if d is not None else "…" for d in replicas)]
    rows = [header]
    counts, memory, layers = parameters_per_stage(plan), stage_memory(plan), layers_per_stage(plan.stage_layers, pp)
    for stage in _some(pp, MOST_ROWS):
        if stage is None:
            rows.append(["…"] + [""] * (len(header) - 1))
            continue
        chunks = f"{layers[stage]:>3}  " + " + ".join(_span(chunk) for chunk in plan.stage_layers[stage::pp])
        ranks = [_ranks(plan, stage, replica) if replica is not None else "…" for replica in replicas]
        rows.append([f"pp {stage}", chunks, short_count(counts[stage].held), gib(memory[stage].total), *ranks])
    return rows


def _aligned(rows: list[list[str]]) -> list[str]:
    """Names to the left, numbers to the right, and a rule under the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        padded[:2] = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
        lines.append(("  " + "   ".join(padded)).rstrip())
    return [lines[0], "  " + "   ".join("─" * width for width in widths), *lines[1:]]


def _some(count: int, most: int) -> list[int | None]:
    """0 to count - 1; more than ``most`` are abbreviated by a None in the middle."""
    if count <= most:
        return list(range(count))
    return [*range(max(most - 2, 1)), None, *([count - 1] if most > 2 else [])]


def _ranks(plan: Plan, stage: int, replica: int) -> str:
    tp = plan.config.trainer.tp
    first = (stage * plan.dp + replica) * tp
    return _span(tuple(range(first, first + tp)))


def _span(numbers: tuple[int, ...]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _work(plan: Plan) -> Iterator[str]:
    trainer, data = plan.config.trainer, plan.config.data
    micro, whole = trainer.micro_batch_size, trainer.global_batch_size
    batch = f"micro batch {micro} × {plan.num_microbatches} × dp {plan.dp} = {whole} {plural(whole, 'sequence')}"
    yield _line("batch", batch)
    yield _line("tokens", f"{whole} × {data.seq_length:,} = {plan.tokens_per_step:,} per step")
    steps = f"{trainer.steps:,} {plural(trainer.steps, 'step')}"
    yield _line("", f"{steps} · {short_count(plan.tokens_per_step * trainer.steps)} tokens in all · data {data.name}")
    yield _line("precision", _precision(plan))
    yield _line("sharding", _sharding(plan))
    switches = [name for name in ("compile", "deterministic") if getattr(trainer, name)]
    sequence = f"sequence parallelism {'on' if plan.sp else 'off'}"
    yield _line("activations", " · ".join([f"recompute {trainer.recompute}", sequence, *switches]))
    yield from _optimizer(plan)
    heaviest = max(stage_memory(plan), key=lambda memory: memory.total)
    yield _line("memory", _memory(heaviest))
    yield _line("", "on the heaviest rank, before activations")
    if plan.config.init_from:
        yield _line("weights from", plan.config.init_from)


def _precision(plan: Plan) -> str:
    name = plan.config.trainer.precision
    return name if name == "fp32" else f"{name}: {plan.precision}"


def _sharding(plan: Plan) -> str:
    zero = plan.config.trainer.zero
    if zero == 0 or plan.dp == 1:
        return f"zero {zero}: nothing" + (" to share at dp 1" if zero else "")
    groups = f", {plan.dp // plan.shard_size} copies" if plan.shard_size < plan.dp else ""
    return f"zero {zero}: {SHARDED[zero]} over {plan.shard_size} ranks{groups}"


def _optimizer(plan: Plan) -> Iterator[str]:
    optim = plan.config.optim
    betas = f" · betas {optim.betas[0]:g}, {optim.betas[1]:g}" if optim.name != "sgd" else ""
    clip = f" · clip {optim.clip:g}" if optim.clip is not None else ""
    rates = f"lr {optim.lr:g} to {optim.min_lr:g}"
    yield _line("optimizer", f"{optim.name} · {rates}{betas} · weight decay {optim.weight_decay:g}{clip}")
    name = str(optim.schedule.get("_target_", "")).rpartition(".")[2]
    warmup = f"{optim.warmup_steps} warm-up {plural(optim.warmup_steps or 0, 'step')}"
    end = f" · {optim.constant_steps} at the end" if optim.constant_steps else ""
    yield _line("schedule", f"{name} · {warmup}{end}")


def _memory(memory: RankMemory) -> str:
    parts = {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer}
    return " + ".join(f"{name} {gib(size)}" for name, size in parts.items()) + f" = {gib(memory.total)}"


def _notes(plan: Plan) -> Iterator[str]:
    for number, note in enumerate(plan.notes):
        start = ("note" if number == 0 else "").ljust(LABEL)
        yield textwrap.fill(
            note,
            WIDTH,
            initial_indent="  " + start,
            subsequent_indent=" " * (LABEL + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )


def _line(label: str, text: str) -> str:
    return f"  {label:<{LABEL}}{text}"
