"""Speed of layers of a 1 B, 7 B and 8 B Llama: installed peers, torch.compile, float8, a trace, a long sequence."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megatron_llama.system.files import read_json
from megatron_llama.system.programs import IN_CHECKOUT
from megatron_llama.system.tables import gib
from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.prove_gpu.checks import TABLE, Outcome, Row
from megatron_llama.tools.prove_gpu.session import COLD_COMPILE_SECONDS, LOG, CheckFailed, NotRun, Session, TrainingRun
from megatron_llama.tools.prove_gpu.training import NO_SAVE, QUIET, require_losses

ROUNDS, STEPS = 2, 5
NOT_INSTALLED = "not installed in this environment"
LONG_TOKENS = 65_536
FEW_STEPS, SPEED_STEPS = 3, 10
COMPILED_TOLERANCE, FLOAT8_TOLERANCE = 1e-2, 5e-2
KERNELS = 16
"""Rows of the kernel table."""


class Shape(NamedTuple):
    """Layers of a model: a row of the shapes in ``plan.toml``."""

    preset: str
    layers: int
    seq_length: int
    batch: int


SMALL_SHAPE = Shape("llama_2m", 2, 64, 2)
LEAST_MEMORY = 40 << 30  # devices with less memory run half of the layers and one sequence


def shape(session: Session, name: str) -> Shape:
    """Return the shape for the memory of the devices."""
    if session.small:
        return SMALL_SHAPE
    memory = min((card["memory_bytes"] for card in session.environment["cards"]), default=0)
    chosen = Shape(*TABLE["shapes"][name])
    return chosen if memory >= LEAST_MEMORY else chosen._replace(layers=chosen.layers // 2 or 8, batch=1)


def settings(chosen: Shape) -> tuple[str, ...]:
    """Return the overrides of a run of train.py with this shape."""
    layers = (f"model.num_hidden_layers={chosen.layers}",) if chosen.layers else ()
    sizes = (f"trainer.micro_batch_size={chosen.batch}", f"trainer.global_batch_size={chosen.batch}")
    return (f"model={chosen.preset}", *layers, f"data.seq_length={chosen.seq_length}", *sizes)


def check(session: Session, row: Row) -> Outcome:
    """Run a row of either part."""
    special = {"trace": _trace, "long context": _long_or_offload, "offload": _long_or_offload}
    return special.get(row.name, _measure)(session, row)


def _train(session: Session, name: str, chosen: Shape, *words: str, steps: int = FEW_STEPS) -> TrainingRun:
    """Train a shape for some steps, all of which must have finite losses."""
    precision = ["trainer.precision=bf16"] if session.is_accelerator else []
    common = (*QUIET, f"trainer.steps={steps}", NO_SAVE, "optim.lr=1e-4")
    run = session.train(name, *settings(chosen), *precision, *common, *words)
    require_losses(run, steps)
    return run


def _baseline(session: Session, compiled: bool) -> TrainingRun:
    """Return the run in bf16 that others compare with."""
    name, word = f"baseline/{'compiled' if compiled else 'eager'}", f"trainer.compile={str(compiled).lower()}"
    return session.share(name, lambda: _train(session, name, shape(session, "7B"), word, steps=SPEED_STEPS))


def _compiles(session: Session) -> bool:
    return session.is_accelerator and not session.environment["compiler_missing"]


def compilation(session: Session, _: Row) -> Outcome:
    """Compare compiled with eager runs."""
    session.require_compiler()
    compiled, eager = (_baseline(session, mode) for mode in (True, False))
    detail, values = compare_runs("compiled", compiled, "eager", eager, COMPILED_TOLERANCE)
    second = _train(session, "compile/second", shape(session, "7B"), "trainer.compile=true", steps=SPEED_STEPS)
    misses = re.search(r"misses (\d+)", second.output)
    if misses is None or int(misses[1]):
        count = "an unknown number of" if misses is None else misses[1]
        raise CheckFailed(f"the second start compiled {count} graphs; {detail}", values)
    return Outcome(f"{detail}; no new graphs at the second start", values)


def float8(session: Session, row: Row) -> Outcome:
    """Compare a recipe of trainer.float8 with bf16."""
    base = _baseline(session, _compiles(session))
    words = (f"trainer.compile={str(_compiles(session)).lower()}", f"trainer.float8={row.name}")
    run = _train(session, f"float8/{row.name}", shape(session, "7B"), *words, steps=SPEED_STEPS)
    if run.losses == base.losses:
        raise CheckFailed("the losses equal bf16's: float8 has no effect")
    return Outcome(*compare_runs(row.name, run, "bf16", base, FLOAT8_TOLERANCE))


def compare_runs(
    name: str, run: TrainingRun, other_name: str, other: TrainingRun, tolerance: float
) -> tuple[str, dict[str, Any]]:
    """Return a sentence with difference and speed, and the numbers. Raises CheckFailed if the losses are apart."""
    differences = [abs(a - b) / abs(b) for a, b in zip(run.losses, other.losses, strict=True)]
    error, ratio = max(differences), run.tokens_per_second / other.tokens_per_second
    text = f"losses of {name} and {other_name} within {error:.1e}; {name} has {ratio:.2f} times the speed"
    values = {"error": error, "speed_ratio": ratio, name: run.losses, other_name: other.losses}
    if not error <= tolerance:
        raise CheckFailed(f"{text}; at most {tolerance:.0e} is right", values)
    return text, values


def _trace(session: Session, _: Row) -> Outcome:
    """Profile a few steps of the first shape."""
    words = (*settings(shape(session, "7B")), "trainer.profile=[3,4]", *MOCK_RUN)
    words += (f"trainer.compile={str(_compiles(session)).lower()}",)
    run = session.train("extras/trace", *words, program="profile")
    folder = run.folder / "profiling/profile"
    traces = sorted(folder.glob("trace.*"))
    if not traces:
        raise CheckFailed("the profiler wrote no trace")
    seconds = read_json(folder / "profile.json")["ranks"][0]["step_s"]
    table = kernel_table(traces[0])
    (session.folder / session.prefix / "extras/trace/kernels.txt").write_text("\n".join(table) + "\n")
    return Outcome(f"a step of {seconds * 1e3:.0f} ms; {table[0]}", {"step_s": seconds, "kernels": table})


def kernel_table(trace: Path) -> list[str]:
    """Return a count and the longest kernels of a trace: share, milliseconds, launches, name."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    spent, launches = Counter[str](), Counter(str(event["name"]) for event in kernels)
    for event in kernels:
        spent[event["name"]] += event["dur"]
    busy = sum(spent.values())
    rows = [f"{t / busy:6.1%} {t / 1e3:8.2f} ms {launches[name]:5}  {name}" for name, t in spent.most_common(KERNELS)]
    return [f"{len(kernels)} kernels, {busy / 1e3:.1f} ms", *rows]


def _long_or_offload(session: Session, row: Row) -> Outcome:
    """Train on one long sequence, or with activations and optimizer states in host memory."""
    chosen, words = shape(session, row.model), ("trainer.compile=false", "trainer.offload=[activations,optimizer]")
    if row.name == "long context":
        tokens = 512 if session.small else LONG_TOKENS
        chosen = chosen._replace(seq_length=tokens, batch=1)
        words = ("trainer.recompute=full", f"model.max_position_embeddings={tokens}")
    run = _train(session, f"extras/{row.folder}", chosen, *words)
    speed, peak = run.tokens_per_second, int(max(run.column("peak_memory_bytes")))
    return Outcome(f"{speed:,.0f} tokens/s, peak {gib(peak)}", {"tokens_per_second": speed, "peak_bytes": peak})


def _measure(session: Session, row: Row) -> Outcome:
    """Run programs of the training benchmark round-robin, in this environment."""
    if not IN_CHECKOUT:
        raise NotRun("the benchmark needs a checkout")
    if "compiled" in row.settings:
        session.require_compiler()
    chosen, name = shape(session, row.model), f"benchmark/{row.folder}"
    output = session.work / session.prefix / name / "result"
    words = [
        *("-m", "benchmarks", "train", "--installed", *row.settings, "--models", chosen.preset),
        *(("--layers", str(chosen.layers)) if chosen.layers else ()),
        *("--seq-length", str(chosen.seq_length), "--batch", str(chosen.batch), "--device", session.device),
        *("--precision", "bf16" if session.is_accelerator else "fp32"),
        *("--rounds", str(ROUNDS), "--steps", str(STEPS), "--output", str(output)),
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    process = session.run(name, words, hangs_after=max(session.limit(), COLD_COMPILE_SECONDS))
    path = output.with_suffix(".json")
    if not path.is_file():
        if NOT_INSTALLED in process.output:
            raise NotRun(NOT_INSTALLED)
        raise CheckFailed(f"{process.last_lines(1)}, see {name}/{LOG}")
    session.redact.copy(path, session.folder / session.prefix / name / "result.json")
    return judge(read_json(path))


def judge(record: dict[str, Any]) -> Outcome:
    """Return the speeds in a record of the training benchmark. Raises CheckFailed if a program is excluded."""
    texts, values = [], {}
    for cell in record["cells"]:
        for result in cell["results"]:
            task, turns = result["task"], result["turns"]
            tokens = task["batch_size"] * task["seq_length"]
            seconds = [second for turn in turns for second in turn["step_seconds"]]
            speed, peak = tokens / median(seconds), median(turn["peak_flops"] for turn in turns)
            mfu = speed * cell["flops_per_token"] / peak if peak else None
            share = f"MFU {mfu:.1%}" if mfu else "MFU unknown: the card's peak is not in the table"
            spread = f"{tokens / max(seconds):,.0f} to {tokens / min(seconds):,.0f}"
            texts.append(f"{result['name']}: {speed:,.0f} tokens/s ({spread}), {share}, {gib(result['live_bytes'])}")
            values[result["name"]] = {"tokens_per_second": speed, "mfu": mfu, "peak_bytes": result["live_bytes"]}
    excluded = {name: reason for name, reason in record["left_out"].items() if NOT_INSTALLED not in reason}
    texts += [f"{name}: {reason}" for name, reason in excluded.items()]
    if excluded or not values:
        raise CheckFailed("; ".join(texts), values)
    return Outcome("; ".join(texts), values)
