"""Parts that start train.py: the smoke test, resume, memory, and text of a random model."""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

from megatron_llama.devices import HOST
from megatron_llama.system.files import read_json
from megatron_llama.system.programs import CONF_DIR, program_files
from megatron_llama.system.tables import gib
from megatron_llama.tools.common import MOCK_RUN
from megatron_llama.tools.prove_gpu.checks import TABLE, Outcome, Row
from megatron_llama.tools.prove_gpu.session import PROFILING, CheckFailed, Process, Session, TrainingRun

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
    profile = read_json(run.folder / PROFILING / "profile/profile.json")
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

    def write(device: str) -> Process:
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
