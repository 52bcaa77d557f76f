"""A conversation with a model, at a terminal or through pipes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import torch.distributed as dist

from megatron_llama.config import ConfigError, Problem
from megatron_llama.parallel.groups import broadcast_from_rank_0
from megatron_llama.system.errors import UserError
from megatron_llama.system.wrapping import escape_controls
from megatron_llama.text.chat_template import (
    NAMED_TEMPLATES,
    Jinja,
    NamedTemplate,
    TextSpan,
    TrainedTemplate,
    control_text,
    encode_spans,
    end_of_answer,
    load_own_template,
)
from megatron_llama.text.conversation import RecordError, Turn
from megatron_llama.text.tokenizer import Tokenizer
from megatron_llama.tools.inference.arguments import not_utf8
from megatron_llama.tools.inference.generator import Generator
from megatron_llama.tools.inference.sampling import Sampling, StopTexts

RESET = "/reset"
WELCOME = f"Type a message. {RESET} starts a new conversation, Ctrl-D exits."


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
        self._first: list[Message] = [{"role": "system", "content": system}] if system is not None else []
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
            text, _ = self.stop.cut(self.prompts.parse_answer(answer.ids))
            self._history.append({"role": "assistant", "content": text})

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
                messages = [*self._history, {"role": "user", "content": message}]
                try:
                    ids = self.prompts.ids(messages)
                except ConfigError as error:
                    self._say(error.problems[0].rule)
                    continue
                if len(ids) < self.generator.context:
                    self._history = messages
                    return ids
                limit = self.generator.context
                self._say(f"the conversation has {len(ids)} tokens, the model {limit} positions; type {RESET}")

    @staticmethod
    def _say(words: str) -> None:
        sys.stderr.write(f"[{words}]\n")
        sys.stderr.flush()


# Prompts. They are encoded by the code of training examples (text/), so they have the ids of training.
Message = Mapping[str, str]
"""``role`` and ``content``."""
OWN, NONE = "own", "none"
ARGUMENT = "--chat-template"


class PromptBuilder:
    """Tokenizer and chat template; with the template ``none`` the prompt is the text of the messages."""

    stop: frozenset[int]
    """Ids that end an answer in this template."""

    def __init__(self, tokenizer: Tokenizer, template: str, add_bos: bool | None = None) -> None:
        """Open a template.

        Args:
            tokenizer: tokenizer of the model.
            template: name of a template; ``own``: the tokenizer's template.
            add_bos: whether named templates start with BOS. None: the tokenizer's default.

        Raises ConfigError if the tokenizer has no template, or is not compatible with it.
        """
        self.tokenizer, self.template, self._add_bos = tokenizer, template, add_bos
        self._chat: NamedTemplate | Jinja | None = NAMED_TEMPLATES.get(template)
        try:
            if template == OWN:
                self._chat = load_own_template(tokenizer.path, tokenizer.added_tokens)
        except UserError as error:
            names = ", ".join(NAMED_TEMPLATES)
            instead = f"write --chat-template {names}; or --tokenizer FOLDER with a chat template"
            raise ConfigError([Problem(ARGUMENT, template, str(error), instead)]) from None
        self._gap = self._chat.gap if isinstance(self._chat, NamedTemplate) else ""
        # The tokenizer's template writes BOS itself.
        bos = isinstance(self._chat, NamedTemplate) and (tokenizer.adds_bos if add_bos is None else add_bos)
        self._bos = [tokenizer.bos] if bos and tokenizer.bos is not None else []
        end, self._end_text = (None, "") if self._chat is None else end_of_answer(self._chat, tokenizer)
        self.stop = frozenset() if end is None else frozenset([end])

    def __reduce__(self) -> Any:  # spawned ranks need pickling, which compiled templates do not support
        return PromptBuilder, (self.tokenizer, self.template, self._add_bos)

    def ids(self, messages: Sequence[Message], answer: str | None = None) -> list[int]:
        """Return the ids of a prompt, and of an ``answer`` without its end token.

        Raises ConfigError if the template rejects the conversation, or makes no token of it.
        """
        if self._chat is None:
            return self.tokenizer.encode("".join(message["content"] for message in messages) + (answer or ""))
        spans = self._spans(messages, answer)
        with self._restated():
            ids = self._bos + encode_spans(spans, self.tokenizer, parse_special=self.template == OWN)[0]
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
        return "".join([*begin, *(control_text(span, self.tokenizer) for span in self._spans(messages, answer))])

    def _spans(self, messages: Sequence[Message], answer: str | None) -> list[TextSpan]:
        assert self._chat is not None
        with self._restated():
            spans = self._chat.ask([Turn(message["role"], message["content"]) for message in messages])
        return spans if answer is None else [*spans, TextSpan(self._gap + answer, True)]

    @contextmanager
    def _restated(self) -> Iterator[None]:
        """Raise ConfigError in place of RecordError."""
        try:
            yield
        except RecordError as error:
            rule = f"the chat template {self.template} of {self.tokenizer.path} rejects this conversation ({error})"
            instead = "remove --system, or use --prompt"
            raise ConfigError([Problem(ARGUMENT, self.template, rule, instead)]) from None

    def parse_answer(self, ids: Sequence[int]) -> str:
        """Return the text of an answer from its generated ids."""
        return self.tokenizer.decode(ids).removeprefix(self._gap).removesuffix(self._end_text)


def open_prompt_builder(
    tokenizer: Tokenizer, template: str | None, trained: TrainedTemplate | None, default: str
) -> PromptBuilder:
    """Return a builder for ``template``, or the template of training, or ``default``.

    Raises ConfigError as ``PromptBuilder``.
    """
    name = template or (trained.template if trained else default)
    return PromptBuilder(tokenizer, name, trained.add_bos if trained and trained.template == name else None)


def trained_stop_ids(tokenizer: Tokenizer, trained: TrainedTemplate | None) -> frozenset[int]:
    """Return the ids that end an answer in the template of training, which may end any text of a fine-tuned model."""
    try:
        return frozenset() if trained is None else open_prompt_builder(tokenizer, None, trained, OWN).stop
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
