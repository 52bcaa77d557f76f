"""lm-evaluation-harness on a loaded model: one ``lm_eval.api.model.LM`` for checkpoints in any layout.

Rank 0 runs the harness. It broadcasts each batch of token ids, and all ranks compute it. Requests are encoded,
truncated and decoded as in the harness's model ``hf``, so that its scores of the exported model are equal.

Imports lm_eval, which is the extra ``eval``: import this module in functions.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, has_bos_prefix, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window

from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.rope import longest_sequence
from megatron_llama.parallel.groups import broadcast_from_rank_0
from megatron_llama.system.progress import ProgressBar
from megatron_llama.text.tokenizer import SETTINGS, Tokenizer, read_settings
from megatron_llama.tools.inference.arguments import Measure, OpenedModel, Problems, Progress
from megatron_llama.tools.inference.chat import PromptBuilder, open_prompt_builder, trained_stop_ids
from megatron_llama.tools.inference.evaluation import continuation_scores
from megatron_llama.tools.inference.generator import Answer, Generator
from megatron_llama.tools.inference.lm_eval_tasks import ARGUMENT, Generation, load_tasks, task_problems
from megatron_llama.tools.inference.sampling import StopTexts
from megatron_llama.tools.inference.saved_model import stop_ids

Score = tuple[float, bool]
"""(log likelihood in nats, whether greedy decoding would generate the text)"""


@dataclass(frozen=True)
class Prompt:
    """A prompt and the continuations to score."""

    ids: tuple[int, ...]
    continuations: list[list[int]]
    requests: list[int]
    """Index of the request of each continuation."""


def harness_task(
    arguments: Namespace, opened: OpenedModel, problems: Problems
) -> tuple[frozenset[int], Measure] | None:
    """Return the ids that end an answer, and the measurement of --lm-eval.

    On errors returns None and adds to ``problems``.
    """
    tasks = problems.collect(load_tasks, arguments.lm_eval, arguments.include_path)
    if tasks is None or opened.tokenizer is None:
        return None
    problems.items += task_problems(tasks, longest_sequence(opened.saved.model))
    saved, tokenizer, name = opened.saved, opened.tokenizer, arguments.chat_template
    chat = None
    if arguments.chat or name not in (None, "none"):
        chat = problems.collect(open_prompt_builder, tokenizer, name, saved.trained_template, "own")
    end = trained_stop_ids(tokenizer, saved.trained_template) if chat is None else chat.stop
    return stop_ids(saved, tokenizer) | end, partial(measure_harness, arguments, chat)


def measure_harness(
    arguments: Namespace, chat: PromptBuilder | None, generator: Generator, opened: OpenedModel, _: Progress
) -> dict[str, Any]:
    """Return the scores of tasks. ``chat``: chat template; None: plain prompts."""

    def evaluate(model: HarnessModel) -> dict[str, Any]:
        tasks = load_tasks(arguments.lm_eval, arguments.include_path)
        return evaluate_tasks(model, tasks, arguments.limit, arguments.num_fewshot)

    assert opened.tokenizer is not None
    results = run_harness(generator, opened.tokenizer, arguments.batch_size, evaluate, chat)
    template = None if chat is None else chat.template
    return {"lm_eval": arguments.lm_eval, "limit": arguments.limit, "chat_template": template, **(results or {})}


class HarnessModel(TemplateLM):
    """Language model of the harness. Rank 0 uses it, while the other ranks run ``follow``."""

    def __init__(
        self, generator: Generator, tokenizer: Tokenizer, batch_size: int, chat: PromptBuilder | None = None
    ) -> None:
        """``batch_size``: prompts per batch. ``chat``: chat template; None: plain prompts."""
        super().__init__()
        self._generator, self._text, self._rows, self.chat = generator, tokenizer, batch_size, chat
        self._prefix = prefix_id(tokenizer)
        self.truncated = 0
        """Requests whose first tokens were omitted."""

    @property
    def eot_token_id(self) -> int:
        """Id of the end of a text."""
        assert self._text.end is not None
        return self._text.end

    @property
    def prefix_token_id(self) -> int:
        """Id before a text without context: BOS, else the end of a text."""
        return self._prefix

    @property
    def max_length(self) -> int:
        """Positions of the model."""
        return self._generator.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text. None: with BOS if the tokenizer adds it and the text does not start with it."""
        ids = self._text.spans(string, parse_special=True).ids
        starts = add_special_tokens is None and has_bos_prefix(string, self._text.token_name(self._prefix))
        if add_special_tokens is False or starts or not self._text.adds_bos or self._text.bos is None:
            return ids
        return [self._text.bos, *ids]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation. Without a generation prompt it ends within the last message."""
        assert self.chat is not None
        if add_generation_prompt:
            return self.chat.text(chat_history)
        return self.chat.text(chat_history[:-1], chat_history[-1]["content"])

    @property
    def tokenizer_name(self) -> str:
        """Name in the harness's cache of requests."""
        return self._text.path.name

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Score]:
        """Return the score of each (context, continuation)."""
        return list(super().loglikelihood(requests, disable_tqdm=disable_tqdm))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the log likelihood of each text, in windows of ``max_length`` with one token of context."""
        windows, owners = [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            spans = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            for context, predicted in map(make_disjoint_window, spans):
                windows.append((("", text), context, predicted))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (likelihood, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += likelihood
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[Score]:
        """Return the scores of (texts, context ids, continuation ids)."""
        scores: list[Score] = [(0.0, True)] * len(requests)
        done = 0
        with ProgressBar("log likelihoods", "requests", len(requests)) as progress:
            ordered = self._prompts(requests)
            for batch in (ordered[at : at + self._rows] for at in range(0, len(ordered), self._rows)):
                prompts, continuations = [list(one.ids) for one in batch], [one.continuations for one in batch]
                for one, row in zip(batch, self._run("score", prompts, continuations), strict=True):
                    for request, score in zip(one.requests, row, strict=True):
                        scores[request] = score
                    done += len(row)
                progress.show(done)
        return scores

    def _prompts(self, requests: list[tuple[tuple[str, str], list[int], list[int]]]) -> list[Prompt]:
        """Return the prompts, the longest first, with all their continuations. Long ones lose their first tokens."""
        prompts: dict[tuple[int, ...], Prompt] = {}
        for number, (texts, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                rule = f"a continuation has {len(continuation)} tokens, but the model has {self.max_length} positions"
                raise ConfigError([Problem(ARGUMENT, f"{texts[1][:40]!r}", rule, "omit this task")])
            ids = tuple((context + continuation)[-(self.max_length + 1) : -len(continuation)])
            self.truncated += len(ids) < len(context)
            prompt = prompts.setdefault(ids, Prompt(ids, [], []))
            prompt.continuations.append(continuation)
            prompt.requests.append(number)
        return sorted(prompts.values(), key=lambda prompt: -len(prompt.ids))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the generated answer to each (context, generation_kwargs), without the string that ended it."""
        texts: list[str] = []
        order = Collator(
            [request.args for request in requests],
            sort_fn=lambda args: (-len(self.tok_encode(args[0])), args[0]),
            group_fn=lambda args: args[1],
            group_by="gen_kwargs",
        )
        with ProgressBar("answers", "answers", len(requests)) as progress:
            for batch in order.get_batched(n=self._rows):
                generation = Generation.of(batch[0][1])
                limit = self.max_length - generation.max_new_tokens
                prompts = [self.tok_encode(context) or [self.prefix_token_id] for context, _ in batch]
                self.truncated += sum(len(prompt) > limit for prompt in prompts)
                prompts = [prompt[-limit:] for prompt in prompts]
                # Rows of different batches have different random numbers.
                sampling = replace(generation.sampling, seed=generation.sampling.seed + len(texts))
                for answer in self._run("generate", prompts, replace(generation, sampling=sampling)):
                    texts.append(self._cut(answer, generation))
                progress.show(len(texts))
        return list(order.get_original(texts))

    def _cut(self, answer: Answer, generation: Generation) -> str:
        until = [*generation.until, self._text.decode([self.eot_token_id], skip_special=False)]
        return str(postprocess_generated_text(self._text.decode(answer.ids), until, None))

    def _run(self, name: str, *arguments: Any) -> Any:
        """Run a batch on all ranks; return rank 0's result."""
        return _work(self._generator, self._text, *broadcast_from_rank_0(lambda: (name, arguments)))


def _work(generator: Generator, tokenizer: Tokenizer, name: str, arguments: tuple[Any, ...]) -> Any:
    """Compute a batch. All ranks must call it."""
    if name == "score":
        return continuation_scores(generator, *arguments)
    prompts, generation = arguments
    stop = StopTexts(tokenizer, generation.until)
    return generator.generate(prompts, generation.sampling, generation.max_new_tokens, is_complete=stop.is_complete)


def prefix_id(tokenizer: Tokenizer) -> int:
    """Return the id before a text without context: BOS, also of a tokenizer that does not add it, else the end id.

    Raises ConfigError if the tokenizer has neither.
    """
    if tokenizer.bos is not None:
        return tokenizer.bos
    name = (read_settings(tokenizer.file.parent / SETTINGS) or {}).get("bos_token")
    content = name.get("content") if isinstance(name, dict) else name
    named = tokenizer.control(content) if isinstance(content, str) else None
    prefix = tokenizer.end if named is None else named
    if prefix is None:
        rule = "has neither a BOS nor an end-of-text token, and a text without context needs one"
        raise ConfigError([Problem("--tokenizer", str(tokenizer.path), rule, "add one to tokenizer_config.json")])
    return prefix


def run_harness(
    generator: Generator,
    tokenizer: Tokenizer,
    batch_size: int,
    evaluate: Callable[[HarnessModel], Any],
    chat: PromptBuilder | None = None,
) -> Any:
    """Return the result of ``evaluate`` on rank 0, and None on the other ranks, which compute its batches.

    Raises ConfigError of rank 0, on all ranks.
    """
    if dist.get_rank() != 0:
        while (command := broadcast_from_rank_0(lambda: None)) is not None:
            _work(generator, tokenizer, *command)
        return None
    try:
        result = evaluate(HarnessModel(generator, tokenizer, batch_size, chat))
    except ConfigError as error:
        broadcast_from_rank_0(partial(_raise, error))
        raise
    broadcast_from_rank_0(lambda: None)
    return result


def _raise(error: ConfigError) -> None:
    raise error


def evaluate_tasks(model: HarnessModel, tasks: list[Any], limit: int | None, num_fewshot: int | None) -> dict[str, Any]:
    """Return the harness's results, without samples and environment.

    Args:
        limit: first documents of each task; None: all.
        num_fewshot: examples in a prompt; None: as in the task.
    """
    results = simple_evaluate(
        model,
        tasks=tasks,
        limit=limit,
        num_fewshot=num_fewshot,
        log_samples=False,
        apply_chat_template=model.chat is not None,
    )
    names = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples", "higher_is_better")
    chosen = {name: results[name] for name in names if name in results} | {"truncated": model.truncated}
    # A metric may return a number of numpy's, which the report's JSON does not support.
    return dict(json.loads(json.dumps(chosen, default=handle_non_serializable)))
