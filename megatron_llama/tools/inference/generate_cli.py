"""``scripts/generate.py``: continue prompts, or chat."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_llama.config.data_settings import is_template_file
from megatron_llama.config.rope import longest_sequence
from megatron_llama.config.settings import CHAT_TEMPLATES
from megatron_llama.tools.inference.arguments import OpenedModel, Problems, Task, model_parser, not_utf8, run_task
from megatron_llama.tools.inference.sampling import DRAWING, OPTIONS, Sampling, StopTexts, check_option, flag_of

if TYPE_CHECKING:
    from megatron_llama.tools.inference.chat import PromptBuilder
    from megatron_llama.tools.inference.generator import Generator
    from megatron_llama.tools.inference.saved_model import SavedModel

DESCRIPTION = "Generate text: python scripts/generate.py CHECKPOINT --prompt TEXT, or --chat\n"
EPILOG = "Text is written to stdout, tokens/s to stderr."


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/generate.py`` with ``argv``; return the exit status."""
    arguments, problems = parser().parse_args(argv), Problems()
    _check(arguments, problems)
    return run_task(arguments, _task, problems)


def _generate(
    arguments: argparse.Namespace,
    sampling: Sampling,
    chat: PromptBuilder | None,
    generator: Generator,
    opened: OpenedModel,
    is_first: bool,
) -> None:
    """Continue the prompts, or run a conversation with the prompt builder ``chat``."""
    from megatron_llama.tools.inference.chat import ChatSession, Printer

    assert opened.tokenizer is not None
    limit, stop = arguments.max_new_tokens, StopTexts(opened.tokenizer, arguments.stop)
    if chat is not None:
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
        ChatSession(generator, chat, sampling, limit, stop, arguments.system).run(sys.stdin, sys.stdout)
    else:
        ids = [opened.tokenizer.encode(text) for text in arguments.prompt]
        printer = Printer(sys.stdout, stop, arguments.prompt, ids) if is_first else None
        generator.generate(ids, sampling, limit, printer, stop.is_complete)
    speed = generator.speed
    if is_first and speed.new_tokens:
        sys.stderr.write(
            f"{speed.new_tokens:,} tokens, {speed.tokens_per_second:,.1f} tokens/s "
            f"(prompts: {speed.prompt_tokens:,} tokens in {speed.prompt_seconds:.2f} s)\n"
        )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = model_parser(DESCRIPTION, EPILOG)
    made.add_argument("--prompt", nargs="+", default=[], metavar="TEXT", help="texts to continue, as one batch")
    made.add_argument("--chat", action="store_true", help="chat on stdin, with a chat template")
    names = f"{', '.join(CHAT_TEMPLATES)} or FILE.jinja"
    made.add_argument("--chat-template", metavar="NAME", help=f"{names} (default: the run's, else own)")
    made.add_argument("--chat-template-kwargs", metavar="JSON", help="variables of a Jinja template")
    made.add_argument("--tools", type=Path, metavar="FILE", help="JSON list of functions that the model may call")
    made.add_argument("--system", metavar="TEXT", help="system message, for --chat")
    made.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="answer length limit (default: 256)")
    made.add_argument("--stop", nargs="+", default=[], metavar="TEXT", help="texts that end an answer, not printed")
    group = made.add_argument_group("sampling", "The model's generation_config.json overrides the defaults below.")
    group.add_argument("--greedy", action="store_true", help="choose the likeliest id")
    group.add_argument("--temperature", type=float, metavar="T", help="divisor of the logits (default: 0.7)")
    group.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest ids (default: 0, all)")
    group.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling probability (default: 1)")
    group.add_argument("--min-p", type=float, metavar="P", help="least share of the likeliest id (default: 0)")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="of ids in prompt and answer (default: 1)")
    group.add_argument("--seed", type=int, help="sampling seed (default: 1234)")
    return made


def _check(arguments: argparse.Namespace, problems: Problems) -> None:
    """Add the problems of the arguments."""
    if bool(arguments.prompt) == arguments.chat:
        given = "but both are set" if arguments.chat else "but none is set"
        problems.add("--chat", None, f"exactly one of --prompt and --chat is required, {given}", "write one of them")
    if arguments.system is not None and not arguments.chat:
        problems.add("--system", arguments.system, "applies only to --chat", "add --chat, or remove --system")
    for name in ("chat_template", "chat_template_kwargs", "tools"):
        if (value := getattr(arguments, name)) is not None and not arguments.chat:
            problems.add(flag_of(name), value, "applies only to --chat", "add --chat")
    chosen = arguments.chat_template
    if chosen is not None and chosen not in CHAT_TEMPLATES and not is_template_file(chosen):
        names = ", ".join(CHAT_TEMPLATES)
        problems.add(
            "--chat-template", chosen, f"must be one of {names}, or a .jinja file", "write --chat-template own"
        )
    texts = [(flag, text) for flag in ("prompt", "stop") for text in getattr(arguments, flag)]
    for name, text in [("--system", arguments.system), *((f"--{flag}", text) for flag, text in texts)]:
        if rule := not_utf8(text or ""):
            shown = text.encode("utf-8", "backslashreplace").decode()
            problems.add(name, shown, rule, "convert it (iconv -t utf-8), or set the terminal to UTF-8")
    if "" in arguments.stop:
        problems.add("--stop", "", "must not be empty", "write the text that ends an answer")
    if arguments.max_new_tokens < 1:
        problems.add("--max-new-tokens", arguments.max_new_tokens, "must be at least 1", "write --max-new-tokens 64")
    for name, value in _given(arguments).items():
        if problem := check_option(name, value):
            problems.items.append(problem)
        if arguments.greedy and name in DRAWING:
            flag = flag_of(name)
            problems.add(flag, value, "has no effect with --greedy", f"remove --greedy or {flag}")


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given fields of Sampling by name."""
    return {name: value for name in OPTIONS if (value := getattr(arguments, name)) is not None}


def _sampling(arguments: argparse.Namespace, saved: SavedModel, problems: Problems) -> Sampling:
    """Return the sampling of the flags and of generation_config.json, and print which values are from the file."""
    given = _given(arguments) | ({"greedy": True} if arguments.greedy else {})
    sampling, note, faults = Sampling.of(saved.generation, given)
    problems.items += faults
    sys.stderr.write("" if problems.items else note)
    return sampling


def _variables(arguments: argparse.Namespace, problems: Problems) -> dict[str, Any]:
    """Return --chat-template-kwargs."""
    from megatron_llama.text.conversation import reserved_names

    text = arguments.chat_template_kwargs
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    names = reserved_names(value) if isinstance(value, dict) else ""
    if isinstance(value, dict) and not names:
        return value
    instead = """write --chat-template-kwargs '{"enable_thinking": false}'"""
    problems.add("--chat-template-kwargs", text, f"cannot set {names}" if names else "must be a JSON object", instead)
    return {}


def _tools(arguments: argparse.Namespace, problems: Problems) -> list[dict[str, Any]]:
    """Return the functions in the file of --tools."""
    from megatron_llama.text.conversation import RecordError, parse_tools

    if arguments.tools is None:
        return []
    try:
        if tools := parse_tools(arguments.tools.read_text(encoding="utf-8-sig")):
            return tools
        raise RecordError("bad_tools", "it has no function")
    except (OSError, UnicodeDecodeError, RecursionError, RecordError) as error:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        problems.add("--tools", arguments.tools, rule, "write a JSON list of functions, each with name and parameters")
        return []


def _task(arguments: argparse.Namespace, opened: OpenedModel, problems: Problems) -> Task:
    """Create the task; add prompts that do not fit the model, and incompatible templates, to ``problems``."""
    from megatron_llama.tools.inference.chat import open_prompt_builder, trained_stop_ids
    from megatron_llama.tools.inference.saved_model import stop_ids

    assert opened.tokenizer is not None
    sampling = _sampling(arguments, opened.saved, problems)
    saved, tokenizer, builder = opened.saved, opened.tokenizer, None
    if arguments.chat:
        name, trained = arguments.chat_template, saved.trained_template
        variables, tools = _variables(arguments, problems), _tools(arguments, problems)
        if not problems.items:
            builder = problems.collect(open_prompt_builder, tokenizer, name, trained, "own", variables, tools)
        if builder is not None:  # a template may reject a system message
            system = [{"role": "system", "content": arguments.system}] if arguments.system is not None else []
            problems.collect(builder.ids, [*system, {"role": "user", "content": "Hello"}])
    context = longest_sequence(saved.model)
    for text in arguments.prompt if not problems.items else ():
        count, shown = len(tokenizer.encode(text)), text if len(text) < 40 else text[:36] + " ..."
        if count >= context:
            rule = f"has {count} tokens, but the model has {context} positions for prompt and answer"
            problems.add("--prompt", shown, rule, "write a shorter prompt")
        elif count == 0:
            problems.add("--prompt", shown, "has no token", "write at least one word")
    end = trained_stop_ids(tokenizer, saved.trained_template) if builder is None else builder.stop
    return Task(stop_ids(saved, tokenizer) | end, partial(_generate, arguments, sampling, builder))
