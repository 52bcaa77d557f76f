"""Speed of layers of a 1 B and a 7 B Llama: a trace, then this program and installed peers, one process at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_llama.system.files import read_json
from megatron_llama.system.programs import IN_CHECKOUT
from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.prove_gpu.checks import Check, CheckFailed, NotRun, Outcome
from megatron_llama.tools.prove_gpu.session import LOG

if TYPE_CHECKING:
    from megatron_llama.tools.prove_gpu.session import Session

OURS = "ours"
PROGRAMS = (OURS, "transformers", "torchtitan")
MODES = ("compiled", "eager")
ROUNDS, STEPS = 1, 5
NOT_INSTALLED = "not installed in this environment"


class Shape(NamedTuple):
    """Layers of a model."""

    name: str
    preset: str
    layers: int
    seq_length: int
    batch: int


SHAPES = (Shape("7B", "llama7b", 4, 4096, 2), Shape("1B", "llama3_1b", 8, 4096, 2))
"""Weights, gradients and Adam's states of both take 17 to 20 GiB."""
SMALL_SHAPES = (Shape("tiny", "llama_2m", 2, 64, 2),)
LEAST_MEMORY = 24 << 30  # cards with less memory run half of the layers and of the batch


def shapes(session: Session) -> list[Shape]:
    """Return the shapes for the memory of the cards."""
    if session.small:
        return list(SMALL_SHAPES)
    memory = min((card["memory_bytes"] for card in session.environment["cards"]), default=LEAST_MEMORY)
    if memory > LEAST_MEMORY + (8 << 30):
        return list(SHAPES)
    return [shape._replace(layers=shape.layers // 2, batch=1) for shape in SHAPES]


def checks(session: Session) -> Sequence[Check[Session]]:
    """Return the checks: the trace, then each program in its fastest mode, then the rest."""
    compiles = not session.environment["compiler_missing"]
    modes = [mode for mode in MODES if mode == "eager" or compiles]
    rows = [
        Check(f"{shape.name}, {program}, {mode}", partial(_measure, shape, program, mode))
        for mode in modes
        for shape in shapes(session)
        for program in PROGRAMS
    ]
    return [Check("trace", _trace), *rows]


def _trace(session: Session) -> Outcome:
    """Profile a few steps of the first shape."""
    shape = shapes(session)[0]
    run = session.train(
        "benchmark/trace",
        *(f"model={shape.preset}", f"model.num_hidden_layers={shape.layers}", f"data.seq_length={shape.seq_length}"),
        *(f"trainer.micro_batch_size={shape.batch}", f"trainer.global_batch_size={shape.batch}"),
        *("trainer.profile=[3,4]", *MOCK_RUN, *_precision(session)),
        program="profile",
    )
    folder = run.folder / "profiling/profile"
    traces = sorted(path.name for path in folder.glob("trace.*"))
    if not traces:
        raise CheckFailed("the profiler wrote no trace")
    seconds = read_json(folder / "profile.json")["ranks"][0]["step_s"]
    return Outcome(f"{shape.name}: a step of {seconds * 1e3:.0f} ms, traces of {len(traces)} rank", {"step_s": seconds})


def _precision(session: Session) -> list[str]:
    return ["trainer.precision=bf16"] if session.is_accelerator else []


def _measure(shape: Shape, program: str, mode: str, session: Session) -> Outcome:
    """Run one program of the training benchmark, in this environment."""
    if not IN_CHECKOUT:
        raise NotRun("the benchmark needs a checkout")
    name = f"benchmark/{shape.name}_{program}_{mode}"
    output = session.work / name / "result"
    precision = "bf16" if session.is_accelerator else "fp32"
    words = [
        *("-m", "benchmarks", "train", "--installed", "--peers", program, "--modes", mode),
        *("--models", shape.preset, "--layers", str(shape.layers), "--seq-length", str(shape.seq_length)),
        *("--batch", str(shape.batch), "--precision", precision, "--device", session.device),
        *("--rounds", str(ROUNDS), "--steps", str(STEPS), "--output", str(output)),
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    process = session.run(name, words, hangs_after=session.clock.left)
    path = output.with_suffix(".json")
    if not path.is_file():
        if NOT_INSTALLED in process.output:
            raise NotRun(NOT_INSTALLED)
        raise CheckFailed(f"{process.last_lines(1)}, see {name}/{LOG}")
    session.redact.copy(path, session.folder / name / "result.json")
    return judge(read_json(path), program)


def judge(record: dict[str, Any], program: str) -> Outcome:
    """Return tokens/s and MFU of a record of the training benchmark. Raises CheckFailed if the program is excluded."""
    results = [(cell["flops_per_token"], result) for cell in record["cells"] for result in cell["results"]]
    if not results:
        raise CheckFailed("; ".join(f"{name}: {reason}" for name, reason in record["left_out"].items()))
    flops_per_token, result = results[0]
    task = result["task"]
    tokens = task["batch_size"] * task["seq_length"]
    speed = median(tokens * len(turn["step_seconds"]) / sum(turn["step_seconds"]) for turn in result["turns"])
    peak = median(turn["peak_flops"] for turn in result["turns"])
    values = {"tokens_per_second": speed, "mfu": speed * flops_per_token / peak if peak else None}
    values["peak_bytes"] = result["live_bytes"]
    share = f"MFU {values['mfu']:.1%}" if peak else "MFU unknown: the card's peak is not in the table"
    version = result["facts"]["versions"].get(program, "")
    return Outcome(f"{speed:,.0f} tokens/s, {share}{f', version {version}' if version else ''}", values)
