"""The plan as a page of text: ``plan.txt``, and what ``--dry-run`` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from megatron_llama.config.counting import layers_per_stage, parameters, parameters_per_stage
from megatron_llama.config.memory import GIB, RankMemory, stage_memory
from megatron_llama.config.plan import Plan
from megatron_llama.config.problems import format_problems

__all__ = ["format_plan", "format_problems"]

WIDTH = 96
LABEL = 14
MOST_ROWS = 16
MOST_COLUMNS = 4


def format_plan(plan: Plan) -> str:
    """Everything that ``resolve`` decided, for people."""
    sections = (_head(plan), _grid(plan), _table(plan), _work(plan), _notes(plan))
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines) + "\n"


def _head(plan: Plan) -> Iterator[str]:
    model = plan.model
    title = f" {model.name} · {_short(parameters(model))} parameters · {plan.world_size} {_plural(plan.world_size, 'rank')} "
    yield title.center(WIDTH, "─")
    yield ""
    kv = model.num_key_value_heads
    heads = f"{model.num_attention_heads} heads" + (f" ({kv} kv)" if kv != model.num_attention_heads else "")
    tied = "tied" if model.tie_word_embeddings else "untied"
    yield _line("model", f"{model.num_hidden_layers} layers · hidden {model.hidden_size} · {heads} · ffn {model.intermediate_size}")
    padding = plan.padded_vocab_size - model.vocab_size
    padded = f" + {padding} of padding" if padding else ""
    yield _line("", f"vocabulary {model.vocab_size:,}{padded} · {tied} · sequence {plan.config.data.seq_length:,}{_rope(plan)}")
    per_stage = parameters_per_stage(plan)
    spread = f"{max(per_stage):,}" if len(set(per_stage)) == 1 else f"{min(per_stage):,} to {max(per_stage):,}"
    yield _line("parameters", f"{parameters(model):,} in all · {spread} on a rank" if plan.world_size > 1 else f"{parameters(model):,}")


def _rope(plan: Plan) -> str:
    scaling = plan.model.rope_scaling
    return f" · rope {plan.model.rope_theta:g}" + (f", scaled by {scaling.factor:g}" if scaling else "")


def _grid(plan: Plan) -> Iterator[str]:
    trainer = plan.config.trainer
    yield _line("rank grid", f"pp {trainer.pp} × dp {plan.dp} × tp {trainer.tp} = {plan.world_size}" + _virtual(plan))
    if plan.world_size > 1:
        yield _line("", f"rank = (pp · {plan.dp} + dp) · {trainer.tp} + tp: tp neighbours first, then dp, then pp")


def _virtual(plan: Plan) -> str:
    vpp = plan.config.trainer.vpp
    return f", {vpp} virtual stages on each rank" if vpp > 1 else ""


def _table(plan: Plan) -> Iterator[str]:
    """One row per pipeline stage: its layers, what a rank of it holds, and which ranks those are."""
    pp = plan.config.trainer.pp
    replicas = _some(plan.dp, MOST_COLUMNS)
    header = ["stage", "layers", "parameters", "memory", *(f"dp {d}" if d is not None else "…" for d in replicas)]
    rows = [header]
    counts, memory, layers = parameters_per_stage(plan), stage_memory(plan), layers_per_stage(plan.stage_layers, pp)
    for stage in _some(pp, MOST_ROWS):
        if stage is None:
            rows.append(["…"] + [""] * (len(header) - 1))
            continue
        chunks = " + ".join(_span(chunk) for chunk in plan.stage_layers[stage::pp])
        ranks = [_ranks(plan, stage, replica) if replica is not None else "…" for replica in replicas]
        rows.append([f"pp {stage}", f"{layers[stage]:>3}  {chunks}", _short(counts[stage]), _gib(memory[stage].total), *ranks])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for number, row in enumerate(rows):
        cells = [cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))]
        yield "  " + "   ".join(cells).rstrip()
        if number == 0:
            yield "  " + "   ".join("─" * width for width in widths)


def _some(count: int, most: int) -> list[int | None]:
    """0 .. count - 1, with the middle left out (None) where that is more than ``most``."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


def _ranks(plan: Plan, stage: int, replica: int) -> str:
    tp = plan.config.trainer.tp
    first = (stage * plan.dp + replica) * tp
    return _span(tuple(range(first, first + tp)))


def _span(numbers: tuple[int, ...]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _work(plan: Plan) -> Iterator[str]:
    trainer, data = plan.config.trainer, plan.config.data
    batch = f"{trainer.micro_batch_size} per micro batch × {plan.num_microbatches} × dp {plan.dp} = {trainer.global_batch_size} sequences"
    yield _line("batch", batch)
    yield _line("tokens", f"{trainer.global_batch_size} × {data.seq_length:,} = {plan.tokens_per_step:,} per step")
    yield _line("", f"{trainer.steps:,} {_plural(trainer.steps, 'step')} · {_short(plan.tokens_per_step * trainer.steps)} tokens in all · data {data.name}")
    yield _line("precision", _precision(plan))
    yield _line("sharding", _sharding(plan))
    yield _line("recompute", trainer.recompute + (" · compiled" if trainer.compile else "") + (" · deterministic" if trainer.deterministic else ""))
    yield from _optimizer(plan)
    heaviest = max(stage_memory(plan), key=lambda memory: memory.total)
    yield _line("memory", _memory(heaviest))
    yield _line("", "on the heaviest rank, before activations")
    if plan.config.init_from:
        yield _line("weights from", plan.config.init_from)


def _precision(plan: Plan) -> str:
    precision = plan.config.trainer.precision
    return precision + (" with fp32 master weights and gradient sums" if precision == "bf16" else "")


def _sharding(plan: Plan) -> str:
    trainer = plan.config.trainer
    what = {0: "nothing", 1: "optimizer", 2: "optimizer and gradients", 3: "optimizer, gradients and parameters"}[trainer.zero]
    over = f" over {plan.shard_size} of {plan.dp} data-parallel ranks" if trainer.zero and plan.dp > 1 else ""
    return f"zero {trainer.zero}: {what}{over} · sequence parallelism {'on' if plan.sp else 'off'}"


def _optimizer(plan: Plan) -> Iterator[str]:
    optim = plan.config.optim
    betas = f" · betas {optim.betas[0]:g}, {optim.betas[1]:g}" if optim.name != "sgd" else ""
    clip = f" · clip {optim.clip:g}" if optim.clip is not None else ""
    yield _line("optimizer", f"{optim.name} · lr {optim.lr:g} to {optim.min_lr:g}{betas} · weight decay {optim.weight_decay:g}{clip}")
    schedule = str(optim.schedule.get("_target_", "")).rpartition(".")[2]
    yield _line("schedule", f"{schedule} · {optim.warmup_steps} warm-up {_plural(optim.warmup_steps or 0, 'step')}" + _constant(optim.constant_steps))


def _constant(steps: int | None) -> str:
    return f" · {steps} at the end" if steps else ""


def _memory(memory: RankMemory) -> str:
    return f"weights {_gib(memory.weights)} + gradients {_gib(memory.gradients)} + optimizer {_gib(memory.optimizer)} = {_gib(memory.total)}"


def _notes(plan: Plan) -> Iterator[str]:
    for number, note in enumerate(plan.notes):
        start = ("note" if number == 0 else "").ljust(LABEL)
        yield textwrap.fill(note, WIDTH, initial_indent="  " + start, subsequent_indent=" " * (LABEL + 2), break_long_words=False, break_on_hyphens=False)


def _line(label: str, text: str) -> str:
    return f"  {label:<{LABEL}}{text}"


def _short(count: int) -> str:
    """A count with a unit, three digits."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.4g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return str(count)


def _gib(count: int) -> str:
    return f"{count / GIB:.3g} GiB" if count >= GIB else f"{count / 2**20:.3g} MiB"


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else noun + "s"
