"""What generating and evaluating share: a source, its tokenizer, a device and a plan; all mistakes in one message."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_USER

if TYPE_CHECKING:
    import argparse

    from megatron_llama.config import Problem
    from megatron_llama.inference.load import Source
    from megatron_llama.inference.prompts import PromptBuilder
    from megatron_llama.plan import Plan
    from megatron_llama.text.tokenizer import Tokenizer

T = TypeVar("T")
# What ranks run with; imported once, before they are forked.
IMPORTS = ("megatron_llama.inference.accuracy", "megatron_llama.inference.chat")


class Start(Protocol):
    """Starts the ranks of a plan and returns the exit status, as ``launch.start.run_on_this_machine`` does."""

    def __call__(self, work: Callable[[], None], plan: Plan, *, imports: Sequence[str]) -> int: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and how it is loaded."""
    parser.add_argument("model", type=Path, metavar="CHECKPOINT", help="a checkpoint, a run, or a Hugging Face folder")
    parser.add_argument(
        "--base", type=Path, metavar="FOLDER", help="the model that LoRA was trained on, where its folder has moved"
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share the matrices (default 1)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
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


@dataclass
class Loaded:
    """A model that can be started."""

    source: Source
    plan: Plan
    text: Tokenizer | None
    """None where none is needed and none is known."""
    stop: frozenset[int]
    prompts: PromptBuilder | None = None
    """What conversations are put in, where there are any."""


class Problems:
    """Collects what is wrong, so that the user hears of all of it."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, field: str, value: object, rule: str, instead: str) -> None:
        """One more."""
        from megatron_llama.config import Problem

        self.found.append(Problem(field, value, rule, instead))

    def of(self, work: Callable[[], T]) -> T | None:
        """What ``work`` gives; None, and its problems are added, where it raises ConfigError."""
        from megatron_llama.config import ConfigError

        try:
            return work()
        except ConfigError as error:
            self.found += error.problems
            return None

    def check(self) -> None:
        """Raises ConfigError where there are any."""
        from megatron_llama.config import ConfigError

        if self.found:
            raise ConfigError(self.found)


def open_model(arguments: argparse.Namespace, problems: Problems, *, needs_text: bool = True) -> Loaded | None:
    """The model that the arguments name; None where something is wrong, which is then among ``problems``."""
    from megatron_llama.devices import get_device
    from megatron_llama.inference.load import inference_plan, open_source, stop_ids, tokenizer_of

    device = None
    try:
        device = get_device(arguments.device)
    except ValueError as error:
        problems.add("--device", arguments.device, str(error), "write --device auto")
    if arguments.tp < 1:
        problems.add("--tp", arguments.tp, "must be at least 1", "write --tp 1")
    source = problems.of(lambda: open_source(arguments.model, arguments.base))
    if source is None:
        return None
    text = None
    if needs_text or arguments.tokenizer is not None or source.tokenizer is not None:
        text = problems.of(lambda: tokenizer_of(source, arguments.tokenizer))
    if device is None or arguments.tp < 1:
        return None
    plan = problems.of(lambda: inference_plan(source, arguments.tp, device.name, arguments.dtype))
    if plan is None or (text is None and needs_text):
        return None
    return Loaded(source, plan, text, frozenset() if text is None else stop_ids(source, text))


def open_prompt_builder(loaded: Loaded, template: str | None, otherwise: str) -> None:
    """Have the model asked in ``template``, else as it was taught, else ``otherwise``, and stop at that one's own end;
    raises ConfigError where its tokenizer can't."""
    from megatron_llama.inference import prompts

    assert loaded.text is not None
    loaded.prompts = prompts.open_prompt_builder(loaded.text, template, loaded.source.trained_template, otherwise)
    loaded.stop |= loaded.prompts.stop


def run(main: Callable[[], int]) -> int:
    """``main`` with the exit status of its mistakes: 2 the user's, 1 a damaged file."""
    from megatron_llama.checkpoint.stored_tensors import CorruptFile
    from megatron_llama.config import ConfigError

    try:
        return main()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER
    except CorruptFile as error:
        sys.stderr.write(f"damaged: {error}\n")
        return EXIT_FAILED
