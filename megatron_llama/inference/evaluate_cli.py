"""``scripts/evaluate.py``: perplexity, accuracy on labels, or written answers, as a line and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_llama.config.settings import CHAT_TEMPLATES as TEMPLATES
from megatron_llama.inference import arguments as inference

if TYPE_CHECKING:
    from megatron_llama.inference.accuracy import Asked
    from megatron_llama.inference.arguments import Loaded, Problems
    from megatron_llama.inference.eval_data import Records, Template
    from megatron_llama.inference.generator import Generator

DESCRIPTION = """\
Say how good a model is: python scripts/evaluate.py CHECKPOINT followed by one of
  --dataset PREFIX                            perplexity on an indexed dataset
  --labelled FILE --template qnli             accuracy: which label is likelier after the prompt
  --generative FILE.jsonl --template gsm8k    written answers: share with a "#### number", and with the right one

CHECKPOINT is a training checkpoint of any layout, a run's folder (its newest checkpoint), a Hugging Face folder, or a
PEFT adapter's; what LoRA has trained is added to its base while loading.
"""
EPILOG = "Exit status: 0 done, 2 a mistake in what was asked, else a failure. docs/evaluation.md says what is measured."


@dataclass
class Task:
    """What is asked of the ranks."""

    dataset: str | None
    seq_length: int
    max_tokens: int | None
    labelled: Path | None
    generative: Path | None
    template: Template | None
    records: Records | None
    asked: list[Asked]
    batch_size: int
    max_new_tokens: int
    output: Path | None


def main(argv: Sequence[str], start: inference.Start) -> int:
    """Runs ``scripts/evaluate.py`` with ``argv``; returns the exit status."""
    arguments = parser().parse_args(argv)  # first: --help needs no torch
    return inference.run(lambda: _main(arguments, start))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="evaluate.py", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    inference.add_arguments(made)
    made.add_argument("--dataset", metavar="PREFIX", help="indexed dataset, without .bin and .idx")
    made.add_argument("--labelled", type=Path, metavar="FILE", help=".tsv with a head, or .jsonl")
    made.add_argument("--generative", type=Path, metavar="FILE", help=".tsv with a head, or .jsonl")
    made.add_argument("--template", metavar="NAME", help="qnli, sst2, gsm8k, or a JSON file (docs/evaluation.md)")
    made.add_argument("--chat", action="store_true", help="ask in the chat template it was taught in, else own")
    made.add_argument(
        "--chat-template", choices=(*TEMPLATES, "none"), help="ask in this one; none: prompts as they are"
    )
    made.add_argument("--limit", type=int, metavar="N", help="the first N records only")
    made.add_argument("--batch-size", type=int, default=16, metavar="N", help="records at a time (default 16)")
    made.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="of an answer (default 256)")
    made.add_argument("--seq-length", type=int, metavar="N", help="of a window (default: the run's)")
    made.add_argument("--max-tokens", type=int, metavar="N", help="the dataset's first N tokens only")
    made.add_argument("--output", type=Path, metavar="FILE", help="the report, as JSON")
    return made


def _main(arguments: argparse.Namespace, start: inference.Start) -> int:
    problems = inference.Problems()
    _check(arguments, problems)
    loaded = inference.open_model(arguments, problems, needs_text=arguments.dataset is None)
    task = None if loaded is None else _task(arguments, loaded, problems)
    problems.check()
    assert loaded is not None and task is not None, "where there is no problem there is a task"
    return start(partial(evaluate_rank, loaded, task), loaded.plan, imports=inference.IMPORTS)


def _check(arguments: argparse.Namespace, problems: Problems) -> None:
    """What can be said of the arguments without opening anything."""
    tasks = {f"--{name}": getattr(arguments, name) for name in ("dataset", "labelled", "generative")}
    given = {flag: value for flag, value in tasks.items() if value is not None}
    if len(given) != 1:
        rule = f"{' and '.join(given)} are given" if given else "nothing is asked for"
        problems.add(" ".join(tasks), None, f"{rule}, and one is evaluated at a time", "write one of them")
    elif "--dataset" not in given and arguments.template is None:
        flag, name = next(iter(given)), "qnli" if arguments.labelled else "gsm8k"
        problems.add("--template", None, f"{flag} needs to know how its records are asked", f"write --template {name}")
    for name in ("limit", "batch_size", "max_new_tokens", "seq_length"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            problems.add(f"--{name.replace('_', '-')}", value, "must be at least 1", "leave it out")
    if arguments.max_tokens is not None and arguments.max_tokens < 2:
        problems.add("--max-tokens", arguments.max_tokens, "must be at least 2: the first is predicted by none", "")
    folder = arguments.output.absolute().parent if arguments.output else None
    if folder is not None and not folder.is_dir():
        problems.add("--output", str(arguments.output), f"there is no folder {folder}", "make it, or write another")


def _task(arguments: argparse.Namespace, loaded: Loaded, problems: Problems) -> Task:
    """The task, with its records as ids; what can't be asked is added to ``problems``."""
    from megatron_llama.inference.accuracy import ask
    from megatron_llama.inference.eval_data import TEMPLATES as OURS
    from megatron_llama.inference.eval_data import find_template, read_records
    from megatron_llama.inference.perplexity import open_examples, open_ids

    context = loaded.source.model.max_position_embeddings
    length = arguments.seq_length or min(loaded.source.seq_length, context)
    if length > context:
        problems.add("--seq-length", length, f"the model has {context} positions", f"write --seq-length {context}")
    template, records, asked = None, None, []
    file = arguments.labelled or arguments.generative
    if arguments.dataset is not None:
        model = loaded.source.model
        problems.of(lambda: open_examples(arguments.dataset, model) or open_ids(arguments.dataset, model))
        _check_examples(arguments, problems)
    elif file is not None and arguments.template is not None:
        template = problems.of(lambda: find_template(arguments.template))
        if template is not None and bool(template.labels) != (arguments.labelled is not None):
            rule = "has labels, for --labelled" if template.labels else "has no labels to compare"
            problems.add("--template", arguments.template, rule, "write another template")
            template = None
    if template is not None:
        found = template
        records = problems.of(lambda: read_records(file, found, arguments.limit))
    if template is not None and records is not None and loaded.text is not None and not problems.found:
        room = context if template.labels else context - 1
        # Nobody taught it: our questions then have the answer on the next line, and a file's prompts are as they are.
        otherwise = "own" if arguments.chat else "plain" if arguments.template in OURS else "none"
        problems.of(lambda: inference.open_prompt_builder(loaded, arguments.chat_template, otherwise))
        prompts, some = loaded.prompts, records
        asked = [] if prompts is None else problems.of(lambda: ask(some, found, prompts, room)) or []
        if not asked and not problems.found:
            problems.add("FILE", str(file), f"no record fits into the model's {context} positions", "name another")
    return Task(
        arguments.dataset,
        length,
        arguments.max_tokens,
        arguments.labelled,
        arguments.generative,
        template,
        records,
        asked,
        arguments.batch_size,
        arguments.max_new_tokens,
        arguments.output,
    )


def _check_examples(arguments: argparse.Namespace, problems: Problems) -> None:
    """A fine-tuning set is not cut, so that nothing says where."""
    from megatron_llama.data.indexed_format import MASK_SUFFIX

    if Path(f"{arguments.dataset}{MASK_SUFFIX}.idx").is_file():
        for name in ("seq_length", "max_tokens"):
            if (value := getattr(arguments, name)) is not None:
                flag = f"--{name.replace('_', '-')}"
                problems.add(flag, value, "cuts text, and a fine-tuning set has whole examples", f"leave {flag} out")


def evaluate_rank(loaded: Loaded, task: Task) -> None:
    """What each rank does; rank 0 reports."""
    from megatron_llama.inference.generator import generator

    speaks = os.environ["RANK"] == "0"
    with generator(loaded.source, loaded.plan, loaded.stop) as made:
        start = time.perf_counter()
        result = _measured(made, loaded, task, _Progress() if speaks else None)
        if not speaks:
            return
        report: dict[str, Any] = {
            "model": str(loaded.source.folder),
            "device": loaded.plan.config.device.name,
            "dtype": loaded.plan.precision.compute_dtype,
            "tp": loaded.plan.config.trainer.tp,
            "seconds": time.perf_counter() - start,
            **result,
        }
        sys.stdout.write(describe(report) + "\n")
        if task.output is not None:
            task.output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _measured(made: Generator, loaded: Loaded, task: Task, progress: _Progress | None) -> dict[str, Any]:
    from megatron_llama.inference.accuracy import accuracy, written
    from megatron_llama.inference.perplexity import learned_perplexity, open_examples, open_ids, perplexity

    if task.dataset is not None:
        examples = open_examples(task.dataset, loaded.source.model)
        if examples is not None:
            return {"dataset": task.dataset, **asdict(learned_perplexity(made, examples, progress))}
        ids = open_ids(task.dataset, loaded.source.model)[: task.max_tokens]
        return {"dataset": task.dataset, **asdict(perplexity(made, ids, task.seq_length, progress))}
    assert task.template is not None and task.records is not None
    assert loaded.text is not None and loaded.prompts is not None
    name = loaded.prompts.template
    common = {"template": asdict(task.template), "chat": name not in ("plain", "none"), "chat_template": name}
    common["skipped"] = task.records.skipped
    if task.labelled is not None:
        found = accuracy(made, task.asked, task.template, task.batch_size, progress)
        return {"labelled": str(task.labelled), **common, **found}
    found = written(made, task.asked, task.template, loaded.text, task.batch_size, task.max_new_tokens, progress)
    return {"generative": str(task.generative), **common, "max_new_tokens": task.max_new_tokens, **found}


def describe(report: dict[str, Any]) -> str:
    """The report's figures in a line or two."""
    skipped = sum(report.get("skipped", {}).values())
    left_out = f" ({skipped} left out: {report['skipped']})" if skipped else ""
    if "dataset" in report:
        return f"perplexity {report['perplexity']:.4f}, loss {report['loss']:.6f}, over {report['tokens']:,} tokens"
    if "labelled" in report:
        most = report["majority"]
        return f"accuracy {_words(report['accuracy'])}; always {most['label']}: {most['share']:.1%}{left_out}"
    formed, right = _words(report["well_formed"]), _words(report["exact_match"])
    return f"well formed {formed}\nexact match {right}{left_out}"


def _words(share: dict[str, Any]) -> str:
    return f"{share['share']:.1%} of {share['of']:,} (95 %: {share['low']:.1%} to {share['high']:.1%})"


class _Progress:
    """How far it is, on a terminal."""

    def __call__(self, done: int, of: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{done:,} of {of:,}" + ("\n" if done == of else ""))
            sys.stderr.flush()
