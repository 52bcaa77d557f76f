"""``scripts/generate.py``: a model continues prompts, or chats."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron_llama.config.settings import CHAT_TEMPLATES as TEMPLATES
from megatron_llama.inference import arguments as inference

if TYPE_CHECKING:
    from megatron_llama.inference.arguments import Loaded, Problems
    from megatron_llama.inference.generator import Speed
    from megatron_llama.inference.sampling import Sampling

DESCRIPTION = """\
Let a model write: python scripts/generate.py CHECKPOINT --prompt TEXT, or --chat

CHECKPOINT is a training checkpoint of any layout, a run's folder (its newest checkpoint), a Hugging Face folder, or a
PEFT adapter's; what LoRA has trained is added to its base while loading.
"""
EPILOG = "Text goes to stdout, tokens/s to stderr. Exit status: 0 done, 2 a mistake in what was asked, else a failure."


@dataclass(frozen=True)
class Request:
    """What is asked of the ranks."""

    sampling: Sampling
    max_new_tokens: int
    prompts: list[str]
    system: str | None
    chat: bool


def main(argv: Sequence[str], start: inference.Start) -> int:
    """Runs ``scripts/generate.py`` with ``argv``; returns the exit status."""
    arguments = parser().parse_args(argv)  # first: --help needs no torch
    return inference.run(lambda: _main(arguments, start))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="generate.py", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    inference.add_arguments(made)
    made.add_argument("--prompt", nargs="+", default=[], metavar="TEXT", help="texts to continue, as one batch")
    made.add_argument("--chat", action="store_true", help="a conversation on stdin, in a chat template")
    made.add_argument("--chat-template", choices=TEMPLATES, help="default: what the run was taught in, else own")
    made.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    made.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="of each answer (default 256)")
    made.add_argument("--temperature", type=float, help="logits are divided by this (default 0.7)")
    made.add_argument("--top-p", type=float, help="draw among the fewest ids with this much probability (default 1)")
    made.add_argument("--greedy", action="store_true", help="always the likeliest id")
    made.add_argument("--seed", type=int, help="of what is drawn (default 1234)")
    return made


def _main(arguments: argparse.Namespace, start: inference.Start) -> int:
    problems = inference.Problems()
    request = _request(arguments, problems)
    loaded = inference.open_model(arguments, problems)
    if loaded is not None:
        _ask_in(loaded, arguments, problems)
        _check_texts(loaded, request, problems)
    problems.check()
    assert loaded is not None, "where there is no problem there is a model"
    return start(partial(answer_rank, loaded, request), loaded.plan, imports=inference.IMPORTS)


def _ask_in(loaded: Loaded, arguments: argparse.Namespace, problems: Problems) -> None:
    """A conversation needs its template; of a model that learned one, any text may end as it ends."""
    if arguments.chat:
        problems.of(lambda: inference.open_prompt_builder(loaded, arguments.chat_template, "own"))
    elif loaded.source.trained_template is not None:
        inference.Problems().of(
            lambda: inference.open_prompt_builder(loaded, None, "own")
        )  # without it there is no such end


def _request(arguments: argparse.Namespace, problems: Problems) -> Request:
    from megatron_llama.inference.sampling import Sampling

    if bool(arguments.prompt) == arguments.chat:
        rule = "asks for both" if arguments.chat else "is not asked for, nor a prompt given"
        problems.add("--chat", None, f"{rule}: one of --prompt and --chat", "write --prompt TEXT, or --chat")
    if arguments.system is not None and not arguments.chat:
        problems.add("--system", arguments.system, "is a part of conversations", "write --chat too, or leave it out")
    if arguments.chat_template is not None and not arguments.chat:
        problems.add("--chat-template", arguments.chat_template, "is for conversations", "write --chat too")
    if arguments.max_new_tokens < 1:
        problems.add("--max-new-tokens", arguments.max_new_tokens, "must be at least 1", "write --max-new-tokens 64")
    drawn = {"temperature": arguments.temperature, "top_p": arguments.top_p, "seed": arguments.seed}
    given = {name: value for name, value in drawn.items() if value is not None}
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if arguments.greedy:
            problems.add(
                flag, value, "does nothing with --greedy, which draws nothing", f"leave out --greedy or {flag}"
            )
    if not given.get("temperature", 1) > 0:
        problems.add("--temperature", given["temperature"], "must be above 0", "write --greedy for the likeliest ids")
    if not 0 < given.get("top_p", 1) <= 1:
        problems.add("--top-p", given["top_p"], "must be above 0 and at most 1", "write --top-p 0.9")
    sampling = Sampling(greedy=arguments.greedy, **given)
    return Request(sampling, arguments.max_new_tokens, arguments.prompt, arguments.system, arguments.chat)


def _check_texts(loaded: Loaded, request: Request, problems: Problems) -> None:
    """Whether the prompts fit the model, and the tokenizer has a template that takes such a conversation."""
    assert loaded.text is not None
    text, context = loaded.text, loaded.source.model.max_position_embeddings
    if request.chat and loaded.prompts is not None:
        prompts = loaded.prompts
        system = [{"role": "system", "content": request.system}] if request.system is not None else []
        problems.of(lambda: prompts.ids([*system, {"role": "user", "content": "Hello"}]))
    for prompt in request.prompts:
        count = len(text.encode(prompt))
        shown = prompt if len(prompt) < 40 else prompt[:36] + " ..."
        if count >= context:
            rule = f"has {count} tokens, and the model has {context} positions for prompt and answer"
            problems.add("--prompt", shown, rule, "write a shorter one")
        elif count == 0:
            problems.add("--prompt", shown, "has no token, and the model continues tokens", "write at least a word")


def answer_rank(loaded: Loaded, request: Request) -> None:
    """What each rank does."""
    from megatron_llama.inference.chat import Chat
    from megatron_llama.inference.generator import generator
    from megatron_llama.inference.stream import Printer

    assert loaded.text is not None
    speaks = os.environ["RANK"] == "0"
    with generator(loaded.source, loaded.plan, loaded.stop) as made:
        if request.chat:
            prompts = loaded.prompts if speaks else None
            Chat(made, prompts, request.sampling, request.max_new_tokens, request.system).run(sys.stdin, sys.stdout)
        else:
            ids = [loaded.text.encode(prompt) for prompt in request.prompts]
            printer = Printer(sys.stdout, loaded.text, request.prompts, ids) if speaks else None
            made.generate(ids, request.sampling, request.max_new_tokens, printer)
        if speaks and made.speed.new_tokens:
            sys.stderr.write(describe(made.speed) + "\n")


def describe(speed: Speed) -> str:
    """``64 tokens, 52.1 tokens/s after a prompt of 12 tokens in 0.10 s``."""
    return (
        f"{speed.new_tokens:,} tokens, {speed.tokens_per_second:,.1f} tokens/s "
        f"(after {speed.prompt_tokens:,} tokens of prompts in {speed.prompt_seconds:.2f} s)"
    )
