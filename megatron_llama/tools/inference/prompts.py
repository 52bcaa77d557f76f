"""A conversation to the ids that ask for its next answer.

Training examples are encoded by the same code (text/), so a prompt has the ids that came before the answer in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_llama.config import ConfigError, Problem
from megatron_llama.system.errors import UserError
from megatron_llama.text.chat_template import NAMED, Jinja, Named, Piece, own_template
from megatron_llama.text.chat_tokenizer import encode_pieces
from megatron_llama.text.conversation import Bad, Turn
from megatron_llama.text.tokenizer import Tokenizer
from megatron_llama.text.trained_template import TrainedTemplate

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
        self._chat: Named | Jinja | None = NAMED.get(template)
        try:
            if template == OWN:
                self._chat = own_template(tokenizer.path, tokenizer.control_tokens)
        except UserError as error:
            instead = f"write --chat-template {', '.join(NAMED)}; or --tokenizer FOLDER with a template of its own"
            raise ConfigError([Problem(ARGUMENT, template, str(error), instead)]) from None
        self._gap = self._chat.gap if isinstance(self._chat, Named) else ""
        # A template of the tokenizer's own writes its BOS itself.
        bos = isinstance(self._chat, Named) and (tokenizer.adds_bos if add_bos is None else add_bos)
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
                pieces.append(Piece(self._gap + answer, True))
            return self._bos + encode_pieces(pieces, self.tokenizer, parse_special=self.template == OWN)[0]
        except Bad as error:
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
            example = self._chat.pieces([Turn("user", "question"), Turn("assistant", "answer")])
        except Bad:  # a template that refuses this conversation: answers end with the tokenizer's end of text
            return frozenset()
        learned = [piece for piece in example if piece.learn]
        if isinstance(self._chat, Jinja):  # control tokens are a part of its text
            after = "".join(piece.text for piece in learned).partition("answer")[2].lstrip()
            numbers = (self.tokenizer.control(name) for name in self.tokenizer.control_tokens if after.startswith(name))
            return frozenset(number for number in numbers if number is not None)
        for piece in learned[1:]:
            ids = encode_pieces([piece], self.tokenizer)[0]
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
