"""Tasks of lm-evaluation-harness: names, datasets and generation settings are checked before the ranks start.

The harness is the extra ``eval``. Its modules and torch are imported in functions, because most commands do not need
them.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_llama.config import ConfigError, Problem
from megatron_llama.system.missing_packages import pip_install

if TYPE_CHECKING:
    from megatron_llama.tools.inference.sampling import Sampling

ARGUMENT = "--lm-eval"
MAX_GEN_TOKS = 256  # length limit of an answer if the task sets none, as in the harness's model ``hf``
_HONOURED = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}


def import_harness() -> None:
    """Import the harness; raise ConfigError if it is not installed. Progress bars need a terminal on stderr."""
    # tqdm reads this when it is imported, with torch.
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    # Bootstrapped errors would fork a process per core from a rank.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    try:
        import lm_eval.tasks  # noqa: F401
    except ImportError as error:
        rule = f"needs lm-evaluation-harness, which cannot be imported ({error})"
        raise ConfigError([Problem(ARGUMENT, None, rule, f"run: {pip_install(extra='eval')}")]) from None


@cache
def find_tasks(requested: str, include_path: Path | None) -> tuple[list[str], Any]:
    """Return the names in a comma-separated list of names and patterns, and the harness's index. Loads no dataset.

    Args:
        requested: names, for example ``hellaswag,mmlu_*``.
        include_path: folder of more task files (YAML).

    Raises ConfigError if the harness is not installed, or names are unknown; all unknown names at once.
    """
    import_harness()
    from lm_eval.tasks import TaskManager

    problems: list[Problem] = []
    if include_path is not None and not include_path.is_dir():
        instead = "write a folder of task files"
        problems.append(Problem("--include-path", str(include_path), "folder not found", instead))
        include_path = None
    try:
        manager = TaskManager(include_path=None if include_path is None else str(include_path))
    except Exception as error:  # YAML's errors and others
        raise ConfigError([_invalid("--include-path", str(include_path), error, "correct the task files")]) from None
    names: list[str] = []
    for name in dict.fromkeys(part.strip() for part in requested.split(",") if part.strip()):
        matches = manager.match_tasks([name])
        if not matches:
            close = difflib.get_close_matches(name, manager.all_tasks, 3)
            instead = f"write {', '.join(close)}" if close else "list the names with `lm_eval ls tasks`"
            problems.append(Problem(ARGUMENT, name, "the harness has no such task", instead))
        names += [match for match in matches if match not in names]
    if not names and not problems:
        problems.append(Problem(ARGUMENT, requested, "names no task", "write, for example, hellaswag,arc_easy"))
    if problems:
        raise ConfigError(problems)
    return names, manager


@cache
def load_tasks(requested: str, include_path: Path | None) -> list[Any]:
    """Return the tasks and groups of ``find_tasks``, with their datasets. Forked ranks share them.

    Raises ConfigError for all that cannot be loaded.
    """
    problems, loaded = [], []
    names, manager = find_tasks(requested, include_path)
    for name in names:
        try:
            tasks = manager.load([name])
            # A name is a task, a group with its scores, or a tag: several tasks without common scores.
            loaded += [tasks["groups"][name]] if name in tasks["groups"] else list(tasks["tasks"].values())
        except Exception as error:  # datasets, network, YAML and the task's code have many
            dataset = (manager.task_index[name].cfg or {}).get("dataset_path")
            instead = "connect to the network, or set HF_HOME to a cache with the dataset"
            problems.append(_invalid(ARGUMENT, name, error, instead, f"dataset {dataset}" if dataset else "dataset"))
    if not problems:
        try:
            manager.load(loaded)
        except ValueError as error:  # a task that is also in a group
            problems.append(_invalid(ARGUMENT, ",".join(names), error, "write each task once"))
    if problems:
        raise ConfigError(problems)
    return loaded


def _invalid(field: str, value: str, error: Exception, instead: str, subject: str = "") -> Problem:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return Problem(field, value, f"{subject} cannot be loaded: {lines[0]}".strip(), instead)


def leaves(tasks: Sequence[Any]) -> list[Any]:
    """Return the tasks of tasks and groups."""
    return [leaf for task in tasks for leaf in (task.get_all_tasks() if hasattr(task, "get_all_tasks") else [task])]


def task_problems(tasks: Sequence[Any], context: int) -> list[Problem]:
    """Return the problems of tasks that this model cannot run. ``context``: positions of the model."""
    problems = []
    for task in leaves(tasks):
        name = task.task_name
        if getattr(task, "UNSAFE_CODE", False):
            rule = "runs code that the model generates"
            problems.append(Problem(ARGUMENT, name, rule, "export the model and use lm_eval --confirm_run_unsafe_code"))
        if getattr(task, "MULTIMODAL", False):
            problems.append(Problem(ARGUMENT, name, "has images or sound", "omit this task"))
        if task.get_config("output_type") == "generate_until":
            try:
                generation = Generation.of(task.get_config("generation_kwargs") or {})
            except ValueError as error:
                problems.append(Problem(ARGUMENT, name, f"generation_kwargs: {error}", "change the task's file"))
                continue
            if generation.max_new_tokens >= context:
                rule = f"generates up to {generation.max_new_tokens} tokens, but the model has {context} positions"
                instead = f"write max_gen_toks: {max(1, context // 2)} in the task's generation_kwargs"
                problems.append(Problem(ARGUMENT, name, rule, instead))
    return problems


@dataclass(frozen=True)
class Generation:
    """Settings of generated answers."""

    until: tuple[str, ...]
    """Strings that end an answer and are not part of it."""
    max_new_tokens: int
    sampling: Sampling

    @staticmethod
    def of(kwargs: Mapping[str, Any]) -> Generation:
        """Return the settings of a task's ``generation_kwargs``; raise ValueError for a setting without effect here."""
        from lm_eval.models.utils import normalize_gen_kwargs

        from megatron_llama.tools.inference.sampling import OPTIONS, Sampling, check_option

        given: dict[str, Any] = dict(normalize_gen_kwargs(dict(kwargs), MAX_GEN_TOKS))
        greedy = not given["do_sample"]
        unknown = sorted(set(given) - _HONOURED)
        # These change only sampled answers.
        unknown = [name for name in unknown if not (greedy and name == "typical_p")]
        if unknown:
            raise ValueError(f"{', '.join(unknown)} not supported; supported: {', '.join(sorted(_HONOURED))}")
        if not all(isinstance(text, str) for text in given["until"]):
            raise ValueError("until is not a list of strings")
        fields = {"temperature": 1.0} | {name: given[name] for name in OPTIONS if given.get(name) is not None}
        if greedy:
            fields = {"greedy": True, "repetition_penalty": fields.get("repetition_penalty", 1.0)}
        for name in set(fields) - {"greedy"}:
            if problem := check_option(name, fields[name]):
                raise ValueError(f"{name} {problem.rule}")
        return Generation(tuple(given["until"]), given["max_gen_toks"], Sampling(**fields))


def describe_results(results: Mapping[str, Any]) -> str:
    """Return the harness's tables: tasks, and groups if there are any."""
    from lm_eval.utils import make_table

    tables = [make_table(results)] + ([make_table(results, "groups")] if results.get("groups") else [])
    return "\n".join(table.strip() for table in tables)
