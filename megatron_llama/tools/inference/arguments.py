"""Common arguments of scripts/generate.py and scripts/evaluate.py, model loading and error reports."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from megatron_llama.config import Config, ConfigError, ModelConfig, Problem
from megatron_llama.config.settings import DataConfig, DeviceConfig, TrainerConfig
from megatron_llama.system.errors import MachineError
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_PIPE, EXIT_USER
from megatron_llama.system.object_store import location
from megatron_llama.system.programs import name_commands
from megatron_llama.system.rerun_command import ArgumentParser

# Modules that import torch are imported in functions, so that --help is quick.
if TYPE_CHECKING:
    from megatron_llama.plan import Plan
    from megatron_llama.text.tokenizer import Tokenizer
    from megatron_llama.tools.inference.generator import Generator
    from megatron_llama.tools.inference.saved_model import SavedModel

T = TypeVar("T")
P = ParamSpec("P")
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16_pure"}  # --dtype to ``trainer.precision``
CHECKPOINT = """\
CHECKPOINT is a training checkpoint of any layout, a run's folder (its newest
checkpoint), a Hugging Face folder, or a PEFT adapter's folder. LoRA weights
are merged into their base while loading.
"""


@dataclass
class OpenedModel:
    """Model of the command line, as the ranks need it."""

    saved: SavedModel
    plan: Plan
    tokenizer: Tokenizer | None
    """None only if the task needs no tokenizer."""


class Task(NamedTuple):
    """Work of the ranks with a model."""

    stop: frozenset[int]
    """Ids that end an answer."""
    run: Callable[[Generator, OpenedModel, bool], None]
    """Runs the work of one rank, whose bool is True on rank 0. Picklable, for spawned ranks. All ranks compute; only
    rank 0 reads stdin, prints and writes files."""


Progress = Callable[[int, int], None]
"""Callback with (completed, total) windows or records."""
Measure = Callable[["Generator", OpenedModel, Progress], dict[str, Any]]
"""Returns the results of an evaluation by their names in the report. Picklable. All ranks must call it."""


class Problems:
    """Collector of problems, which are reported together."""

    def __init__(self) -> None:
        self.items: list[Problem] = []

    def add(self, field: str, value: object, rule: str, instead: str) -> None:
        """Add a problem."""
        self.items.append(Problem(field, value, rule, instead))

    def collect(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call ``work`` and return its result; if it raises ConfigError, add its problems and return None."""
        try:
            return work(*args, **kwargs)
        except ConfigError as error:
            self.items += error.problems
            return None


def model_parser(description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that name and load a model."""
    parser = ArgumentParser(
        description=name_commands(f"{description}\n{CHECKPOINT}"),
        epilog=f"Exit status: 0 success, 2 invalid arguments, other values: failure.\n{epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=location, metavar="CHECKPOINT", help="checkpoint, run or Hugging Face folder")
    add("--base", type=Path, metavar="FOLDER", help="base model of LoRA, if its folder has moved")
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
    add("--cp", type=int, default=1, metavar="N", help="context-parallel ranks, which divide prompts (default: 1)")
    text = "dtype of weights and matmuls; auto: float32 on CPU, else bfloat16"
    add("--dtype", choices=("auto", *PRECISIONS), default="auto", help=text)
    add("--device", default="auto", help="device, as in training (default: auto)")
    text = "sentencepiece model or Hugging Face folder (default: from the model)"
    add("--tokenizer", type=Path, metavar="PATH", help=text)
    return parser


def not_utf8(text: str) -> str | None:
    """Return the problem of a text from the command line or stdin that is not UTF-8; None for valid text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF  # surrogateescape preserves the byte
        return f"is not UTF-8: byte {byte:#04x} after {text[: error.start][-20:]!r}"
    return None


def run_task(
    arguments: argparse.Namespace,
    make_task: Callable[[argparse.Namespace, OpenedModel, Problems], Task | None],
    problems: Problems,
    *,
    needs_tokenizer: bool = True,
) -> int:
    """Open the model, create the task and run it on the ranks; return the exit status.

    ``make_task`` adds to ``problems``. The status is 2 after problems, 1 for a corrupt file.
    """
    from megatron_llama.checkpoint.tensor_source import CorruptFile
    from megatron_llama.launch.start import start_ranks

    try:
        opened = open_model(arguments, problems, needs_tokenizer=needs_tokenizer)
        task = None if opened is None else make_task(arguments, opened, problems)
        if problems.items:
            raise ConfigError(problems.items)
        assert opened is not None and task is not None, "otherwise there are problems"
        return start_ranks(opened.plan, partial(_run_rank, opened, task))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER
    except CorruptFile as error:
        sys.stderr.write(f"damaged: {error}\n")
        return EXIT_FAILED


def _run_rank(opened: OpenedModel, task: Task, plan: Plan) -> None:
    from megatron_llama.checkpoint.tensor_source import CorruptFile
    from megatron_llama.tools.inference.generator import open_generator

    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # for terminals without UTF-8
    try:
        tokenizer = opened.tokenizer
        missing = [] if tokenizer is None else tokenizer.missing_ids(plan.model.vocab_size)
        with open_generator(opened.saved, plan, task.stop, missing) as generator:
            task.run(generator, opened, os.environ["RANK"] == "0")
        sys.stdout.flush()
    except CorruptFile as error:  # of the weights, which only ranks read
        raise MachineError(f"damaged: {error}") from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard the buffered output
        raise SystemExit(EXIT_PIPE) from None


def open_model(arguments: argparse.Namespace, problems: Problems, *, needs_tokenizer: bool) -> OpenedModel | None:
    """Open the model of the arguments; on errors return None and add to ``problems``."""
    from megatron_llama.devices import get_device
    from megatron_llama.tools.inference.saved_model import has_tokenizer, open_saved_model, tokenizer_of

    device = None
    try:
        device = get_device(arguments.device).name
    except ValueError as error:
        problems.add("--device", arguments.device, str(error), "write --device auto")
    for axis in ("tp", "cp"):
        if getattr(arguments, axis) < 1:
            problems.add(f"--{axis}", getattr(arguments, axis), "must be at least 1", f"write --{axis} 1")
    saved = problems.collect(open_saved_model, arguments.model, arguments.base)
    if saved is None:
        return None
    tokenizer = None
    is_known = saved.tokenizer is not None and has_tokenizer(saved.tokenizer)
    if needs_tokenizer or arguments.tokenizer is not None or is_known:
        tokenizer = problems.collect(tokenizer_of, saved, arguments.tokenizer)
    if device is None or min(arguments.tp, arguments.cp) < 1:
        return None
    plan = problems.collect(inference_plan, saved.model, arguments.tp, device, arguments.dtype, arguments.cp)
    if plan is None or (tokenizer is None and needs_tokenizer):
        return None
    return OpenedModel(saved, plan, tokenizer)


def inference_plan(model: ModelConfig, tp: int, device: str, dtype: str = "auto", cp: int = 1) -> Plan:
    """Return the plan of ``tp * cp`` ranks for inference.

    Args:
        dtype: auto is bfloat16, on a CPU float32, because bf16 is slow on CPUs without bf16 units.

    Raises ConfigError if the model cannot be split; its problems name --tp.
    """
    from megatron_llama.devices import device_named
    from megatron_llama.plan import resolve
    from megatron_llama.tools.inference.saved_model import restated

    if dtype == "auto":
        dtype = "bfloat16" if device_named(device).is_accelerator else "float32"
    # sp=False: a single token cannot be split along the sequence. zero=0: each rank has its whole matrices.
    trainer = TrainerConfig(tp=tp, cp=cp, sp=False, zero=0, global_batch_size=1, steps=0, precision=PRECISIONS[dtype])
    data = DataConfig(name="none", mock=True, seq_length=1 if cp == 1 else 2 * cp)  # sequences are padded

    def in_terms_of_arguments(problem: Problem) -> Problem:
        field, rule, instead = (
            text.replace("trainer.tp=", "--tp ").replace("trainer.cp=", "--cp ").replace("trainer.", "--")
            for text in (problem.field, problem.rule, problem.instead)
        )
        return replace(problem, field=field, rule=rule, instead=instead)

    with restated(in_terms_of_arguments):
        return resolve(Config(model=model, data=data, trainer=trainer, device=DeviceConfig(name=device)), tp * cp)
