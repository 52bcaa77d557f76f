"""A conversation with a model, at a terminal or through pipes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TextIO

import torch.distributed as dist

from megatron_llama.config import ConfigError, Problem
from megatron_llama.parallel.groups import broadcast_from_rank_0
from megatron_llama.system.errors import UserError
from megatron_llama.system.wrapping import escape_controls
from megatron_llama.text import chat_template
from megatron_llama.text.chat_template import NamedTemplate, TrainedTemplate
from megatron_llama.text.conversation import NO_CONTEXT, RecordError, TemplateContext, Turn, called_functions
from megatron_llama.text.loss_spans import TextSpan, control_text, encode_spans
from megatron_llama.text.tokenizer import Tokenizer
from megatron_llama.tools.inference.arguments import not_utf8
from megatron_llama.tools.inference.generator import Generator
from megatron_llama.tools.inference.sampling import Sampling, StopTexts

RESET = "/reset"
TOOL = "/tool "
WELCOME = f"Type a message. {RESET} starts a new conversation, {TOOL}RESULT answers a call, Ctrl-D exits."


class ChatSession:
    """Conversation with a model. All ranks run it; only rank 0 reads and writes."""

    def __init__(
        self,
        generator: Generator,
        prompts: PromptBuilder,
        sampling: Sampling,
        max_new_tokens: int,
        stop: StopTexts,
        system: str | None,
    ) -> None:
        self.generator, self.prompts, self.sampling, self.max_new_tokens = generator, prompts, sampling, max_new_tokens
        self.stop = stop
        self._first = [Turn("system", system)] if system is not None else []
        self._history = list(self._first)

    def run(self, source: TextIO, out: TextIO) -> None:
        """Answer each line of ``source`` until its end."""
        is_first = dist.get_rank() == 0
        if is_first and source.isatty():
            out.write(WELCOME + "\n")
        while (ids := broadcast_from_rank_0(lambda: self._next_prompt(source, out))) is not None:
            printer = Printer(out, self.stop, [""], [[]]) if is_first else None
            complete = self.stop.is_complete
            answer = self.generator.generate([ids], self.sampling, self.max_new_tokens, printer, complete)[0]
            answered, _ = self.stop.cut(self.prompts.parse_answer(answer.ids))
            text, calls = called_functions(answered, self.prompts.context.tools)
            calls = [{**call, "id": f"call{number:05}"} for number, call in enumerate(calls)]  # Mistral: 9 characters
            self._history.append(Turn("assistant", text, extra={"tool_calls": calls} if calls else {}))
            for call in calls if is_first else ():
                function = call["function"]
                arguments = json.dumps(function["arguments"], ensure_ascii=False)
                out.write(escape_controls(f"[call {function['name']} {arguments}]") + "\n")
                out.flush()

    def _next_prompt(self, source: TextIO, out: TextIO) -> list[int] | None:
        """Return the ids of the conversation with the next message; None at the end of ``source``."""
        while True:
            if source.isatty():
                out.write("\n> ")
                out.flush()
            line = source.readline()
            if not line:
                return None
            message = line.strip()
            if message == RESET:
                self._history = list(self._first)
                self._say("new conversation")
            elif rule := not_utf8(message):
                self._say(f"the message {rule}")
            elif message:
                turns = [*self._history, self._turn(message)]
                if turns[-1].role == "tool" and len(self._open_calls(turns)) > 0:
                    self._history = turns
                    continue
                try:
                    ids = self.prompts.turn_ids(turns)
                except ConfigError as error:
                    self._say(error.problems[0].rule)
                    continue
                if len(ids) < self.generator.context:
                    self._history = turns
                    return ids
                limit = self.generator.context
                self._say(f"the conversation has {len(ids)} tokens, the model {limit} positions; type {RESET}")

    @staticmethod
    def _open_calls(turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """Return the calls of the last answer that have no result."""
        results = 0
        for turn in reversed(turns):
            if turn.role != "tool":
                return list(turn.extra.get("tool_calls", ()))[results:]
            results += 1
        return []

    def _turn(self, message: str) -> Turn:
        """Return the turn of a message: a call's result after TOOL, else the user's text."""
        if not f"{message} ".startswith(TOOL):  # without a text: an empty result
            return Turn("user", message)
        calls = self._open_calls(self._history)
        extra = {"tool_call_id": calls[0]["id"], "name": calls[0]["function"]["name"]} if calls else {}
        return Turn("tool", message.removeprefix(TOOL.strip()).strip(), extra=extra)

    @staticmethod
    def _say(words: str) -> None:
        sys.stderr.write(f"[{words}]\n")
        sys.stderr.flush()


# Prompts. They are encoded by the code of training examples (text/), so they have the ids of training.
Message = Mapping[str, str]
"""``role`` and ``content``."""
NONE = "none"
ARGUMENT = "--chat-template"


class PromptBuilder:
    """Tokenizer and chat template; with the template ``none`` the prompt is the text of the messages."""

    stop: frozenset[int]
    """Ids that end an answer in this template."""

    def __init__(self, tokenizer: Tokenizer, trained: TrainedTemplate, context: TemplateContext = NO_CONTEXT) -> None:
        """Open a template.

        Args:
            tokenizer: tokenizer of the model.
            trained: the template.
            context: tools of all conversations.

        Raises ConfigError if the tokenizer has no template, or is not compatible with it.
        """
        self.tokenizer, self.context, self._trained = tokenizer, context, trained
        self.template = template = trained.template
        self._chat: NamedTemplate | chat_template.Jinja | None = None
        try:
            if template != NONE:
                self._chat = trained.load(tokenizer.path, tokenizer.added_tokens)
        except UserError as error:
            names = ", ".join(chat_template.NAMED_TEMPLATES)
            instead = f"write --chat-template {names}; or --tokenizer FOLDER with a chat template"
            raise ConfigError([Problem(ARGUMENT, template, str(error), instead)]) from None
        self._gap = self._chat.gap if isinstance(self._chat, NamedTemplate) else ""
        # The tokenizer's template writes BOS itself.
        add_bos = tokenizer.adds_bos if trained.add_bos is None else trained.add_bos
        bos = isinstance(self._chat, NamedTemplate) and add_bos
        self._bos = [tokenizer.bos] if bos and tokenizer.bos is not None else []
        end, self._end_text = (None, "") if self._chat is None else chat_template.end_of_answer(self._chat, tokenizer)
        self.stop = frozenset() if end is None else frozenset([end])

    def __reduce__(self) -> Any:  # spawned ranks need pickling, which compiled templates do not support
        return PromptBuilder, (self.tokenizer, self._trained, self.context)

    def ids(self, messages: Sequence[Message], answer: str | None = None) -> list[int]:
        """Return the ids of a prompt, and of an ``answer`` without its end token.

        Raises ConfigError if the template rejects the conversation, or makes no token of it.
        """
        if self._chat is None:
            return self.tokenizer.encode("".join(message["content"] for message in messages) + (answer or ""))
        return self.turn_ids(_turns(messages), answer)

    def turn_ids(self, turns: Sequence[Turn], answer: str | None = None) -> list[int]:
        """Return the ids of a prompt, as ``ids``, of turns with calls and results."""
        spans = self._spans(turns, answer)
        with self._restated(turns):
            is_jinja = isinstance(self._chat, chat_template.Jinja)
            ids = [*self._bos, *encode_spans(spans, self.tokenizer, parse_special=is_jinja)[0]]
            if not ids:
                raise RecordError("template_refuses", "its text has no token")
            return ids

    def text(self, messages: Sequence[Message], answer: str | None = None) -> str:
        """Return the text of ``ids``, with the names of control tokens, for programs that encode prompts themselves.

        Raises ConfigError if the template rejects the conversation.
        """
        if self._chat is None:
            return "".join(message["content"] for message in messages) + (answer or "")
        begin = [self.tokenizer.token_name(number) for number in self._bos]
        return "".join(
            [*begin, *(control_text(span, self.tokenizer) for span in self._spans(_turns(messages), answer))]
        )

    def _spans(self, turns: Sequence[Turn], answer: str | None) -> list[TextSpan]:
        assert self._chat is not None
        with self._restated(turns):
            spans = self._chat.ask(turns, self.context)
        return spans if answer is None else [*spans, TextSpan(self._gap + answer, True)]

    @contextmanager
    def _restated(self, turns: Sequence[Turn]) -> Iterator[None]:
        """Raise ConfigError in place of RecordError."""
        try:
            yield
        except RecordError as error:
            rule = f"the chat template {self.template} of {self.tokenizer.path} rejects this conversation ({error})"
            options = ["remove --tools"] * bool(self.context.tools) + ["remove --system"] * (turns[0].role == "system")
            instead = " or ".join([*options, "write --chat-template FILE.jinja" if options else "use --prompt"])
            raise ConfigError([Problem(ARGUMENT, self.template, rule, instead)]) from None

    def parse_answer(self, ids: Sequence[int]) -> str:
        """Return the text of an answer from its generated ids."""
        return self.tokenizer.decode(ids).removeprefix(self._gap).removesuffix(self._end_text)


def _turns(messages: Sequence[Message]) -> list[Turn]:
    return [Turn(message["role"], message["content"]) for message in messages]


def open_prompt_builder(
    tokenizer: Tokenizer,
    template: str | None,
    trained: TrainedTemplate | None,
    default: str,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> PromptBuilder:
    """Return a builder for ``template``, or the template of training, or ``default``.

    Args:
        variables: ``chat_template_kwargs``, which replace the training's.
        tools: functions that the model may call.

    Raises ConfigError as ``PromptBuilder``.
    """
    name = template or (trained.template if trained else default)
    chosen = trained if trained and trained.template == name else TrainedTemplate(name)
    chosen = replace(chosen, variables=json.dumps({**json.loads(chosen.variables), **(variables or {})}))
    return PromptBuilder(tokenizer, chosen, TemplateContext(tools))


def trained_stop_ids(tokenizer: Tokenizer, trained: TrainedTemplate | None) -> frozenset[int]:
    """Return the ids that end an answer in the template of training, which may end any text of a fine-tuned model."""
    try:
        return frozenset() if trained is None else open_prompt_builder(tokenizer, None, trained, chat_template.OWN).stop
    except ConfigError:
        return frozenset()  # the tokenizer is not compatible with the template: no end token


# Streaming of generated text.
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_KNOWN_TAIL = 8  # prompt ids decoded with an answer's first id, which preserves a leading space


class Decoder:
    """Incremental decoder. It holds back incomplete UTF-8 characters."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_KNOWN_TAIL:])
        self._printed = len(self._ids)
        self._start = 0

    def add(self, number: int | None) -> str:
        """Add an id and return the new complete text. With None, at the end, return the text that was held back."""
        if number is not None:
            self._ids.append(number)
        # Decode both from the same start, because tokenizers treat the first id of a text differently.
        before = self._tokenizer.decode(self._ids[self._start : self._printed])
        now = self._tokenizer.decode(self._ids[self._start :])
        if number is not None and now.endswith(_BROKEN):
            return ""
        self._start, self._printed = self._printed, len(self._ids)
        return now[len(before) :]


class Printer:
    """Printer of a batch of answers in order: the first unfinished one streams, the others are buffered.

    Prints an answer up to its stop text.
    On a terminal, control characters of a model are escaped: weights of other people must not command the terminal.
    """

    def __init__(self, out: TextIO, stop: StopTexts, prompts: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
        self._out, self._stop = out, stop
        self._shown = escape_controls if out.isatty() else str
        self._decoders = [Decoder(stop.tokenizer, prompt) for prompt in ids]
        self._ended = [False for _ in prompts]
        self._pending = ["" for _ in prompts]  # text that may begin a stop text
        self._waiting = list(prompts)
        self._row = 0
        self._show()

    def __call__(self, row: int, number: int | None) -> None:
        """Print a new id of a row; None ends the row."""
        text, self._pending[row] = self._stop.cut(self._pending[row] + self._decoders[row].add(number))
        self._waiting[row] += text
        self._ended[row] = number is None
        if number is None and not self._stop.contains(self._pending[row]):
            self._waiting[row] += self._pending[row]
        self._show()

    def _show(self) -> None:
        while self._row < len(self._waiting):
            self._out.write(self._shown(self._waiting[self._row]))
            self._waiting[self._row] = ""
            if not self._ended[self._row]:
                break
            self._row += 1
            self._out.write("\n" if self._row == len(self._waiting) else "\n\n")
        self._out.flush()
