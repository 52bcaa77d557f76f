"""``scripts/evaluate.py``: perplexity, label accuracy, accuracy of generated answers, or lm-evaluation-harness."""

from __future__ import annotations

import argparse
import json
import sys
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_llama.config.data_settings import is_template_file
from megatron_llama.config.rope import longest_sequence
from megatron_llama.config.settings import CHAT_TEMPLATES
from megatron_llama.tools.inference.arguments import (
    InferenceTask,
    OpenedModel,
    Problems,
    StartRanks,
    model_parser,
    run_task,
)

if TYPE_CHECKING:
    from megatron_llama.text.conversation import Template
    from megatron_llama.text.tokenizer import Tokenizer
    from megatron_llama.tools.inference.chat import PromptBuilder
    from megatron_llama.tools.inference.evaluation import EncodedRecord, Example, Perplexity, Progress
    from megatron_llama.tools.inference.generator import Generator
    from megatron_llama.tools.inference.harness_tasks import NamedTasks

DESCRIPTION = """\
Evaluate a model: python scripts/evaluate.py CHECKPOINT with one of
  --dataset PREFIX                  perplexity on an indexed dataset
  --labelled FILE --template qnli   accuracy of the likeliest label
  --generative FILE.jsonl --template gsm8k
                                    generated answers: share with a line
                                    "#### number", and with the right number
  --lm-eval hellaswag,arc_easy      tasks of lm-evaluation-harness
"""
EPILOG = "Definitions of the metrics: docs/guides/data/evaluation.md"


@dataclass(frozen=True)
class Evaluation(InferenceTask):
    """Task that produces a report."""

    output: Path | None
    """File for the report; None: print only."""

    @abstractmethod
    def measure(self, generator: Generator, progress: Progress) -> dict[str, Any]:
        """Return the results by their names in the report. All ranks must call it."""

    def run(self, generator: Generator, opened: OpenedModel, is_first: bool) -> None:
        start = time.perf_counter()
        if not is_first:
            self.measure(generator, lambda done, of: None)
            return
        with _shown_progress() as progress:
            result = self.measure(generator, progress)
        report: dict[str, Any] = {
            "model": str(opened.saved.folder),
            "device": opened.plan.config.device.name,
            "dtype": opened.plan.precision.compute_dtype,
            "tp": opened.plan.config.trainer.tp,
            "cp": opened.plan.config.trainer.cp,
            "seconds": time.perf_counter() - start,
            **result,
        }
        sys.stdout.write(describe(report) + "\n")
        if self.output is not None:
            self.output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class DatasetTask(Evaluation):
    """Perplexity on an indexed dataset."""

    dataset: str
    seq_length: int
    max_tokens: int | None
    tokenizer: Tokenizer | None
    """Tokenizer of the dataset, for bits per byte; None if unknown."""

    def measure(self, generator: Generator, progress: Progress) -> dict[str, Any]:
        from megatron_llama.tools.inference.evaluation import open_examples, open_windows, perplexity

        examples = open_examples(self.dataset, generator.plan.model)
        if examples is None:
            examples = open_windows(self.dataset, generator.plan.model, self.seq_length, self.max_tokens)
        result = perplexity(generator, examples, progress)
        return {"dataset": self.dataset, **asdict(result), **self._per_byte(examples, result)}

    def _per_byte(self, examples: list[Example], result: Perplexity) -> dict[str, Any]:
        """Return ``bits_per_byte`` and ``bytes``, or the reason why they are unknown."""
        from megatron_llama.system.errors import UserError
        from megatron_llama.tools.inference.evaluation import bits_per_byte, predicted_bytes

        if self.tokenizer is None:
            return {"bits_per_byte": None, "reason": "the tokenizer is unknown; write --tokenizer PATH"}
        try:
            size = predicted_bytes(self.tokenizer, self.dataset, examples)
        except UserError as error:
            return {"bits_per_byte": None, "reason": str(error)}
        return {"bits_per_byte": bits_per_byte(result.loss, result.tokens, size), "bytes": size}


@dataclass(frozen=True)
class RecordsTask(Evaluation):
    """Accuracy on the records of a file."""

    kind: str
    """``labelled`` or ``generative``."""
    file: Path
    template: Template
    prompts: PromptBuilder
    records: list[EncodedRecord]
    skipped: dict[str, int]
    """Number of skipped records by reason."""
    batch_size: int
    max_new_tokens: int

    def measure(self, generator: Generator, progress: Progress) -> dict[str, Any]:
        from megatron_llama.tools.inference.evaluation import answer_accuracy, label_accuracy

        name = self.prompts.template
        report: dict[str, Any] = {
            self.kind: str(self.file),
            "template": asdict(self.template),
            "chat": name not in ("plain", "none"),
            "chat_template": name,
            "skipped": self.skipped,
        }
        if self.kind == "labelled":
            results = label_accuracy(generator, self.records, self.template, self.batch_size, progress)
        else:
            report["max_new_tokens"] = self.max_new_tokens
            decode, size, most = self.prompts.tokenizer.decode, self.batch_size, self.max_new_tokens
            results = answer_accuracy(generator, self.records, self.template, decode, size, most, progress)
        return {**report, **results}


@dataclass(frozen=True)
class HarnessTask(Evaluation):
    """Scores of tasks of lm-evaluation-harness."""

    tokenizer: Tokenizer
    names: str
    """Comma-separated names."""
    include_path: Path | None
    tasks: list[Any]
    """Loaded tasks."""
    batch_size: int
    limit: int | None
    num_fewshot: int | None
    chat: PromptBuilder | None
    """Chat template; None: plain prompts."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tasks": []}  # a task cannot be pickled; a spawned rank reads the datasets' cache

    def measure(self, generator: Generator, progress: Progress) -> dict[str, Any]:
        from megatron_llama.tools.inference.harness import HarnessModel, evaluate_tasks, run_harness
        from megatron_llama.tools.inference.harness_tasks import find_tasks, load_tasks

        def evaluate(model: HarnessModel) -> dict[str, Any]:
            tasks = self.tasks or load_tasks(find_tasks(self.names, self.include_path))
            return evaluate_tasks(model, tasks, self.limit, self.num_fewshot)

        results = run_harness(generator, self.tokenizer, self.batch_size, evaluate, self.chat)
        template = None if self.chat is None else self.chat.template
        return {"lm_eval": self.names, "limit": self.limit, "chat_template": template, **(results or {})}


def main(argv: Sequence[str], start: StartRanks) -> int:
    """Run ``scripts/evaluate.py`` with ``argv`` on ranks started by ``start``; return the exit status."""
    arguments, problems = parser().parse_args(argv), Problems()
    _check(arguments, problems)
    named = None
    if arguments.lm_eval is not None:
        from megatron_llama.tools.inference.harness_tasks import find_tasks

        named = problems.collect(find_tasks, arguments.lm_eval, arguments.include_path)
    return run_task(arguments, start, partial(_task, named), problems, needs_tokenizer=arguments.dataset is None)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = model_parser(DESCRIPTION, EPILOG)
    made.add_argument("--dataset", metavar="PREFIX", help="indexed dataset, path without .bin and .idx")
    made.add_argument("--labelled", type=Path, metavar="FILE", help="labeled records: .tsv with a header, or .jsonl")
    made.add_argument("--generative", type=Path, metavar="FILE", help="records: .tsv with a header, or .jsonl")
    made.add_argument("--lm-eval", metavar="TASKS", help="comma-separated tasks of lm-evaluation-harness (extra: eval)")
    made.add_argument("--num-fewshot", type=int, metavar="N", help="examples in a prompt of --lm-eval")
    made.add_argument("--include-path", type=Path, metavar="DIR", help="folder with more task files for --lm-eval")
    made.add_argument("--template", metavar="NAME", help="prompt template: qnli, sst2, gsm8k, or a JSON file")
    made.add_argument("--chat", action="store_true", help="use the run's or the tokenizer's chat template")
    names = f"{', '.join(CHAT_TEMPLATES)}, FILE.jinja, or none for plain prompts"
    made.add_argument("--chat-template", type=template_name, metavar="NAME", help=names)
    made.add_argument("--limit", type=int, metavar="N", help="use the first N records, or documents per task")
    made.add_argument("--batch-size", type=int, default=16, metavar="N", help="records per batch (default: 16)")
    made.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="answer length limit (default: 256)")
    made.add_argument("--seq-length", type=int, metavar="N", help="tokens per window (default: as in training)")
    made.add_argument("--max-tokens", type=int, metavar="N", help="use the first N tokens of the dataset")
    made.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")
    return made


def _check(arguments: argparse.Namespace, problems: Problems) -> None:
    """Add the problems of the arguments."""
    tasks = {f"--{name}": getattr(arguments, name) for name in ("dataset", "labelled", "generative", "lm_eval")}
    tasks = {flag.replace("_", "-"): value for flag, value in tasks.items()}
    given = [flag for flag, value in tasks.items() if value is not None]
    if len(given) != 1:
        rule = f"exactly one is required, not {' and '.join(given)}" if given else "exactly one is required"
        problems.add(" ".join(tasks), None, rule, "write one of them")
    elif given[0] in ("--labelled", "--generative") and arguments.template is None:
        name = "qnli" if arguments.labelled else "gsm8k"
        problems.add("--template", None, f"is required with {given[0]}", f"write --template {name}")
    is_harness = arguments.lm_eval is not None
    for name in ("template", "seq_length", "max_tokens") if is_harness else ("num_fewshot", "include_path"):
        if getattr(arguments, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            rule = "does not apply to --lm-eval" if is_harness else "applies only to --lm-eval"
            problems.add(flag, str(getattr(arguments, name)), rule, f"remove {flag}")
    if arguments.num_fewshot is not None and arguments.num_fewshot < 0:
        problems.add("--num-fewshot", arguments.num_fewshot, "must be at least 0", "write --num-fewshot 0")
    for name in ("limit", "batch_size", "max_new_tokens", "seq_length"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            flag = f"--{name.replace('_', '-')}"
            problems.add(flag, value, "must be at least 1", f"remove {flag}")
    if arguments.max_tokens is not None and arguments.max_tokens < 2:
        rule = "must be at least 2, because the first token is not predicted"
        problems.add("--max-tokens", arguments.max_tokens, rule, "remove --max-tokens")
    folder = arguments.output.absolute().parent if arguments.output else None
    if folder is not None and not folder.is_dir():
        rule = f"folder not found: {folder}"
        problems.add("--output", str(arguments.output), rule, "create the folder, or write another path")


def _task(
    named: NamedTasks | None, arguments: argparse.Namespace, opened: OpenedModel, problems: Problems
) -> Evaluation | None:
    """Create the task with its encoded records; on errors return None and add to ``problems``."""
    context = longest_sequence(opened.saved.model)
    length = arguments.seq_length or min(opened.saved.seq_length, context)
    if length > context:
        problems.add("--seq-length", length, f"the model has {context} positions", f"write --seq-length {context}")
    if arguments.lm_eval is not None:
        return None if named is None else _harness_task(named, arguments, opened, problems)
    if arguments.dataset is None:
        return _records_task(arguments, opened, problems)

    from megatron_llama.tools.inference.evaluation import is_fine_tuning_set, open_examples, open_ids

    is_set = is_fine_tuning_set(arguments.dataset)
    problems.collect(open_examples if is_set else open_ids, arguments.dataset, opened.saved.model)
    for flag, value in (("--seq-length", arguments.seq_length), ("--max-tokens", arguments.max_tokens)):
        if is_set and value is not None:
            problems.add(flag, value, "does not apply to a fine-tuning set", f"remove {flag}")
    dataset, most = arguments.dataset, arguments.max_tokens
    return DatasetTask(frozenset(), arguments.output, dataset, length, most, opened.tokenizer)


def template_name(text: str) -> str:
    """Check the name of a chat template on the command line."""
    if text not in (*CHAT_TEMPLATES, "none") and not is_template_file(text):
        raise argparse.ArgumentTypeError(f"{text}: write {', '.join(CHAT_TEMPLATES)}, none or FILE.jinja")
    return text


def _harness_task(
    named: NamedTasks, arguments: argparse.Namespace, opened: OpenedModel, problems: Problems
) -> HarnessTask | None:
    from megatron_llama.tools.inference.chat import open_prompt_builder, trained_stop_ids
    from megatron_llama.tools.inference.harness_tasks import load_tasks, task_problems
    from megatron_llama.tools.inference.saved_model import stop_ids

    tasks = problems.collect(load_tasks, named)
    if tasks is None or opened.tokenizer is None:
        return None
    problems.items += task_problems(tasks, longest_sequence(opened.saved.model))
    saved, text, name = opened.saved, opened.tokenizer, arguments.chat_template
    chat, stop = None, stop_ids(saved, text)
    if arguments.chat or name not in (None, "none"):
        chat = problems.collect(open_prompt_builder, text, name, saved.trained_template, "own")
    else:
        stop |= trained_stop_ids(text, saved.trained_template)
    return HarnessTask(
        stop=stop | (frozenset() if chat is None else chat.stop),
        output=arguments.output,
        tokenizer=opened.tokenizer,
        names=arguments.lm_eval,
        include_path=arguments.include_path,
        tasks=tasks,
        batch_size=arguments.batch_size,
        limit=arguments.limit,
        num_fewshot=arguments.num_fewshot,
        chat=chat,
    )


def _records_task(arguments: argparse.Namespace, opened: OpenedModel, problems: Problems) -> RecordsTask | None:
    from megatron_llama.tools.inference.chat import open_prompt_builder
    from megatron_llama.tools.inference.evaluation import TEMPLATES, encode_records, find_template, read_records
    from megatron_llama.tools.inference.saved_model import stop_ids

    kind, file = ("labelled", arguments.labelled) if arguments.labelled else ("generative", arguments.generative)
    if file is None or arguments.template is None:
        return None
    template = problems.collect(find_template, arguments.template)
    if template is None:
        return None
    if bool(template.labels) != (kind == "labelled"):
        rule = "has labels; use --labelled" if template.labels else "has no labels; use --generative"
        problems.add("--template", arguments.template, rule, "write another template")
        return None
    records = problems.collect(read_records, file, template, arguments.limit)
    if records is None or opened.tokenizer is None or problems.items:
        return None
    # Without a template of training: built-in templates use plain prompts that end with a line feed, templates from a
    # file are complete prompts.
    default = "own" if arguments.chat else "plain" if arguments.template in TEMPLATES else "none"
    saved, name = opened.saved, arguments.chat_template
    builder = problems.collect(open_prompt_builder, opened.tokenizer, name, saved.trained_template, default)
    if builder is None:
        return None
    context = longest_sequence(saved.model)
    room = context if template.labels else context - 1
    encoded = problems.collect(encode_records, records, template, builder, room) or []
    if not encoded and not problems.items:
        problems.add("FILE", str(file), f"no record fits into the model's {context} positions", "name another file")
    return RecordsTask(
        stop=stop_ids(saved, opened.tokenizer) | builder.stop,
        output=arguments.output,
        kind=kind,
        file=file,
        template=template,
        prompts=builder,
        records=encoded,
        skipped=dict(records.skipped),
        batch_size=arguments.batch_size,
        max_new_tokens=arguments.max_new_tokens,
    )


def describe(report: dict[str, Any]) -> str:
    """Format the results of a report in one or two lines."""
    if "dataset" in report:
        per_byte, reason = report["bits_per_byte"], report.get("reason", "the text has no byte")
        shown = f"bits per byte unknown ({reason})" if per_byte is None else f"{per_byte:.4f} bits per byte"
        results = f"perplexity {report['perplexity']:.4f}, {shown}, loss {report['loss']:.6f}"
        return f"{results}, over {report['tokens']:,} tokens"
    if "lm_eval" in report:
        from megatron_llama.tools.inference.harness_tasks import describe_results

        return describe_results(report)
    skipped = sum(report["skipped"].values())
    reasons = ", ".join(f"{count} {reason}" for reason, count in report["skipped"].items())
    excluded = f"\nskipped records: {reasons}" if skipped else ""
    if "labelled" in report:
        most = report["majority"]
        return f"accuracy {_share(report['accuracy'])}; majority label {most['label']}: {most['share']:.1%}{excluded}"
    return f"well formed {_share(report['well_formed'])}\nexact match {_share(report['exact_match'])}{excluded}"


def _share(share: dict[str, Any]) -> str:
    return f"{share['share']:.1%} of {share['of']:,} (95 %: {share['low']:.1%} to {share['high']:.1%})"


@contextmanager
def _shown_progress() -> Iterator[Progress]:
    """Return a callback that shows a progress bar on stderr, opened at the first call."""
    from megatron_llama.system.progress import ProgressBar

    with ExitStack() as stack:
        bars: list[ProgressBar] = []

        def show(done: int, of: int) -> None:
            if bars:
                bars[0].show(done)
            else:  # after the first batch, which warms up
                bars.append(stack.enter_context(ProgressBar("evaluate", "done", of)))
                bars[0].start_at(done)

        yield show
