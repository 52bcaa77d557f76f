"""What generate and evaluate share: the arguments that name a model, opening that model, and reporting mistakes."""

from __future__ import annotations

import argparse
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from megatron_llama.config import Config, ConfigError, DataConfig, DeviceConfig, ModelConfig, Problem, TrainerConfig
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_USER

# What needs torch is imported where it is used, so that --help is quick.
if TYPE_CHECKING:
    from megatron_llama.plan import Plan
    from megatron_llama.text.tokenizer import Tokenizer
    from megatron_llama.tools.inference.generator import Generator
    from megatron_llama.tools.inference.saved_model import SavedModel

T = TypeVar("T")
P = ParamSpec("P")
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16_pure"}
"""--dtype to ``trainer.precision``."""
CHECKPOINT = """\
CHECKPOINT is a training checkpoint of any layout, a run's folder (its newest checkpoint), a Hugging Face folder, or a
PEFT adapter's; what LoRA has trained is added to its base while loading.
"""


class Start(Protocol):
    """Starts the ranks of a plan and returns the exit status, as ``launch.start.start_ranks`` does."""

    def __call__(self, plan: Plan, entry: Callable[[Plan], None]) -> int: ...


@dataclass
class OpenedModel:
    """What the ranks need of a model that was named on the command line."""

    saved: SavedModel
    plan: Plan
    tokenizer: Tokenizer | None
    """None where none is needed and none is known."""


@dataclass(frozen=True)
class Task(ABC):
    """What the ranks do with a model."""

    stop: frozenset[int]
    """The ids that end an answer."""

    @abstractmethod
    def run(self, generator: Generator, opened: OpenedModel, is_first: bool) -> None:
        """The work of one rank. All compute; the first alone reads stdin, prints and writes files."""


class Problems:
    """Collects mistakes, so that the user is told all of them at once."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, field: str, value: object, rule: str, instead: str) -> None:
        """Adds one."""
        self.found.append(Problem(field, value, rule, instead))

    def collect(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Returns what ``work`` returns; where it raises ConfigError, adds its problems and returns None."""
        try:
            return work(*args, **kwargs)
        except ConfigError as error:
            self.found += error.problems
            return None


def model_parser(prog: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """A command line that begins with a model and how it is loaded."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=f"{description}\n{CHECKPOINT}",
        epilog=f"Exit status: 0 done, 2 a mistake in the arguments, else a failure. {epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="CHECKPOINT", help="a checkpoint, a run, or a Hugging Face folder")
    parser.add_argument(
        "--base", type=Path, metavar="FOLDER", help="the model that LoRA was trained on, where its folder has moved"
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share the matrices (default 1)")
    parser.add_argument(
        "--dtype",
        choices=("auto", *PRECISIONS),
        default="auto",
        help="of weights and products; auto: float32 on a CPU, bfloat16 elsewhere",
    )
    parser.add_argument("--device", default="auto", help="as in train.py (default auto)")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="sentencepiece model or Hugging Face folder (default: the model's)",
    )
    return parser


def not_utf8(text: str) -> str | None:
    """What is wrong with a text from a command line or stdin that came as other bytes than UTF-8; None for others."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF  # surrogateescape keeps it so
        return f"is not UTF-8: byte {byte:#04x} after {text[: error.start][-20:]!r}"
    return None


def run_task(
    arguments: argparse.Namespace,
    start: Start,
    make_task: Callable[[argparse.Namespace, OpenedModel, Problems], Task | None],
    problems: Problems,
    *,
    needs_tokenizer: bool = True,
) -> int:
    """Opens the model, and runs the task that is made of the arguments on ranks started by ``start``.

    ``problems`` are those of the arguments themselves. Returns the exit status: the user's mistakes are 2, a damaged
    file is 1, each with one message.
    """
    from megatron_llama.checkpoint.stored_tensors import CorruptFile

    try:
        opened = open_model(arguments, problems, needs_tokenizer=needs_tokenizer)
        task = None if opened is None else make_task(arguments, opened, problems)
        if problems.found:
            raise ConfigError(problems.found)
        assert opened is not None and task is not None, "without problems there is a task"
        return start(opened.plan, partial(_run_rank, opened, task))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER
    except CorruptFile as error:
        sys.stderr.write(f"damaged: {error}\n")
        return EXIT_FAILED


def _run_rank(opened: OpenedModel, task: Task, plan: Plan) -> None:
    from megatron_llama.tools.inference.generator import open_generator

    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # not every terminal has UTF-8
    try:
        with open_generator(opened.saved, plan, task.stop) as generator:
            task.run(generator, opened, is_first=os.environ["RANK"] == "0")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered can't be written either
        rule = "its reader has gone, and nothing more is written"
        raise ConfigError([Problem("stdout", None, rule, "let it read to the end, or write to a file")]) from None


def open_model(arguments: argparse.Namespace, problems: Problems, *, needs_tokenizer: bool) -> OpenedModel | None:
    """The model that the arguments name; None where something is wrong, which is then among ``problems``."""
    from megatron_llama.devices import get_device
    from megatron_llama.tools.inference.saved_model import open_saved_model, tokenizer_of

    device = None
    try:
        device = get_device(arguments.device).name
    except ValueError as error:
        problems.add("--device", arguments.device, str(error), "write --device auto")
    if arguments.tp < 1:
        problems.add("--tp", arguments.tp, "must be at least 1", "write --tp 1")
    saved = problems.collect(open_saved_model, arguments.model, arguments.base)
    if saved is None:
        return None
    tokenizer = None
    if needs_tokenizer or arguments.tokenizer is not None or saved.tokenizer is not None:
        tokenizer = problems.collect(tokenizer_of, saved, arguments.tokenizer)
    if device is None or arguments.tp < 1:
        return None
    plan = problems.collect(inference_plan, saved.model, arguments.tp, device, arguments.dtype)
    if plan is None or (tokenizer is None and needs_tokenizer):
        return None
    return OpenedModel(saved, plan, tokenizer)


def inference_plan(model: ModelConfig, tp: int, device: str, dtype: str = "auto") -> Plan:
    """The plan of ``tp`` ranks that share a model and only answer.

    ``auto`` is float32 on a CPU, since one without bf16 units multiplies bf16 several times slower, else bfloat16.
    Raises ConfigError, in terms of --tp, where the model can't be split so.
    """
    from megatron_llama.devices import device_named
    from megatron_llama.plan import resolve
    from megatron_llama.tools.inference.saved_model import restated

    if dtype == "auto":
        dtype = "bfloat16" if device_named(device).is_accelerator else "float32"
    # sp: a single token can't be split along the sequence.
    trainer = TrainerConfig(tp=tp, sp=False, global_batch_size=1, steps=0, precision=PRECISIONS[dtype])
    data = DataConfig(name="none", mock=True, seq_length=1)

    def in_terms_of_tp(problem: Problem) -> Problem:
        rule, instead = (text.replace("trainer.tp=", "--tp ") for text in (problem.rule, problem.instead))
        return replace(problem, field=problem.field.replace("trainer.tp", "--tp"), rule=rule, instead=instead)

    with restated(in_terms_of_tp):
        return resolve(Config(model=model, data=data, trainer=trainer, device=DeviceConfig(name=device)), tp)
