"""``scripts/evaluate.py``: perplexity, label accuracy, accuracy of generated answers, or lm-evaluation-harness."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_llama.config.data_settings import is_template_file
from megatron_llama.config.rope import longest_sequence
from megatron_llama.config.settings import CHAT_TEMPLATES
from megatron_llama.system.files import write_atomically
from megatron_llama.system.progress import ProgressBar
from megatron_llama.tools.inference.arguments import Measure, OpenedModel, Problems, Task, model_parser, run_task
from megatron_llama.tools.inference.sampling import flag_of

if TYPE_CHECKING:
    from megatron_llama.tools.inference.generator import Generator

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


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/evaluate.py`` with ``argv``; return the exit status."""
    arguments, problems = parser().parse_args(argv), Problems()
    _check(arguments, problems)
    is_known = True
    if arguments.lm_eval is not None:
        from megatron_llama.tools.inference.lm_eval_tasks import find_tasks

        is_known = problems.collect(find_tasks, arguments.lm_eval, arguments.include_path) is not None
    return run_task(arguments, partial(_task, is_known), problems, needs_tokenizer=arguments.dataset is None)


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
    tasks = {flag_of(name): getattr(arguments, name) for name in ("dataset", "labelled", "generative", "lm_eval")}
    given = [flag for flag, value in tasks.items() if value is not None]
    if len(given) != 1:
        rule = f"exactly one is required, not {' and '.join(given)}" if given else "exactly one is required"
        problems.add(" ".join(tasks), None, rule, "write one of them")
    elif given[0] in ("--labelled", "--generative") and arguments.template is None:
        name = "qnli" if arguments.labelled else "gsm8k"
        problems.add("--template", None, f"is required with {given[0]}", f"write --template {name}")
    only = dict.fromkeys(("seq_length", "max_tokens"), "--dataset")
    only |= dict.fromkeys(("num_fewshot", "include_path"), "--lm-eval") | {"template": "--labelled or --generative"}
    for name, task in only.items():
        value, flag = getattr(arguments, name), flag_of(name)
        if value is not None and len(given) == 1 and given[0] not in task.split(" or "):
            problems.add(flag, str(value), f"applies only to {task}", f"remove {flag}")
    if arguments.num_fewshot is not None and arguments.num_fewshot < 0:
        problems.add("--num-fewshot", arguments.num_fewshot, "must be at least 0", "write --num-fewshot 0")
    for name in ("limit", "batch_size", "max_new_tokens", "seq_length"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            problems.add(flag_of(name), value, "must be at least 1", f"remove {flag_of(name)}")
    if arguments.max_tokens is not None and arguments.max_tokens < 2:
        rule = "must be at least 2, because the first token is not predicted"
        problems.add("--max-tokens", arguments.max_tokens, rule, "remove --max-tokens")
    if (output := arguments.output) is not None:
        folder = output.absolute().parent
        if not folder.is_dir():
            rule = f"folder not found: {folder}"
            problems.add("--output", str(output), rule, "create the folder, or write another path")
        elif output.is_dir() or not (output.is_char_device() or os.access(folder, os.W_OK)):
            rule = "is a folder" if output.is_dir() else f"no permission to write to {folder}"
            problems.add("--output", str(output), rule, "write the path of a file")


def _task(is_known: bool, arguments: argparse.Namespace, opened: OpenedModel, problems: Problems) -> Task | None:
    """Create the task with its encoded records; on errors return None and add to ``problems``.

    ``is_known`` is false if tasks of --lm-eval are unknown.
    """
    from megatron_llama.tools.inference.evaluation import dataset_task, records_task

    context = longest_sequence(opened.saved.model)
    length = arguments.seq_length or min(opened.saved.seq_length, context)
    if length > context:
        problems.add("--seq-length", length, f"the model has {context} positions", f"write --seq-length {context}")
    made: tuple[frozenset[int], Measure] | None = None
    if arguments.dataset is not None:
        made = frozenset[int](), dataset_task(arguments, opened, problems, length)
    elif arguments.lm_eval is None:
        made = records_task(arguments, opened, problems)
    elif is_known:
        from megatron_llama.tools.inference.lm_eval_model import harness_task

        made = harness_task(arguments, opened, problems)
    if made is None:
        return None
    stop, measure = made
    return Task(stop, partial(_run, measure, arguments.output))


def _run(measure: Measure, output: Path | None, generator: Generator, opened: OpenedModel, is_first: bool) -> None:
    """Measure on all ranks; on rank 0 print the report and write it to ``output``."""
    start = time.perf_counter()
    if not is_first:
        measure(generator, opened, lambda done, of: None)
        return
    with _shown_progress() as progress:
        result = measure(generator, opened, progress)
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
    if output is not None:
        write_atomically(output, json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def template_name(text: str) -> str:
    """Check the name of a chat template on the command line."""
    if text not in (*CHAT_TEMPLATES, "none") and not is_template_file(text):
        raise argparse.ArgumentTypeError(f"{text}: write {', '.join(CHAT_TEMPLATES)}, none or FILE.jinja")
    return text


def describe(report: dict[str, Any]) -> str:
    """Format the results of a report in one or two lines."""
    if "dataset" in report:
        per_byte, reason = report["bits_per_byte"], report.get("reason", "the text has no byte")
        shown = f"bits per byte unknown ({reason})" if per_byte is None else f"{per_byte:.4f} bits per byte"
        results = f"perplexity {report['perplexity']:.4f}, {shown}, loss {report['loss']:.6f}"
        return f"{results}, over {report['tokens']:,} tokens"
    if "lm_eval" in report:
        from megatron_llama.tools.inference.lm_eval_tasks import describe_results

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
def _shown_progress() -> Iterator[Callable[[int, int], None]]:
    """Return a callback that shows a progress bar on stderr, opened at the first call."""
    with ExitStack() as stack:
        bars: list[ProgressBar] = []

        def show(done: int, of: int) -> None:
            if bars:
                bars[0].show(done)
            else:  # after the first batch, which warms up
                bars.append(stack.enter_context(ProgressBar("evaluate", "done", of)))
                bars[0].start_at(done)

        yield show
