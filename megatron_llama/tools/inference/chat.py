"""A conversation with a model, at a terminal or through pipes."""
from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import torch.distributed as dist

from megatron_llama.config import ConfigError, Problem
from megatron_llama.parallel.groups import broadcast_from_rank_0
from megatron_llama.system.errors import UserError
from megatron_llama.text.chat_template import (
    NAMED_TEMPLATES,
    Jinja,
    NamedTemplate,
    TextSpan,
    TrainedTemplate,
    encode_spans,
    load_own_template,
)
from megatron_llama.text.conversation import RecordError, Turn
from megatron_llama.text.tokenizer import Tokenizer
from megatron_llama.tools.inference.arguments import not_utf8
from megatron_llama.tools.inference.generator import Generator, Sampling

RESET = "/reset"
WELCOME = f"A message and Enter; {RESET} begins a new conversation, Ctrl-D ends."


class Chat:
    """Messages in, answers out. All ranks run it; rank 0 alone reads and writes."""

    def __init__(
        self, generator: Generator, prompts: PromptBuilder, sampling: Sampling, max_new_tokens: int, system: str | None
    ) -> None:
        self.generator, self.prompts, self.sampling, self.max_new_tokens = generator, prompts, sampling, max_new_tokens
        self._first: list[Message] = [{"role": "system", "content": system}] if system is not None else []
        self._history = list(self._first)

    def run(self, source: TextIO, out: TextIO) -> None:
        """Answers each line of ``source`` until it ends."""
        is_first = dist.get_rank() == 0
        if is_first and source.isatty():
            out.write(WELCOME + "\n")
        while (ids := broadcast_from_rank_0(lambda: self._next_prompt(source, out))) is not None:
            printer = Printer(out, self.prompts.tokenizer, [""], [[]]) if is_first else None
            answer = self.generator.generate([ids], self.sampling, self.max_new_tokens, printer)[0]
            self._history.append({"role": "assistant", "content": self.prompts.parse_answer(answer.ids)})

    def _next_prompt(self, source: TextIO, out: TextIO) -> list[int] | None:
        """The ids of the conversation with the next message; None at the end of ``source``."""
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
                asked = [*self._history, {"role": "user", "content": message}]
                try:
                    ids = self.prompts.ids(asked)
                except ConfigError as error:
                    self._say(error.problems[0].rule)
                    continue
                if len(ids) < self.generator.context:
                    self._history = asked
                    return ids
                self._say(f"the conversation has {len(ids)} of the model's {self.generator.context} tokens: {RESET}")

    @staticmethod
    def _say(words: str) -> None:
        sys.stderr.write(f"[{words}]\n")
        sys.stderr.flush()


# A conversation to the ids that ask for its next answer.
#
# Training examples are encoded by the same code (text/), so a prompt has the ids that came before the answer in
# training.


Message = Mapping[str, str]
"""``role`` and ``content``."""
OWN, NONE = "own", "none"
ARGUMENT = "--chat-template"


class PromptBuilder:
    """A tokenizer and a chat template; with ``none`` the messages' text is the prompt."""

    stop: frozenset[int]
    """The ids that end an answer in this template."""

    def __init__(self, tokenizer: Tokenizer, template: str, add_bos: bool | None = None) -> None:
        """``add_bos`` is for named templates; None does what the tokenizer does before any text.

        Raises ConfigError where the tokenizer has no template of its own, or can't be used with any.
        """
        self.tokenizer, self.template, self._add_bos = tokenizer, template, add_bos
        self._end_text = ""  # what is written between an answer and the token that ends it
        self._chat: NamedTemplate | Jinja | None = NAMED_TEMPLATES.get(template)
        try:
            if template == OWN:
                self._chat = load_own_template(tokenizer.path, tokenizer.control_tokens)
        except UserError as error:
            names = ", ".join(NAMED_TEMPLATES)
            instead = f"write --chat-template {names}; or --tokenizer FOLDER with a template of its own"
            raise ConfigError([Problem(ARGUMENT, template, str(error), instead)]) from None
        self._gap = self._chat.gap if isinstance(self._chat, NamedTemplate) else ""
        # A template of the tokenizer's own writes its BOS itself.
        bos = isinstance(self._chat, NamedTemplate) and (tokenizer.adds_bos if add_bos is None else add_bos)
        self._bos = [tokenizer.bos] if bos and tokenizer.bos is not None else []
        self.stop = self._find_end()

    def __reduce__(self) -> Any:  # a compiled template can't be pickled, as spawned ranks need it
        return PromptBuilder, (self.tokenizer, self.template, self._add_bos)

    def ids(self, messages: Sequence[Message], answer: str | None = None) -> list[int]:
        """The ids up to where the assistant's next answer begins; with an ``answer`` its ids too, without its end.

        Raises ConfigError where the template refuses the conversation.
        """
        if self._chat is None:
            return self.tokenizer.encode("".join(message["content"] for message in messages) + (answer or ""))
        try:
            pieces = self._chat.ask([Turn(message["role"], message["content"]) for message in messages])
            if answer is not None:
                pieces.append(TextSpan(self._gap + answer, True))
            return self._bos + encode_spans(pieces, self.tokenizer, parse_special=self.template == OWN)[0]
        except RecordError as error:
            rule = f"the chat template {self.template} of {self.tokenizer.path} refuses this conversation ({error})"
            instead = "leave out --system, or use --prompt"
            raise ConfigError([Problem(ARGUMENT, self.template, rule, instead)]) from None

    def parse_answer(self, ids: Sequence[int]) -> str:
        """The content of the assistant's message that a model wrote as ``ids``."""
        return self.tokenizer.decode(ids).removeprefix(self._gap).removesuffix(self._end_text)

    def _find_end(self) -> frozenset[int]:
        """The control token that an example's answer ends with, if it is one id; sets ``_end_text``."""
        if self._chat is None:
            return frozenset()
        try:
            example = self._chat.render_spans([Turn("user", "question"), Turn("assistant", "answer")])
        except RecordError:  # a template that refuses this conversation: answers end with the tokenizer's end of text
            return frozenset()
        learned = [piece for piece in example if piece.learn]
        if isinstance(self._chat, Jinja):  # control tokens are a part of its text
            after = "".join(piece.text for piece in learned).partition("answer")[2].lstrip()
            numbers = (self.tokenizer.control(name) for name in self.tokenizer.control_tokens if after.startswith(name))
            return frozenset(number for number in numbers if number is not None)
        for piece in learned[1:]:
            ids = encode_spans([piece], self.tokenizer)[0]
            if piece.control and len(ids) == 1:
                return frozenset(ids)
            self._end_text += piece.text
        return frozenset()


def open_prompt_builder(
    tokenizer: Tokenizer, template: str | None, trained: TrainedTemplate | None, default: str
) -> PromptBuilder:
    """A builder for ``template``, else for the one that the model was ``trained`` with, else for ``default``.

    Raises ConfigError as ``PromptBuilder`` does.
    """
    name = template or (trained.template if trained else default)
    return PromptBuilder(tokenizer, name, trained.add_bos if trained and trained.template == name else None)


# Prints text while it is generated.


_BROKEN = "\N{REPLACEMENT CHARACTER}"
_KNOWN_TAIL = 8  # ids of the prompt that are decoded with an answer's first piece, so that its space is kept


class Decoder:
    """Ids to text, piece by piece; a piece that ends inside a character is held back until the rest is there."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_KNOWN_TAIL:])
        self._printed = len(self._ids)
        self._start = 0

    def add(self, number: int | None) -> str:
        """The text that can be printed once ``number`` is known; with None, at the end, the text that was held back."""
        if number is not None:
            self._ids.append(number)
        # Both are decoded from the same start: a tokenizer treats the first piece of a text in its own way.
        before = self._tokenizer.decode(self._ids[self._start : self._printed])
        now = self._tokenizer.decode(self._ids[self._start :])
        if number is not None and now.endswith(_BROKEN):
            return ""
        self._start, self._printed = self._printed, len(self._ids)
        return now[len(before) :]


class Printer:
    """Answers of a batch, one after the other although they grow together: the first streams, then the next one."""

    def __init__(self, out: TextIO, tokenizer: Tokenizer, prompts: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
        self._out = out
        self._decoders = [Decoder(tokenizer, prompt) for prompt in ids]
        self._ended = [False for _ in prompts]
        self._waiting = list(prompts)
        self._row = 0
        self._show()

    def __call__(self, row: int, number: int | None) -> None:
        """A new id of a row, or None where the row has ended."""
        self._waiting[row] += self._decoders[row].add(number)
        self._ended[row] = number is None
        self._show()

    def _show(self) -> None:
        while self._row < len(self._waiting):
            self._out.write(self._waiting[self._row])
            self._waiting[self._row] = ""
            if not self._ended[self._row]:
                break
            self._row += 1
            self._out.write("\n" if self._row == len(self._waiting) else "\n\n")
        self._out.flush()
