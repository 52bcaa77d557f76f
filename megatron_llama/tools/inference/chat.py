"""A conversation with a model, at a terminal or through pipes."""

from __future__ import annotations

import sys
from typing import TextIO

import torch.distributed as dist

from megatron_llama.config import ConfigError
from megatron_llama.parallel.agree import from_rank_0
from megatron_llama.tools.inference.arguments import not_utf8
from megatron_llama.tools.inference.generator import Generator
from megatron_llama.tools.inference.prompts import Message, PromptBuilder
from megatron_llama.tools.inference.sampling import Sampling
from megatron_llama.tools.inference.stream import Printer

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
        while (ids := from_rank_0(lambda: self._next_prompt(source, out))) is not None:
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
