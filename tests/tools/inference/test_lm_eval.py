"""lm-evaluation-harness on checkpoints: scores equal the scores of its model ``hf`` on the exported model."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from megatron_llama.checkpoint.export import _write_sentencepiece, export
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.config import ConfigError
from megatron_llama.text.chat_template import TrainedTemplate
from megatron_llama.text.tokenizer import Tokenizer, open_tokenizer
from megatron_llama.tools.inference.arguments import inference_plan
from megatron_llama.tools.inference.chat import PromptBuilder
from megatron_llama.tools.inference.generator import Generator
from megatron_llama.tools.inference.saved_model import open_saved_model, stop_ids, tokenizer_of
from tests.checkpoint.runner import Job
from tests.ranks import run_ranks
from tests.tools.inference.models import CPU, command, evaluate, in_generator, make_folder, train_sentencepiece

pytest.importorskip("lm_eval", reason="lm-evaluation-harness, the extra eval, is not installed")
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TQDM_DISABLE="1")  # read at import
import lm_eval.evaluator  # noqa: E402  before the forks
import lm_eval.models.huggingface  # noqa: E402

from megatron_llama.tools.inference import lm_eval_model, lm_eval_tasks  # noqa: E402

NAMES = ("local_choice", "local_text", "local_answer")
WORDS = "the cat sat on mat a dog and Hello answer question é 😀".split()
TASKS = {
    "local_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "local_answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["do", "\n"], "max_gen_toks": 10, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of three tasks. Some prompts and texts exceed the model's 128 positions; the last prompt is empty."""
    folder, generator = tmp_path_factory.mktemp("tasks"), random.Random(0)

    def text(count: int) -> str:
        return " ".join(generator.choice(WORDS) for _ in range(count))

    documents = [
        {
            "question": "" if number == 9 else text(120 if number == 1 else generator.randint(1, 20)),
            "choices": [" " * (number % 2) + text(generator.randint(1, 4)) for _ in range(3)],
            "label": number % 3,
            "text": text(generator.randint(2, 150)),
            "answer": text(1),
        }
        for number in range(10)
    ]
    (folder / "documents.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))
    files = {"data_files": {"test": str(folder / "documents.jsonl")}, "cache_dir": str(folder / "cache")}
    for name, task in TASKS.items():
        content = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **task}
        (folder / f"{name}.yaml").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer adds BOS."""
    folder = make_folder(tmp_path_factory.mktemp("model") / "hf")
    files = ("tokenizer.json", "tokenizer_config.json")
    tokenizer, settings = (json.loads((folder / name).read_text()) for name in files)
    bos = "<|system|>"
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [1], "tokens": [bos]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": bos}))
    return folder


def samples(model: Any, tasks: Path, **settings: Any) -> dict[str, Any]:
    """Return the harness's results with all samples."""
    manager = lm_eval.evaluator.TaskManager(include_path=str(tasks), include_defaults=False)
    evaluate_them = partial(lm_eval.evaluator.simple_evaluate, bootstrap_iters=0, **settings)
    return dict(evaluate_them(model, tasks=list(NAMES), task_manager=manager))


def theirs(rank: int, folder: Path, tasks: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Results of the harness's model ``hf``."""
    model = lm_eval.models.huggingface.HFLM(str(folder), dtype="float32", device="cpu", batch_size=4)
    return samples(model, tasks, **settings)


def on_ranks(
    folder: Path, work: Callable[[Generator, Tokenizer], Any], tp: int = 1, cp: int = 1, stops: bool = True
) -> list[Any]:
    """Return the results of ``work`` on each rank."""
    saved = open_saved_model(folder)
    tokenizer, plan = tokenizer_of(saved), inference_plan(saved.model, tp, "cpu", cp=cp)
    stop = stop_ids(saved, tokenizer) if stops else frozenset()
    return run_ranks(in_generator, tp * cp, lambda made: work(made, tokenizer), saved, plan, stop)


def ours(
    folder: Path, tasks: Path, tp: int = 1, cp: int = 1, batch_size: int = 4, chat: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Results of rank 0."""

    def work(generator: Generator, tokenizer: Tokenizer) -> Any:
        builder = None if chat is None else PromptBuilder(tokenizer, TrainedTemplate(chat))
        evaluate_tasks = partial(samples, tasks=tasks, **settings)
        return lm_eval_model.run_harness(generator, tokenizer, batch_size, evaluate_tasks, builder)

    return on_ranks(folder, work, tp, cp)[0]


def check_equal(results: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in NAMES:
        for one, other in zip(results["samples"][name], expected["samples"][name], strict=True):
            assert one["arguments"] == other["arguments"]
            if name == "local_answer":
                assert one["resps"] == other["resps"]
                continue
            for (response,), (reference,) in zip(one["resps"], other["resps"], strict=True):
                if name == "local_choice":
                    assert response[1] == reference[1]
                assert response == pytest.approx(reference, rel=1e-5, abs=1e-4)
        scores, reference = ({key: one for key, one in of["results"][name].items() if isinstance(one, float)}
                          for of in (results, expected))  # fmt: skip
        assert scores and scores == pytest.approx(reference, rel=1e-5)


@pytest.fixture(scope="module")
def expected(base: Path, tasks: Path) -> dict[str, Any]:
    """Results of ``hf`` on the base model."""
    return run_ranks(theirs, 1, base, tasks, {})[0]


@pytest.mark.parametrize(("tp", "cp", "batch_size"), [(1, 1, 1), (2, 1, 4), (1, 2, 3)])
def test_scores_of_a_hugging_face_folder(
    base: Path, tasks: Path, expected: dict[str, Any], tp: int, cp: int, batch_size: int
) -> None:
    answers = [one["resps"][0][0] for one in expected["samples"]["local_answer"]]
    assert len(set(answers)) > 5, "a model that repeats itself would show little"
    check_equal(ours(base, tasks, tp, cp, batch_size), expected)


def test_scores_with_the_tokenizers_chat_template(base: Path, tasks: Path) -> None:
    """With an example as an earlier turn."""
    settings = {"apply_chat_template": True, "num_fewshot": 1}
    reference = run_ranks(theirs, 1, base, tasks, settings)[0]
    prompts = [one["arguments"][0][0] for one in reference["samples"]["local_answer"]]
    assert all(prompt.count("<|assistant|>") == 2 for prompt in prompts)
    check_equal(ours(base, tasks, 2, chat="own", **settings), reference)


@pytest.mark.parametrize("name", ["chatml", "dialogue", "prompter", "plain"])
def test_the_text_of_a_named_template_has_its_ids(base: Path, name: str) -> None:
    tokenizer = open_tokenizer(base)
    turns = [("system", "é"), ("user", "the cat"), ("assistant", "sat on"), ("user", "a dog")]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        builder = PromptBuilder(tokenizer, TrainedTemplate(name))
        ids = builder.ids(messages)
    except ConfigError:
        assert name == "chatml", "needs control tokens that this tokenizer lacks"
        return
    model = lm_eval_model.HarnessModel(None, tokenizer, 1, builder)
    assert model.tok_encode(model.apply_chat_template(messages)) == ids
    prefilled = model.apply_chat_template([*messages, {"role": "assistant", "content": "Hello"}], False)
    assert model.tok_encode(prefilled) == builder.ids(messages, "Hello")


@pytest.mark.parametrize("add_bos", [True, False])
def test_scores_with_sentencepiece(tasks: Path, tmp_path: Path, add_bos: bool) -> None:
    """Without the empty prompt: transformers 5 drops a space at the beginning of a text."""
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    model_file = train_sentencepiece(tmp_path / "pieces", **plain)
    folder = make_folder(tmp_path / "hf", vocab_size=open_tokenizer(model_file).size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    _write_sentencepiece(model_file, folder, add_bos)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "eos_token_id": 2}))
    # The model generates neither <unk> nor bytes, because the libraries decode <unk> and invalid UTF-8 differently.
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][[0, 1, *range(3, 259)]] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    settings = {"limit": 9}
    check_equal(ours(folder, tasks, **settings), run_ranks(theirs, 1, folder, tasks, settings)[0])


LORA = ("finetune=lora", "finetune.lora_rank=3", "finetune.lora_target_modules=[q_proj,v_proj,down_proj]")


@pytest.mark.parametrize("method", ["full", "lora"])
def test_scores_of_a_run_are_its_exports_scores(base: Path, tasks: Path, tmp_path: Path, method: str) -> None:
    """A checkpoint of tp 2 in another layout, and the harness on the folder that export writes."""
    job = Job(
        tmp_path / "run", "model=from_hf", f"init_from={base}", "model.vocab_size=290", "model.num_hidden_layers=3",
        "model.tie_word_embeddings=false", "trainer.tp=2", "trainer.steps=2", "optim=constant", "optim.lr=0.05",
        "optim.warmup_steps=0", *(LORA if method == "lora" else ()),
    )  # fmt: skip
    assert job.wait() == 0, job.output
    export(find_checkpoint(tmp_path / "run"), tmp_path / "exported", "float32", merge=method == "lora")
    reference = run_ranks(theirs, 1, tmp_path / "exported", tasks, {})[0]
    check_equal(ours(tmp_path / "run", tasks), reference)
    check_equal(ours(tmp_path / "run", tasks, tp=2), reference)


def test_the_script_reports_the_scores(base: Path, tasks: Path, tmp_path: Path, expected: dict[str, Any]) -> None:
    arguments = (base, *CPU, "--lm-eval", ",".join(NAMES), "--include-path", tasks, "--tp", 2)
    done = command(evaluate, *arguments, "--output", tmp_path / "report.json")
    assert done.status == 0 and "|acc_norm" in done.out.replace(" ", ""), done.err
    report = json.loads((tmp_path / "report.json").read_text())
    for name in NAMES:
        for key, score in expected["results"][name].items():
            if isinstance(score, float) and "stderr" not in key:
                assert report["results"][name][key] == pytest.approx(score, rel=1e-5)
    assert report["tp"] == 2 and report["truncated"] > 0


def test_invalid_tasks_are_reported_together(base: Path, tasks: Path, tmp_path: Path) -> None:
    arguments = ("--lm-eval", "hellaswagg,local_choise,local_text", "--template", "qnli", "--tp", 3)
    done = command(evaluate, base, *CPU, *arguments, "--include-path", tasks)
    message = " ".join(done.err.split())
    assert done.status == 2 and "Traceback" not in message
    for text in ("write hellaswag,", "write local_choice", "--template", "--tp"):
        assert text in message, text


def test_groups_have_scores_and_each_task_is_run_once(tasks: Path) -> None:
    (tasks / "group.yaml").write_text(json.dumps({"group": "local_group", "task": ["local_choice", "local_text"]}))
    loaded = lm_eval_tasks.load_tasks("local_group,local_answer", tasks)
    assert [task.task_name for task in lm_eval_tasks.leaves(loaded)] == list(NAMES)
    with pytest.raises(ConfigError, match="write each task once"):
        lm_eval_tasks.load_tasks("local_group,local_text", tasks)


def test_a_continuation_without_room_ends_all_ranks(base: Path) -> None:
    requests = [SimpleNamespace(args=("the", " cat" * 200))]

    def work(generator: Generator, tokenizer: Tokenizer) -> Any:
        with pytest.raises(ConfigError, match="a continuation has"):
            lm_eval_model.run_harness(generator, tokenizer, 1, lambda model: model.loglikelihood(requests))
        return True

    assert on_ranks(base, work, tp=2, stops=False) == [True, True]


def test_numbers_of_numpy_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    results = {"results": {"some": {"acc,none": np.int64(3)}}, "config": {"device": object()}}
    monkeypatch.setattr(lm_eval_model, "simple_evaluate", lambda *_, **__: results)
    model = SimpleNamespace(truncated=0, chat=None)
    assert lm_eval_model.evaluate_tasks(model, [], None, None) == {"results": {"some": {"acc,none": 3}}, "truncated": 0}


def test_datasets_that_cannot_be_loaded_are_named(tmp_path: Path) -> None:
    local = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(tmp_path / "none.jsonl")}}
    hub = {"dataset_path": "someone/some_dataset"}
    for name, files in {"here": local, "there": hub}.items():
        task = {"task": name, "test_split": "test", **TASKS["local_text"], **files}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))
    with pytest.raises(ConfigError) as error:
        lm_eval_tasks.load_tasks("here,there", tmp_path)
    message = " ".join(str(error.value).split())
    assert len(error.value.problems) == 2
    assert "dataset someone/some_dataset cannot be loaded" in message and "HF_HOME" in message
    assert "none.jsonl" in message


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_gen_toks": 128}, "generates up to 128 tokens, but the model has 128 positions"),
        ({}, "generates up to 256 tokens"),
        ({"num_beams": 2}, "num_beams not supported"),
        ({"do_sample": True, "temperature": 0.0}, "temperature must be at least 1e-06"),
        ({"do_sample": True, "temperature": 0.8, "typical_p": 0.5, "max_gen_toks": 9}, "typical_p not supported"),
        ({"do_sample": True, "temperature": 0.8, "top_p": 0.9, "max_gen_toks": 9}, ""),
        ({"do_sample": False, "temperature": 0.8, "top_k": 5, "max_gen_toks": 9}, ""),
    ],
)
def test_generation_settings_are_honoured_or_rejected(settings: dict[str, Any], text: str) -> None:
    task = SimpleNamespace(
        task_name="some",
        get_config={"output_type": "generate_until", "generation_kwargs": {"until": ["\n"], **settings}}.get,
    )
    problems = lm_eval_tasks.task_problems([task], 128)
    assert [text in problem.rule for problem in problems] == ([True] if text else [])


def test_sampled_answers_differ_between_repeats(base: Path) -> None:
    """Equal requests in different batches have different random numbers, and each run the same."""
    settings = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 2.0}
    requests = [SimpleNamespace(args=("the cat", settings))] * 4

    def work(generator: Generator, tokenizer: Tokenizer) -> Any:
        return lm_eval_model.run_harness(generator, tokenizer, 1, lambda model: model.generate_until(requests))

    (answers,), (repeated,) = (on_ranks(base, work, stops=False) for _ in range(2))
    assert answers == repeated and len(set(answers)) == 4
