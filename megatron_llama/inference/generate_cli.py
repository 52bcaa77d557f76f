"""``scripts/generate.py``: a model continues prompts, or chats."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron_llama.config.settings import CHAT_TEMPLATES
from megatron_llama.inference.arguments import IMPORTS, OpenedModel, Problems, Start, model_parser, open_model, run

if TYPE_CHECKING:
    from megatron_llama.inference.generator import Speed
    from megatron_llama.inference.prompts import PromptBuilder
    from megatron_llama.inference.sampling import Sampling
    from megatron_llama.text.tokenizer import Tokenizer

DESCRIPTION = "Let a model write: python scripts/generate.py CHECKPOINT --prompt TEXT, or --chat\n"
EPILOG = "Text goes to stdout, tokens/s to stderr."


@dataclass(frozen=True)
class Request:
    """What the ranks are to do."""

    tokenizer: Tokenizer
    stop: frozenset[int]
    """The ids that end an answer."""
    sampling: Sampling
    max_new_tokens: int
    texts: list[str]
    """What is continued; empty for a conversation."""
    chat: PromptBuilder | None
    """For a conversation."""
    system: str | None


def main(argv: Sequence[str], start: Start) -> int:
    """Runs ``scripts/generate.py`` with ``argv``, its ranks started by ``start``; returns the exit status."""
    arguments = parser().parse_args(argv)
    return run(lambda: _main(arguments, start))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = model_parser("generate.py", DESCRIPTION, EPILOG)
    made.add_argument("--prompt", nargs="+", default=[], metavar="TEXT", help="texts to continue, as one batch")
    made.add_argument("--chat", action="store_true", help="a conversation on stdin, in a chat template")
    made.add_argument("--chat-template", choices=CHAT_TEMPLATES, help="default: the run's, else own")
    made.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    made.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="of each answer (default 256)")
    made.add_argument("--temperature", type=float, help="logits are divided by this (default 0.7)")
    made.add_argument("--top-p", type=float, help="draw among the fewest ids with this much probability (default 1)")
    made.add_argument("--greedy", action="store_true", help="always the likeliest id")
    made.add_argument("--seed", type=int, help="of the draws (default 1234)")
    return made


def _main(arguments: argparse.Namespace, start: Start) -> int:
    problems = Problems()
    sampling = _sampling(arguments, problems)
    opened = open_model(arguments, problems)
    request = None if opened is None else _request(arguments, opened, sampling, problems)
    problems.raise_if_any()
    assert opened is not None and request is not None, "without problems there is a model"
    return start(partial(generate_rank, opened, request), opened.plan, imports=IMPORTS)


def _sampling(arguments: argparse.Namespace, problems: Problems) -> Sampling:
    """How answers are drawn; all that can be wrong with the arguments themselves is added to ``problems``."""
    from megatron_llama.inference.sampling import Sampling

    if bool(arguments.prompt) == arguments.chat:
        given = "both are given" if arguments.chat else "neither is given"
        problems.add("--chat", None, f"one of --prompt and --chat is needed, and {given}", "write one of them")
    if arguments.system is not None and not arguments.chat:
        problems.add("--system", arguments.system, "is a part of conversations", "write --chat too, or leave it out")
    if arguments.chat_template is not None and not arguments.chat:
        problems.add("--chat-template", arguments.chat_template, "is for conversations", "write --chat too")
    if arguments.max_new_tokens < 1:
        problems.add("--max-new-tokens", arguments.max_new_tokens, "must be at least 1", "write --max-new-tokens 64")
    values = {"temperature": arguments.temperature, "top_p": arguments.top_p, "seed": arguments.seed}
    given_values = {name: value for name, value in values.items() if value is not None}
    for name, value in given_values.items() if arguments.greedy else ():
        flag = f"--{name.replace('_', '-')}"
        problems.add(flag, value, "has no effect with --greedy", f"leave out --greedy or {flag}")
    if not given_values.get("temperature", 1) > 0:
        problems.add("--temperature", arguments.temperature, "must be above 0", "write --greedy for the likeliest ids")
    if not 0 < given_values.get("top_p", 1) <= 1:
        problems.add("--top-p", arguments.top_p, "must be above 0 and at most 1", "write --top-p 0.9")
    return Sampling(greedy=arguments.greedy, **given_values)


def _request(arguments: argparse.Namespace, opened: OpenedModel, sampling: Sampling, problems: Problems) -> Request:
    """What the ranks are to do; prompts that do not fit the model, and a template that can't be used, are problems."""
    from megatron_llama.config import ConfigError
    from megatron_llama.inference.prompts import open_prompt_builder
    from megatron_llama.inference.saved_model import stop_ids

    assert opened.tokenizer is not None
    saved, tokenizer, builder = opened.saved, opened.tokenizer, None
    if arguments.chat:
        name, trained = arguments.chat_template, saved.trained_template
        builder = problems.collect(open_prompt_builder, tokenizer, name, trained, "own")
        if builder is not None:  # a template may refuse a system message
            system = [{"role": "system", "content": arguments.system}] if arguments.system is not None else []
            problems.collect(builder.ids, [*system, {"role": "user", "content": "Hello"}])
    for text in arguments.prompt:
        _check_prompt(text, len(tokenizer.encode(text)), saved.model.max_position_embeddings, problems)
    stop = stop_ids(saved, tokenizer)
    if builder is not None:
        stop |= builder.stop
    elif saved.trained_template is not None:
        # A model that learned to end its answers may end any text so.
        try:
            stop |= open_prompt_builder(tokenizer, None, saved.trained_template, "own").stop
        except ConfigError:
            pass  # its tokenizer can't be used with that template: then there is no such id
    system, texts = arguments.system, arguments.prompt
    return Request(tokenizer, stop, sampling, arguments.max_new_tokens, texts, builder, system)


def _check_prompt(text: str, count: int, context: int, problems: Problems) -> None:
    shown = text if len(text) < 40 else text[:36] + " ..."
    if count >= context:
        rule = f"has {count} tokens, and the model has {context} positions for prompt and answer"
        problems.add("--prompt", shown, rule, "write a shorter one")
    elif count == 0:
        problems.add("--prompt", shown, "has no token, and the model continues tokens", "write at least a word")


def generate_rank(opened: OpenedModel, request: Request) -> None:
    """The work of one rank. All compute; rank 0 reads and prints."""
    from megatron_llama.inference.chat import Chat
    from megatron_llama.inference.generator import open_generator
    from megatron_llama.inference.stream import Printer

    is_first, tokenizer = os.environ["RANK"] == "0", request.tokenizer
    with open_generator(opened.saved, opened.plan, request.stop) as generator:
        if request.chat is not None:
            chat = Chat(generator, request.chat, request.sampling, request.max_new_tokens, request.system)
            chat.run(sys.stdin, sys.stdout)
        else:
            ids = [tokenizer.encode(text) for text in request.texts]
            printer = Printer(sys.stdout, tokenizer, request.texts, ids) if is_first else None
            generator.generate(ids, request.sampling, request.max_new_tokens, printer)
        if is_first and generator.speed.new_tokens:
            sys.stderr.write(describe(generator.speed) + "\n")


def describe(speed: Speed) -> str:
    """``64 tokens, 52.1 tokens/s (after 12 tokens of prompts in 0.10 s)``."""
    return (
        f"{speed.new_tokens:,} tokens, {speed.tokens_per_second:,.1f} tokens/s "
        f"(after {speed.prompt_tokens:,} tokens of prompts in {speed.prompt_seconds:.2f} s)"
    )
