"""Checks that start train.py, other programs with its settings, or the training benchmark."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megatron_llama.devices import HOST
from megatron_llama.system.files import read_json
from megatron_llama.system.programs import CONF_DIR, IN_CHECKOUT, program_files
from megatron_llama.system.tables import gib
from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.prove_gpu import session as processes
from megatron_llama.tools.prove_gpu.run_checks import TABLE, Outcome, Row
from megatron_llama.tools.prove_gpu.session import CheckFailed, NotRun, Session, TrainingRun

QUIET = (*MOCK_RUN, "optim=constant", "optim.warmup_steps=0", "checkpoint.every_minutes=0")
NO_SAVE = "checkpoint.save_last=false"
SMOKE_STEPS = 20


def shape(session: Session) -> tuple[str, ...]:
    """Return the model and batch of short runs: 15 M parameters on an accelerator, fewer for ``--small``."""
    if session.small:
        return (
            *("model=llama_2m", "model.num_hidden_layers=2", "model.hidden_size=64", "model.intermediate_size=128"),
            *("data.seq_length=64", "trainer.micro_batch_size=2", "trainer.global_batch_size=4"),
        )
    return ("model=llama_15m", "data.seq_length=256", "trainer.micro_batch_size=8", "trainer.global_batch_size=16")


def smoke(session: Session, _: Row) -> Outcome:
    """Check that a small Llama trains."""
    run = session.train("smoke", *shape(session), *QUIET, f"trainer.steps={SMOKE_STEPS}", "optim.lr=1e-3")
    first, last = require_losses(run, SMOKE_STEPS)
    saved = sorted(path.name for path in (run.folder / "checkpoints").glob("step_*"))
    if not saved:
        raise CheckFailed("the run saved no checkpoint", {"losses": run.losses})
    if not last < first:
        raise CheckFailed(f"the loss does not fall: {first:.4f} to {last:.4f} in {SMOKE_STEPS} steps")
    speed = run.tokens_per_second
    detail = f"loss {first:.3f} to {last:.3f} in {SMOKE_STEPS} steps, {speed:,.0f} tokens/s"
    return Outcome(detail, {"losses": run.losses, "tokens_per_second": speed})


def require_losses(run: TrainingRun, steps: int) -> tuple[float, float]:
    """Return the first and last loss. Raises CheckFailed unless each step has a finite loss that is not 0."""
    losses = run.losses
    if len(losses) != steps:
        raise CheckFailed(f"{len(losses)} of {steps} steps have metrics", {"losses": losses})
    if not all(map(math.isfinite, losses)):
        step = next(number for number, loss in enumerate(losses, 1) if not math.isfinite(loss))
        raise CheckFailed(f"the loss of step {step} is {losses[step - 1]}", {"losses": losses})
    if not all(losses):
        raise CheckFailed("the loss of a step is 0: the device computes nothing", {"losses": losses})
    return losses[0], losses[-1]


RESUME_STEPS, STOP_STEP = 8, 5
EXACT = ("reduced_train_loss", "gradient_norm")


def resume(session: Session, row: Row) -> Outcome:
    """Check that a stopped and continued run has the values of an uninterrupted run."""
    words = [*shape(session), *QUIET, *row.settings, "trainer.deterministic=true", "trainer.compile=false"]
    folder, ranks = f"resume/{row.folder}", row.ranks
    whole = session.train(f"{folder}/whole", *words, f"trainer.steps={RESUME_STEPS}", ranks=ranks)
    session.train(f"{folder}/stopped", *words, f"trainer.steps={STOP_STEP}", ranks=ranks)
    run = session.train(
        f"{folder}/resumed", *words, f"trainer.steps={RESUME_STEPS}", ranks=ranks, run=f"{folder}/stopped"
    )
    if re.search(rf"^step 1/{RESUME_STEPS} ", run.output, re.MULTILINE):
        raise CheckFailed("the second start did not resume from the checkpoint")
    for metric in EXACT:
        for step, (a, b) in enumerate(zip(run.column(metric), whole.column(metric), strict=True), 1):
            if a != b:
                raise CheckFailed(f"{metric} of step {step} is {a!r} after the resume, {b!r} without a stop")
    compare_weights(whole.folder, run.folder)
    return Outcome(f"{RESUME_STEPS} steps, resumed after {STOP_STEP}: losses, norms and weights are bit-identical")


def compare_weights(expected: Path, actual: Path) -> None:
    """Compare the bytes of all saved tensors of the last checkpoints. Raises CheckFailed at a difference."""
    step = f"checkpoints/step_{RESUME_STEPS:08d}"
    files = sorted((expected / step).glob("*.safetensors"))
    if not files:
        raise CheckFailed(f"the run saved no {step}")
    for file in files:
        if read_tensors(file) != read_tensors(actual / step / file.name):
            raise CheckFailed(f"weights or optimizer states differ in {file.name}")


def read_tensors(path: Path) -> tuple[dict[str, Any], str]:
    """Return the names and places of a safetensors file's tensors, and the hash of their bytes."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        return header, hashlib.file_digest(file, "sha256").hexdigest()


MEMORY_TOLERANCE = 0.10
WORKSPACES = 64 << 20  # bytes that torch allocates for cuBLAS on Hopper; the forecast does not count them


def memory(session: Session, row: Row) -> Outcome:
    """Compare the peak memory of a run with the plan's forecast."""
    from megatron_llama.config import load_config
    from megatron_llama.plan import resolve
    from megatron_llama.plan.memory import stage_footprints

    folder, base = f"memory/{row.folder}", TABLE["memory"][row.model]
    words = (*base, "trainer.compile=false", *row.settings, *QUIET, "trainer.steps=3", NO_SAVE)
    forecast = stage_footprints(resolve(load_config([f"device={session.device}", *words], CONF_DIR), 1))[0]
    if session.is_accelerator:
        run = session.train(folder, *words)
        return judge_memory(int(max(run.column("peak_memory_bytes"))), forecast.total, WORKSPACES)
    # A CPU's peak is the memory of the process, with Python and libraries: trace the tensors that a step allocates.
    run = session.train(folder, *words, "trainer.profile=[2,3]", program="profile")
    profile = read_json(run.folder / processes.PROFILING / "profile/profile.json")
    allocated = forecast.total - forecast.weights - forecast.optimizer
    return judge_memory(int(profile["ranks"][0]["peak_bytes"]), allocated)


def judge_memory(measured: int, forecast: int, workspaces: int = 0) -> Outcome:
    """Return the difference. Raises CheckFailed if it is larger than the tolerance.

    Args:
        workspaces: bytes that the measured memory may have in addition.
    """
    error = measured / forecast - 1
    values = {"measured": measured, "forecast": forecast, "error": abs(error)}
    text = f"peak {gib(measured)}, forecast {gib(forecast)}, {error:+.1%}"
    is_near = abs(error) <= MEMORY_TOLERANCE
    if not is_near and 0 < measured - forecast <= workspaces:
        text += f", within the {gib(workspaces)} of workspaces that the forecast omits"
    elif not is_near:
        raise CheckFailed(f"{text}: more than {MEMORY_TOLERANCE:.0%} apart", values)
    return Outcome(text, values)


# Generation.
TOKENS, VOCABULARY = 200, 384
PROMPTS = ("def check(session", "Return the", "import", "x")


def generate(session: Session, row: Row) -> Outcome:
    """Compare greedy texts of the device with the CPU's, in fp32, or measure the speed, in bf16."""
    model, tokenizer = session.share("random model", lambda: _random_model(session))
    dtype = "float32" if row.name == "fp32" else "bfloat16"

    def write(device: str) -> processes.Process:
        words = [str(program_files()["generate"]), str(model), "--tokenizer", str(tokenizer), "--device", device]
        words += ["--dtype", dtype, "--greedy", "--max-new-tokens", str(TOKENS), "--prompt", *PROMPTS]
        return session.succeed(f"generation/{device}_{dtype}", *words)

    written = write(session.device)
    if row.name == "fp32":
        if written.stdout != write(HOST).stdout:
            raise CheckFailed("greedy texts differ from the CPU's, see generation/")
        return Outcome(f"greedy texts of {len(PROMPTS)} prompts equal the CPU's")
    speed = re.search(r"[\d,.]+ tokens/s", written.output)
    return Outcome(speed[0] if speed else "no text")


def _random_model(session: Session) -> tuple[Path, Path]:
    """Return the Hugging Face folder of a model with random weights, and a tokenizer of this program's text."""
    sizes = (f"model.vocab_size={VOCABULARY}", "model.max_position_embeddings=512", "model.initializer_range=0.3")
    no_steps = ("trainer.steps=0", "checkpoint.export_hf=true", "trainer.precision=fp32")
    folder = session.train("generation/model", *shape(session), *sizes, *QUIET, *no_steps).folder
    text, tokenizer = folder / "text.jsonl", folder / "tokenizer"
    lines = [json.dumps({"text": path.read_text()}) for path in sorted(Path(__file__).parent.glob("*.py"))]
    text.write_text("\n".join(lines) + "\n")
    arguments = ("--input", str(text), "--vocab-size", str(VOCABULARY), "--model-prefix", str(tokenizer))
    session.succeed("generation/tokenizer", str(program_files()["train-tokenizer"]), *arguments)
    return folder / "hf", tokenizer.with_suffix(".model")


# Speed of layers of a 1 B, 7 B and 8 B Llama: installed peers, torch.compile, float8, a trace, a long sequence.
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


def layers_of(session: Session, name: str) -> Shape:
    """Return the shape for the memory of the devices."""
    if session.small:
        return SMALL_SHAPE
    memory = min((card["memory_bytes"] for card in session.environment["cards"]), default=0)
    chosen = Shape(*TABLE["shapes"][name])
    return chosen if memory >= LEAST_MEMORY else chosen._replace(layers=chosen.layers // 2 or 8, batch=1)


def layer_settings(chosen: Shape) -> tuple[str, ...]:
    """Return the overrides of a run of train.py with this shape."""
    layers = (f"model.num_hidden_layers={chosen.layers}",) if chosen.layers else ()
    sizes = (f"trainer.micro_batch_size={chosen.batch}", f"trainer.global_batch_size={chosen.batch}")
    return (f"model={chosen.preset}", *layers, f"data.seq_length={chosen.seq_length}", *sizes)


def benchmark(session: Session, row: Row) -> Outcome:
    """Run a row of either part."""
    special = {"trace": _trace, "long context": _long_or_offload, "offload": _long_or_offload}
    return special.get(row.name, _run_benchmark)(session, row)


def _train_layers(session: Session, name: str, chosen: Shape, *words: str, steps: int = FEW_STEPS) -> TrainingRun:
    """Train a shape for some steps, all of which must have finite losses."""
    precision = ["trainer.precision=bf16"] if session.is_accelerator else []
    common = (*QUIET, f"trainer.steps={steps}", NO_SAVE, "optim.lr=1e-4")
    run = session.train(name, *layer_settings(chosen), *precision, *common, *words)
    require_losses(run, steps)
    return run


def _baseline(session: Session, compiled: bool) -> TrainingRun:
    """Return the run in bf16 that others compare with."""
    name, word = f"baseline/{'compiled' if compiled else 'eager'}", f"trainer.compile={str(compiled).lower()}"
    return session.share(name, lambda: _train_layers(session, name, layers_of(session, "7B"), word, steps=SPEED_STEPS))


def _compiles(session: Session) -> bool:
    return session.is_accelerator and not session.environment["compiler_missing"]


def compilation(session: Session, _: Row) -> Outcome:
    """Compare compiled with eager runs."""
    session.require_compiler()
    compiled, eager = (_baseline(session, mode) for mode in (True, False))
    detail, values = compare_runs("compiled", compiled, "eager", eager, COMPILED_TOLERANCE)
    second = _train_layers(
        session, "compile/second", layers_of(session, "7B"), "trainer.compile=true", steps=SPEED_STEPS
    )
    misses = re.search(r"misses (\d+)", second.output)
    if misses is None or int(misses[1]):
        count = "an unknown number of" if misses is None else misses[1]
        raise CheckFailed(f"the second start compiled {count} graphs; {detail}", values)
    return Outcome(f"{detail}; no new graphs at the second start", values)


def float8(session: Session, row: Row) -> Outcome:
    """Compare a recipe of trainer.float8 with bf16."""
    base = _baseline(session, _compiles(session))
    words = (f"trainer.compile={str(_compiles(session)).lower()}", f"trainer.float8={row.name}")
    run = _train_layers(session, f"float8/{row.name}", layers_of(session, "7B"), *words, steps=SPEED_STEPS)
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
    words = (*layer_settings(layers_of(session, "7B")), "trainer.profile=[3,4]", *MOCK_RUN)
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
    chosen, words = layers_of(session, row.model), ("trainer.compile=false", "trainer.offload=[activations,optimizer]")
    if row.name == "long context":
        tokens = 512 if session.small else LONG_TOKENS
        chosen = chosen._replace(seq_length=tokens, batch=1)
        words = ("trainer.recompute=full", f"model.max_position_embeddings={tokens}")
    run = _train_layers(session, f"extras/{row.folder}", chosen, *words)
    speed, peak = run.tokens_per_second, int(max(run.column("peak_memory_bytes")))
    return Outcome(f"{speed:,.0f} tokens/s, peak {gib(peak)}", {"tokens_per_second": speed, "peak_bytes": peak})


def _run_benchmark(session: Session, row: Row) -> Outcome:
    """Run programs of the training benchmark round-robin, in this environment."""
    if not IN_CHECKOUT:
        raise NotRun("the benchmark needs a checkout")
    if "compiled" in row.settings:
        session.require_compiler()
    chosen, name = layers_of(session, row.model), f"benchmark/{row.folder}"
    output = session.work / session.prefix / name / "result"
    words = [
        *("-m", "benchmarks", "train", "--installed", *row.settings, "--models", chosen.preset),
        *(("--layers", str(chosen.layers)) if chosen.layers else ()),
        *("--seq-length", str(chosen.seq_length), "--batch", str(chosen.batch), "--device", session.device),
        *("--precision", "bf16" if session.is_accelerator else "fp32"),
        *("--rounds", str(ROUNDS), "--steps", str(STEPS), "--output", str(output)),
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    process = session.run(name, words, compiles=True)
    path = output.with_suffix(".json")
    if not path.is_file():
        if NOT_INSTALLED in process.output:
            raise NotRun(NOT_INSTALLED)
        raise CheckFailed(f"{process.last_lines(1)}, see {name}/{processes.LOG}")
    session.redact.copy(path, session.folder / session.prefix / name / "result.json")
    return judge_benchmark(read_json(path))


def judge_benchmark(record: dict[str, Any]) -> Outcome:
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


# The device and its kernels, which programs of this package measure.
MATMUL_TOLERANCE = 1e-4


def environment(session: Session, row: Row) -> Outcome:
    """Judge the facts that were collected before the first part."""
    facts = session.environment
    if row.name == "compiler":
        session.require_compiler()
        return Outcome(facts["compiler"] or "torch.compile's requirements are installed")
    if row.name == "versions":
        cards = ", ".join(dict.fromkeys(card["name"] for card in facts["cards"])) or facts["device"]
        versions = f"torch {facts['packages']['torch']}, Python {facts['python']}"
        return Outcome(f"{facts['count']} x {cards}, {versions}", facts)
    error = facts["matmul_error"]
    if isinstance(error, str):
        raise CheckFailed(f"the first matmul failed: {error}")
    if not error <= MATMUL_TOLERANCE:
        raise CheckFailed(f"a matmul differs from the CPU's by {error:.1e}")
    return Outcome(f"differs from the CPU's by {error:.1e}", {"error": error})


def rates(session: Session, _: Row) -> Outcome:
    """Return all rates. Raises CheckFailed if a measurement raised."""
    measured = session.module("rates", "environment", session.device, "small" if session.small else "full")
    errors = [f"{name}: {rate}" for name, rate in measured.items() if isinstance(rate, str)]
    if errors:
        raise CheckFailed("; ".join(errors), measured)
    return Outcome(", ".join(f"{name} {rate:,.1f}" for name, rate in measured.items()), measured)


def attention(session: Session, row: Row) -> Outcome:
    """Compare the kernels of a mode with fp64."""
    if compiles := row.name == "compiled":
        session.require_compiler()
    words = session.device, row.name, "small" if session.small else "full"
    return judge_attention(session.module(f"attention/{row.name}", "attention", *words, compiles=compiles))


def judge_attention(results: Sequence[dict[str, Any]]) -> Outcome:
    """Return the largest error of all cases. Raises CheckFailed if a case failed or is too far."""
    values: dict[str, Any] = {"cases": list(results)}
    absent = [result["name"] for result in results if result["error"] is None]
    measured = [result for result in results if result["error"] is not None]
    wrong = [each for each in measured if isinstance(each["error"], str) or not each["error"] <= each["tolerance"]]
    if wrong:
        error = wrong[0]["error"]
        text = error if isinstance(error, str) else f"{error:.1e} from fp64, at most {wrong[0]['tolerance']:.0e}"
        more = f"; {len(wrong) - 1} more of {len(measured)} cases" if len(wrong) > 1 else ""
        raise CheckFailed(f"{wrong[0]['name']} by {wrong[0]['kernel']}: {text}{more}", values)
    if not measured:
        raise NotRun("no kernel is available")
    worst = max(measured, key=lambda result: float(result["error"] / result["tolerance"]))
    detail = f"{len(measured)} cases; {worst['name']} by {worst['kernel']} is {worst['error']:.1e} from fp64"
    unavailable = f"; {len(absent)} cases have no kernel here" if absent else ""
    return Outcome(detail + unavailable, values | {"error": worst["error"]})
