"""Evaluation: equal to transformers on any number of ranks; unusable records are counted."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_llama.config import ConfigError, ModelConfig
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.system.errors import UserError
from megatron_llama.text.chat_template import TrainedTemplate
from megatron_llama.text.conversation import Template
from megatron_llama.text.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from megatron_llama.tools.inference.chat import PromptBuilder
from megatron_llama.tools.inference.evaluate_cli import describe, template_name
from megatron_llama.tools.inference.evaluation import (
    TEMPLATES,
    EncodedRecord,
    answer_accuracy,
    bits_per_byte,
    encode_records,
    final_number,
    find_template,
    fitting_parts,
    label_scores,
    open_examples,
    open_windows,
    predicted_bytes,
    read_records,
    share,
    windows,
)
from tests.data.files import write_indexed
from tests.data_prep.helpers import run_script
from tests.golden import GoldenFiles
from tests.ranks import run_ranks
from tests.tools.inference.models import (
    CHAT_TEMPLATE,
    CPU,
    check_refusals,
    command,
    evaluate,
    make_folder,
    train_sentencepiece,
    with_generator,
    write_tokenizer,
)

HEAD = "index\tquestion\tsentence\tlabel\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "hf", max_position_embeddings=256)


@pytest.fixture(scope="module")
def dataset(folder: Path) -> tuple[str, np.ndarray]:
    """(prefix, ids) of an indexed dataset of several documents."""
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 290, length) for length in (40, 3, 111, 57)]
    return write_indexed(folder.with_name("some_text_document"), documents), np.concatenate(documents)


def report(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    """The JSON of a run of the script."""
    path = tmp_path / "report.json"
    done = command(evaluate, *arguments, *CPU, "--output", path)
    assert done.status == 0, done.err
    return json.loads(path.read_text())


def _their_losses(rank: int, folder: Path, rows: list[np.ndarray]) -> list[tuple[float, int]]:
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        tokens = [torch.from_numpy(row.astype(np.int64))[None] for row in rows]
        return [(llama(row, labels=row).loss.item(), row.shape[1] - 1) for row in tokens]


@pytest.mark.parametrize("tp", [1, 2])
def test_perplexity_is_their_loss_weighted_by_tokens(
    folder: Path, dataset: tuple[str, np.ndarray], tmp_path: Path, tp: int
) -> None:
    prefix, ids = dataset
    results = report(tmp_path, folder, "--dataset", prefix, "--seq-length", 48, "--tp", tp)
    rows = [ids[a : b + 1] for a, b in windows(len(ids), 48)]
    losses = run_ranks(_their_losses, 1, folder, rows)[0]
    expected = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    assert sum(count for _, count in losses) == len(ids) - 1 == results["tokens"]
    assert len({count for _, count in losses}) > 1, "windows of one length would not show a mean of means"
    assert results["loss"] == pytest.approx(expected, rel=1e-6)
    assert results["perplexity"] == pytest.approx(np.exp(expected), rel=1e-5)
    if tp == 1:
        assert report(tmp_path, folder, "--dataset", prefix, "--max-tokens", 50)["tokens"] == 49


@pytest.mark.parametrize("layout", [("--cp", 2), ("--cp", 4), ("--cp", 2, "--tp", 2)], ids=["cp2", "cp4", "cp2 tp2"])
@pytest.mark.parametrize("rope", ["llama3", "dynamic"])
def test_perplexity_of_divided_sequences(
    dataset: tuple[str, np.ndarray], tmp_path: Path, layout: tuple[object, ...], rope: str
) -> None:
    """Windows of 45 tokens and a rest, which 2 * cp does not divide; the angles of dynamic depend on the length."""
    prefix, ids = dataset
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    shape = {"max_position_embeddings": 16, "rope_parameters": scaling} if rope == "dynamic" else {}
    folder = make_folder(tmp_path / "hf", **shape)
    expected = report(tmp_path, folder, "--dataset", prefix, "--seq-length", 45)
    divided = report(tmp_path, folder, "--dataset", prefix, "--seq-length", 45, *layout)
    assert len(ids) - 1 == expected["tokens"] == divided["tokens"]
    assert divided["loss"] == pytest.approx(expected["loss"], rel=1e-6)


Pairs = list[list[tuple[list[int], list[int]]]]


def _their_label_scores(rank: int, folder: Path, pairs: Pairs) -> list[list[float]]:
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(folder).eval()

    def score(prompt: list[int], label: list[int]) -> float:
        with torch.no_grad():
            likelihoods = llama(torch.tensor([prompt + label])).logits[0].double().log_softmax(-1)
        return sum(likelihoods[len(prompt) - 1 + position, one].item() for position, one in enumerate(label))

    return [[score(*pair) for pair in labels] for labels in pairs]


def their_scores(folder: Path, encoded: list[EncodedRecord]) -> list[list[float]]:
    """Log-likelihoods of each record's labels in transformers."""
    return run_ranks(_their_label_scores, 1, folder, [[(a.prompt, label) for label in a.labels] for a in encoded])[0]


BALANCED = Template("{question} and {sentence}", "label", {"entailment": " cat", "not_entailment": " mat"})
LABELS = Template("{question} and {sentence}", "label", {"entailment": " the cat", "not_entailment": " a"})


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(records, template) of sentences of different lengths, with four that can't be used."""
    root = tmp_path_factory.mktemp("labelled")
    words = ["cat", "dog", "mat", "Hello", "the", "on", "sat", "é"]
    generator, lines = np.random.default_rng(1), []
    for number in range(24):
        question, sentence = (" ".join(generator.choice(words, generator.integers(1, 7))) for _ in range(2))
        lines.append(f"{number}\t{question}\t{sentence}\t{'not_' if number % 3 else ''}entailment\n")
    lines += ["24\ta\tb\tneither\n", "25\ta\n", "26\ta\t\tentailment\n", f"27\t{'cat ' * 300}\tb\tentailment\n"]
    (root / "some.tsv").write_text(HEAD + "".join(lines))
    (root / "template.json").write_text(json.dumps(BALANCED.__dict__))
    return root / "some.tsv", root / "template.json"


def test_labels_are_compared_by_their_likelihoods(folder: Path, labelled: tuple[Path, Path], tmp_path: Path) -> None:
    file, template = labelled
    text = HuggingFaceTokenizer(folder)
    encoded = encode_records(
        read_records(file, BALANCED), BALANCED, PromptBuilder(text, TrainedTemplate("none")), max_ids=256
    )
    assert len(encoded) == 24
    assert all(text.decode(one.prompt + one.labels[1]).endswith(" mat") for one in encoded)
    theirs = their_scores(folder, encoded)
    names = list(BALANCED.labels)
    chosen = [names[scores.index(max(scores))] for scores in theirs]
    right = sum(guess == one.record["label"] for guess, one in zip(chosen, encoded, strict=True))
    assert len(set(chosen)) == 2, "the model chooses both labels"
    for more in (["--batch-size", 5], ["--tp", 2, "--batch-size", 24], ["--batch-size", 1]):
        results = report(tmp_path, folder, "--labelled", file, "--template", template, *more)
        assert results["accuracy"]["right"] == right and results["accuracy"]["of"] == 24
        assert [results["labels"][name]["chosen"] for name in names] == [chosen.count(name) for name in names]
    assert results["majority"] == {"label": "not_entailment", "share": 16 / 24}
    assert results["skipped"] == {"unknown label": 1, "unreadable": 1, "lacks a field": 1, "too long": 1}
    assert report(tmp_path, folder, "--labelled", file, "--template", template, "--limit", 7)["accuracy"]["of"] == 7


def test_likelihoods_are_theirs(folder: Path, labelled: tuple[Path, Path]) -> None:
    """The longest prompt and the longest label of different records exceed the model's 256 positions together."""
    records, prompts = (
        read_records(labelled[0], LABELS),
        PromptBuilder(HuggingFaceTokenizer(folder), TrainedTemplate("none")),
    )
    encoded = encode_records(records, LABELS, prompts, max_ids=256)[:10]
    assert len({len(label) for one in encoded for label in one.labels}) > 1
    ids = [*range(3, 290)]
    for prompt, label in ((8, 240), (9, 3), (100, 156), (250, 7), (251, 5), (256, 1)):
        encoded.append(EncodedRecord(ids[:prompt], [ids[:label], ids[1:2]], {}))
    ours = with_generator(lambda made: label_scores(made, encoded), folder)[0]
    theirs = torch.tensor(their_scores(folder, encoded), dtype=torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert [*fitting_parts([8, 9, 100, 250], [240, 3, 156, 7], 257)] == [slice(0, 2), slice(2, 3), slice(3, 4)]


def test_a_dataset_needs_no_tokenizer(folder: Path, dataset: tuple[str, np.ndarray], tmp_path: Path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*", "special*"))
    assert (folder / "tokenizer.json").is_file() and not (bare / "tokenizer.json").exists()
    results, whole = (report(tmp_path, each, "--dataset", dataset[0]) for each in (bare, folder))
    assert results["loss"] == whole["loss"] and results["bits_per_byte"] is None
    assert whole["bits_per_byte"] == bits_per_byte(whole["loss"], whole["tokens"], whole["bytes"])
    assert f"{whole['bits_per_byte']:.4f} bits per byte" in describe(whole)
    assert results["reason"] == "the tokenizer is unknown; write --tokenizer PATH"
    assert f"bits per byte unknown ({results['reason']})" in describe(results)
    given = report(tmp_path, bare, "--dataset", dataset[0], "--tokenizer", folder)
    assert given["bits_per_byte"] == whole["bits_per_byte"]
    refused = command(evaluate, bare, "--labelled", dataset[0], "--template", "qnli", *CPU)
    assert refused.status == 2 and "--tokenizer" in refused.err


def test_files_are_read_as_they_are_prepared(tmp_path: Path) -> None:
    good = {"question": "q", "sentence": 'a "b" c', "label": "entailment"}
    table = "question\tsentence\tlabel\r\n" + "\t".join(good.values()) + "\r\nq\ts\tentailment\tmore\nq\ts\n"
    (tmp_path / "table.tsv").write_bytes(table.encode())
    (tmp_path / "array.json").write_text(json.dumps([good, 1], indent=1))
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(f"{json.dumps(good)}\n[]\nno json\n\n".encode()))
    for name, unreadable in (("table.tsv", 2), ("array.json", 1), ("lines.jsonl.gz", 2)):
        assert read_records(tmp_path / name, LABELS) == ([good], {"unreadable": unreadable}), name
    with pytest.raises(ConfigError, match=r"there\s+is\s+no\s+such\s+file"):
        read_records(tmp_path / "nowhere.jsonl", LABELS)
    (tmp_path / "numbers.jsonl").write_text('{"x": 0, "label": 0}\n{"x": null, "label": 1}\n')
    records = read_records(tmp_path / "numbers.jsonl", Template("{x}", "label", {"0": "no", "1": "yes"}))
    assert records == ([{"x": 0, "label": 0}], {"lacks a field": 1})


def test_written_answers(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": "4\n#### 4"}) + "\n" for q in ("2 + 2", "cat", "a b")))
    results = report(tmp_path, folder, "--generative", path, "--template", "gsm8k", "--max-new-tokens", 6)
    assert results["well_formed"]["of"] == results["exact_match"]["of"] == 3
    assert results["exact_match"]["right"] == 0 and len(results["examples"]) == 3


def test_right_wrong_and_malformed_answers(folder: Path) -> None:
    answer_text = ["It is 4.\n#### 4", "#### 5", "It is 6."]
    text = HuggingFaceTokenizer(folder)

    class FixedAnswers:
        """A model that has learned these answers."""

        def generate(self, prompts: list[list[int]], *_: object) -> list[SimpleNamespace]:
            return [SimpleNamespace(ids=text.encode(answer_text[prompt[0]])) for prompt in prompts]

    truth = ("#### 4", "#### 6", "#### 6")
    encoded = [EncodedRecord([number], [], {"answer": answer}) for number, answer in enumerate(truth)]
    template = find_template("gsm8k")
    results = answer_accuracy(FixedAnswers(), encoded, template, text.decode, 2, 16, lambda done, of: None)
    assert [results[kind]["right"] for kind in ("well_formed", "exact_match")] == [2, 1]
    assert [one["written"] for one in results["examples"]] == answer_text


def test_final_numbers() -> None:
    page = ""
    for answer in GoldenFiles.commands("tools/inference/final_numbers.txt"):
        page += f"$ {answer}\n    {final_number(json.loads(answer))}\n"
    GoldenFiles.check("tools/inference/final_numbers.txt", page)


def test_the_interval_is_wilsons() -> None:
    # Newcombe 1998, table I: 81 of 263 and 0 of 20
    assert [share(81, 263)[name] for name in ("low", "high")] == pytest.approx([0.2553, 0.3662], abs=5e-5)
    assert [share(0, 20)[name] for name in ("low", "high")] == pytest.approx([0, 0.1611], abs=5e-5)


def test_templates() -> None:
    assert all(template.fields for template in TEMPLATES.values())
    with pytest.raises(ConfigError, match=r"qnli,\s+sst2,\s+gsm8k,\s+or"):
        find_template("qnl")
    with pytest.raises(ArgumentTypeError, match="plain, none or FILE.jinja"):
        template_name("llama")


ROWS = {"question": " Who sat on the mat?", "sentence": "The cat sat on the mat.", "label": "entailment"}
WORDED = {"question": " 2 + 2 = ?\n", "answer": "2 + 2 = 4\n#### 4"}


@pytest.mark.parametrize("template", ["own", "plain", "dialogue", "mine.jinja"])
@pytest.mark.parametrize("name", ["qnli", "gsm8k"])
def test_prompts_are_those_of_training(folder: Path, tmp_path: Path, name: str, template: str) -> None:
    """Check that the ids before the answer of a training example are the ids of the prompt in evaluation."""
    record = ROWS if name == "qnli" else WORDED
    source = tmp_path / ("set.tsv" if name == "qnli" else "set.jsonl")
    line = "\t".join(record.values()) if name == "qnli" else json.dumps(record)
    source.write_text((HEAD.removeprefix("index\t") if name == "qnli" else "") + line + "\n")
    if template.endswith(".jinja"):
        template = str(tmp_path / template)
        Path(template).write_text(CHAT_TEMPLATE)
    options = ["--seq-length", 256, "--chat-template", template]
    options += ["--template", "qnli"] if name == "qnli" else []
    prefix = ["--output-prefix", tmp_path / "set"]
    done = run_script("sft.py", "--input", source, "--tokenizer-model", folder, *options, *prefix)
    assert done.returncode == 0, done.stderr
    ids, mask = (IndexedDataset(str(tmp_path / f"set_sft{end}")).document(0) for end in ("", "_mask"))
    learned = mask.tolist().index(1)
    task = TEMPLATES[name]
    spaced = replace(task, labels={key: f" {label}" for key, label in task.labels.items()})  # which a turn doesn't have
    prompts = PromptBuilder(HuggingFaceTokenizer(folder), TrainedTemplate(template))
    (one,) = encode_records(read_records(source, task), spaced, prompts, max_ids=256)
    assert one.prompt == ids[:learned].tolist()
    if name == "qnli":
        assert one.labels[0] == ids[learned:][mask[learned:] == 1].tolist()[:-1]  # the last one ends the answer


REFUSALS = [
    "--tp 3 --batch-size 0 --output no/file",
    "--dataset nothing",
    "--dataset some_text_document --seq-length 512",
    "--labelled nothing.tsv --template qnli",
    "--labelled nothing.tsv --seq-length 9 --num-fewshot 2",
    "--labelled nothing.tsv --template gsm8k",
    "--generative x.jsonl --dataset some_text_document",
    "--dataset some_text_document --output hf",
]


@pytest.mark.usefixtures("dataset")
def test_refusals(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    check_refusals("evaluate", evaluate, [f"hf {row}" for row in REFUSALS], folder.parent, monkeypatch, capsys)


def test_a_dataset_with_ids_outside_the_vocabulary_is_refused(dataset: tuple[str, np.ndarray], tmp_path: Path) -> None:
    done = command(evaluate, make_folder(tmp_path / "small", vocab_size=100), *CPU, "--dataset", dataset[0])
    assert done.status == 2 and "vocabulary ends at 99" in done.err


def test_a_missing_harness_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # import raises ImportError
    done = command(evaluate, folder, *CPU, "--lm-eval", "hellaswag", "--tp", 3)
    assert done.status == 2 and "Traceback" not in done.err
    message = " ".join(done.err.split())
    assert "pip install" in message and "[eval]" in message


def test_perplexity_of_a_fine_tuning_set_is_of_its_answers(folder: Path, tmp_path: Path) -> None:
    """Compare with transformers' loss, with label -100 for tokens outside the mask."""
    path, prefix = tmp_path / "some.jsonl", tmp_path / "set"
    lines = [("cat", "the mat"), ("a dog and a cat", "on"), ("é", "Hello the cat sat")]
    path.write_text("".join(json.dumps({"prompt": q, "completion": a}) + "\n" for q, a in lines))
    made = ["--tokenizer-model", folder, "--seq-length", 256, "--output-prefix", prefix]
    assert run_script("sft.py", "--input", path, *made).returncode == 0
    results, divided = (report(tmp_path, folder, "--dataset", f"{prefix}_sft", f"--{axis}", 2) for axis in ("tp", "cp"))
    tokens, masks = (IndexedDataset(f"{prefix}_sft{end}") for end in ("", "_mask"))
    pairs = [(tokens.document(n).tolist(), masks.document(n).tolist()) for n in range(3)]
    split = [[(ids[:at], ids[at : at + 1]) for at in range(1, len(ids)) if mask[at]] for ids, mask in pairs]
    theirs = [one for scores in run_ranks(_their_label_scores, 1, folder, split)[0] for one in scores]
    assert results["tokens"] == len(theirs) == sum(sum(mask) for _, mask in pairs) and results["windows"] == 3
    assert results["loss"] == pytest.approx(-sum(theirs) / len(theirs), rel=1e-5)
    assert divided["tokens"] == results["tokens"] and divided["loss"] == pytest.approx(results["loss"], rel=1e-6)
    rejected = command(evaluate, folder, *CPU, "--dataset", f"{prefix}_sft", "--max-tokens", 9)
    assert rejected.status == 2 and "does not apply to a fine-tuning set" in rejected.err
    for file, content, rule in (
        ("_mask.bin", b"\0" * masks.bin_size, "has no label: each token is masked"),
        ("_mask.bin", b"\3" * masks.bin_size, "answers of --format pairs"),
        (".json", b'{"tokenizer": "t.model", "tokenizer_sha256": "0"}', "write --tokenizer t.model"),
    ):
        Path(f"{prefix}_sft{file}").write_bytes(content)
        masked = command(evaluate, folder, *CPU, "--dataset", f"{prefix}_sft")
        assert masked.status == 2 and rule in " ".join(masked.err.split())


# Bits per byte: the likelihood of a dataset's text over the bytes of the text from which it was made.
TEXTS = ["the cat sat on the mat", " a dog  and\n\n a cat", "é ü 😀 日本", "", "on the mat " * 30]
MODEL = ModelConfig(vocab_size=400)


@pytest.fixture(scope="module", params=["huggingface", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "huggingface":
        write_tokenizer(folder, template=False)
        return HuggingFaceTokenizer(folder)
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    return SentencePieceTokenizer(train_sentencepiece(folder / "tokenizer", **plain))


def test_bytes_of_a_dataset_are_the_documents_bytes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Windows of 7 tokens cut documents and characters."""
    assert tokenizer.end is not None
    documents = [[*tokenizer.encode_text(text), tokenizer.end] for text in TEXTS]
    prefix = write_indexed(tmp_path / "data", documents)
    examples = open_windows(prefix, MODEL, 7, None)
    first = len(tokenizer.decode(documents[0][:1]).encode())
    assert predicted_bytes(tokenizer, prefix, examples) == sum(len(text.encode()) for text in TEXTS) - first
    # The first 2 documents.
    some = open_windows(prefix, MODEL, 7, len(documents[0]) + len(documents[1]))
    assert predicted_bytes(tokenizer, prefix, some) == sum(len(text.encode()) for text in TEXTS[:2]) - first


def test_bytes_of_a_fine_tuning_set_are_the_answers_bytes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [("cat", "the mat"), ("a dog", "é 😀 on"), ("é", "Hello the cat sat")]
    content = "".join(json.dumps({"prompt": one, "completion": other}) + "\n" for one, other in lines)
    (tmp_path / "set.jsonl").write_text(content)
    options = ["--tokenizer-model", tokenizer.path, "--seq-length", 128, "--chat-template", "plain"]
    done = run_script("sft.py", "--input", tmp_path / "set.jsonl", *options, "--output-prefix", tmp_path / "set")
    assert done.returncode == 0, done.stderr
    prefix = f"{tmp_path / 'set'}_sft"
    examples = open_examples(prefix, MODEL)
    assert examples is not None
    ids, mask = (IndexedDataset(prefix + end).document(0) for end in ("", "_mask"))
    assert 0 < mask.sum() < len(ids) - 1, "a prompt without loss"
    assert predicted_bytes(tokenizer, prefix, examples) == sum(len(answer.encode()) for _, answer in lines)


def test_ids_outside_the_tokenizer_are_reported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "data", [[5, tokenizer.size]])
    with pytest.raises(UserError, match=f"id {tokenizer.size}, and .* has only {tokenizer.size} ids"):
        predicted_bytes(tokenizer, prefix, open_windows(prefix, MODEL, 7, None))


def test_the_formula() -> None:
    assert bits_per_byte(math.log(2), 6, 3) == 2
    assert bits_per_byte(1.0, 6, 0) is None
