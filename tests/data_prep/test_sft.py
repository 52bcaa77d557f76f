"""sft.py: counts of records, and the content of the output."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from data_prep.lib import record_formats
from data_prep.lib.record_formats import REPEATED_KEY
from data_prep.lib.sft_and_text_sets import ExampleOptions, build_chat_format
from megatron_llama.system.errors import UserError
from megatron_llama.text.chat_template import (
    Jinja,
    TrainedTemplate,
    load_own_template,
    trained_template,
    write_trained_template,
)
from megatron_llama.text.conversation import Turn
from megatron_llama.text.loss_spans import encode_spans
from megatron_llama.text.tokenizer import HuggingFaceTokenizer
from megatron_llama.tools.inference.chat import PromptBuilder
from tests.data_prep.helpers import (
    BAD_LINES,
    CHATML,
    GOOD,
    assert_refused,
    chat_line,
    output_of,
    read,
    run_script,
    sft_arguments,
)


def prepare(folder: Path, source: Path, prefix: Path, *more: object, length: int = 128) -> CompletedProcess[str]:
    return run_script("sft.py", *sft_arguments(folder, source, prefix, *more, length=length))


@cache
def chat_format(folder: Path) -> tuple[HuggingFaceTokenizer, Jinja]:
    tokenizer = HuggingFaceTokenizer(folder)
    return tokenizer, load_own_template(folder, tokenizer.added_tokens)


def encoded(folder: Path, *turns: Turn) -> tuple[list[int], list[bool]]:
    """Return the ids of a conversation, and whether each has a loss."""
    tokenizer, template = chat_format(folder)
    return encode_spans(template.render_spans(list(turns)), tokenizer, parse_special=True)


def test_every_record_is_accounted_for(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "chat.jsonl"
    bad = list(BAD_LINES.values())
    source.write_text("\n".join([*GOOD[:20], *bad, "", *GOOD[20:], bad[0]]) + "\n")
    assert_refused(prepare(folder, source, tmp_path / "out"), "line 21", "no_assistant_turn", "--on-bad-line skip")
    assert not list(tmp_path.glob("out*"))
    output = output_of(prepare(folder, source, tmp_path / "out", "--on-bad-line", "skip"))
    tokens, masks, manifest = read(tmp_path / "out")
    assert manifest["skipped"] == {**dict.fromkeys(BAD_LINES, 1), "no_assistant_turn": 2}
    assert manifest["documents_read"] == 40 + len(bad) + 1 and len(tokens) == 40
    assert "14 skipped" in output and "1 too_long" in output and "tokens with loss" in output
    entries = [json.loads(line) for line in (tmp_path / "out_sft.quarantine.jsonl").read_text().splitlines()]
    assert [entry["reason"] for entry in entries] == [*BAD_LINES, "no_assistant_turn"] and entries[-1]["line"] == 55
    # The files have exactly the tokens of the examples.
    for number, (ids, mask) in enumerate(zip(tokens, masks, strict=True)):
        turns = [Turn("user", f"Question {number}?"), Turn("assistant", f"Answer {number}.")]
        expected, marks = encoded(folder, *turns)
        assert ids.tolist() == expected and mask.tolist() == [int(mark) for mark in marks]
    assert manifest["tokens"] == sum(map(len, tokens))
    assert manifest["tokens_with_loss"] == sum(int(mask.sum()) for mask in masks)


def test_a_fault_in_reading_is_one_bad_record(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "chat.jsonl"
    source.write_text("\n".join([GOOD[0], '{"question": "q", "answer": "a"}', GOOD[1]]) + "\n")
    monkeypatch.setitem(record_formats._READERS, "gsm8k", lambda record: record["answer"]["no"])
    output_of(prepare(folder, source, tmp_path / "out", "--on-bad-line", "skip"))
    manifest = read(tmp_path / "out")[2]
    assert manifest["skipped"] == {"broken_record": 1} and manifest["documents_written"] == 2


def test_output_is_independent_of_workers_and_not_rewritten(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "chat.jsonl"
    source.write_text("\n".join(GOOD * 20) + "\n")
    for name, workers in (("one", 1), ("three", 3)):
        output_of(prepare(folder, source, tmp_path / name, "--workers", workers))
    for suffix in ("_sft.bin", "_sft.idx", "_sft_mask.bin", "_sft_mask.idx"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"three{suffix}").read_bytes()
    assert "nothing to do" in prepare(folder, source, tmp_path / "one").stdout
    assert_refused(prepare(folder, source, tmp_path / "one", "--train-on-inputs"), "train_on_inputs", "--overwrite")


@pytest.mark.parametrize("over", [0, 1])
def test_truncation_at_the_limit(folder: Path, tmp_path: Path, over: int) -> None:
    """129 tokens fit --seq-length 128, since the last is only a label; longer examples are truncated."""

    def record(words: int) -> tuple[list[Turn], int]:
        turns = [Turn("user", "q"), Turn("assistant", "x" + " é" * words)]
        return turns, len(encoded(folder, *turns)[0])

    words = next(words for words in range(200) if record(words)[1] >= 129 + over)
    turns, count = record(words)
    source = tmp_path / "chat.jsonl"
    hopeless = chat_line(("user", "q " * 400), ("assistant", "a"))
    twice = '{"messages": [], ' + chat_line(*((turn.role, turn.text) for turn in turns))[1:]
    source.write_text(twice + "\n" + hopeless + "\n")
    output_of(prepare(folder, source, tmp_path / "out", "--on-bad-line", "skip", "--too-long", "truncate"))
    (ids,), (mask,), manifest = read(tmp_path / "out")
    assert manifest["skipped"] == {"answer_cut_off": 1}
    assert manifest["changed"] == ({"cut to the sequence's length": 1} if count > 129 else {}) | {REPEATED_KEY: 1}
    assert len(ids) == min(count, 129) and mask[-2] == 1


@pytest.mark.parametrize("length", [300, 110])
def test_pairs(folder: Path, tmp_path: Path, length: int) -> None:
    """Both answers of a record are one example; the longer one is cut to the rest of a short sequence."""
    source, (short, long) = tmp_path / "pairs.jsonl", ("Yes.", "No. " * 60)
    record = {"prompt": "Question 1?", "chosen": short, "rejected": long}
    source.write_text("\n".join(json.dumps(each) for each in (record, {**record, "rejected": short})) + "\n")
    flags = ("--format", "pairs", "--on-bad-line", "skip", "--too-long", "truncate")
    output = output_of(prepare(folder, source, tmp_path / "out", *flags, length=length))
    (ids,), (mask,), manifest = read(tmp_path / "out")
    assert manifest["skipped"] == {"equal_answers": 1} and "finetune.objective=dpo" in output
    question = Turn("user", "Question 1?", False)
    sides = [encoded(folder, question, Turn("assistant", answer.strip())) for answer in (short, long)]
    rest = length + 1 - len(sides[0][0])
    assert ids.tolist() == sides[0][0] + sides[1][0][:rest]
    assert mask.tolist() == [int(mark) for mark in sides[0][1]] + [2 + mark for mark in sides[1][1][:rest]]
    assert manifest["tokens_with_loss"] == int((mask % 2).sum()) and ("cut" in str(manifest["changed"])) == (
        rest < len(sides[1][0])
    )


def test_train_on_inputs_and_bos(folder: Path, tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "chat.jsonl"
    source.write_text(GOOD[0] + "\n")
    for more in ((), ("--train-on-inputs",)):
        output_of(
            prepare(tokenizer, source, tmp_path / f"out{len(more)}", "--chat-template", "plain", "--add-bos", *more)
        )
    (some,), (masked,), _ = read(tmp_path / "out0")
    (same,), (every,), _ = read(tmp_path / "out1")
    assert some.tolist() == same.tolist() and some[0] == 1
    assert every.min() == 1 and 0 < masked.sum() < len(masked) and masked[0] == 0
    assert_refused(prepare(folder, source, tmp_path / "no", "--add-bos"), "already writes the begin-of-text token")
    with pytest.raises(UserError, match=r"ends answers with <\|im_end\|>.*does not have"):
        build_chat_format(ExampleOptions(str(tokenizer), 8, chat_template="chatml"), [])
    chat = build_chat_format(ExampleOptions(str(folder), 8, chat_template="chatml"), [])
    assert chat.tokenizer.control("<|im_end|>") is not None


@pytest.mark.parametrize("marker", [None, "assistant\n"])
def test_rendered_texts(folder: Path, tokenizer: Path, tmp_path: Path, marker: str | None) -> None:
    """A text is encoded as it is, with one end-of-text token, and its last answer has loss."""
    turn = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>"
    texts = [turn.format("No.") + "\n" + turn.format("Yes."), turn.format("Yes.").removesuffix("<|im_end|>")]
    texts.append(turn.format("Yes.") + "\n")  # as templates end
    bad = ["<|im_start|>user\nWhy?", turn.format("")[: -len("<|im_end|>")]]
    rows = [{"text": text} for text in [*texts, *bad]]
    source, flags = tmp_path / "texts.jsonl", ["--format", "text", "--on-bad-line", "skip"]
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"text": " "}, {"texts": "a"}]))
    flags += [] if marker is None else ["--response-marker", marker]
    output_of(prepare(folder, source, tmp_path / "out", *flags))
    ids, masks, manifest = read(tmp_path / "out")
    skipped = {"empty_content": 1, "unknown_format": 1} | ({"empty_content": 2, "no_marker": 1} if marker else {})
    assert manifest["skipped"] == skipped
    encoder = HuggingFaceTokenizer(folder)
    texts[1] += "<|im_end|>"
    assert [row.tolist() for row in ids[:3]] == [encoder.spans(text, parse_special=True).ids for text in texts]
    for row, mask in zip(ids, masks, strict=True):
        learned = encoder.decode(row[mask == 1], skip_special=False)
        assert learned == ("Yes.<|im_end|>" if marker else encoder.decode(row, skip_special=False).rstrip())
    (before, *_), _, _ = read(tmp_path / "out")
    output_of(prepare(tokenizer, source, tmp_path / "bos", *flags, "--add-bos"))
    (first, *_), _, _ = read(tmp_path / "bos")
    assert first[0] == 1 and first[-1] == 2 and len(before) < len(first)


def test_tables_are_split_by_seed(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "qnli.tsv"
    rows = [f'{n}\tWho {n}?\tHe "{n}" did.\t{"entailment" if n % 2 else "not_entailment"}' for n in range(50)]
    source.write_text("\n".join(["index\tquestion\tsentence\tlabel", *rows, "50\tWho?\tHe.\tmaybe", "51\tWho?"]) + "\n")
    more = ("--template", "qnli", "--split", "42,10", "--on-bad-line", "skip")
    for name in ("one", "two"):
        output_of(prepare(folder, source, tmp_path / name, *more))
    parts = [(tmp_path / f"one_{part}.tsv").read_text().splitlines() for part in ("train", "validation")]
    assert [len(lines) - 1 for lines in parts] == [42, 10]
    assert sorted(parts[0][1:] + parts[1][1:]) == sorted(source.read_text().splitlines()[1:])
    assert (tmp_path / "one_validation.tsv").read_bytes() == (tmp_path / "two_validation.tsv").read_bytes()
    manifests = [read(tmp_path / f"one_{part}")[2] for part in ("train", "validation")]
    skipped = [manifest["skipped"] for manifest in manifests]
    assert sum(one.get("unknown_label", 0) for one in skipped) == sum(one.get("bad_columns", 0) for one in skipped) == 1
    assert sum(manifest["documents_written"] for manifest in manifests) == 50


def test_a_template_file_with_tools(folder: Path, tmp_path: Path) -> None:
    """The file may move later: the manifest has its text, for generation and export."""
    file, source = tmp_path / "mine.jinja", tmp_path / "chat.jsonl"
    file.write_text("{{ 'short ' if short }}{{ tools | tojson if tools }}" + CHATML)
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    record = {"tools": tools, "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    rows = [record, {**record, "chat_template_kwargs": {"short": False}}, {**record, "tools": [{"x": 1}]}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--chat-template", file, "--chat-template-kwargs", '{"short": true}', "--on-bad-line", "skip")
    output_of(prepare(folder, source, tmp_path / "out", *flags))
    ids, _, manifest = read(tmp_path / "out")
    tokenizer = HuggingFaceTokenizer(folder)
    texts = [tokenizer.decode(row, skip_special=False) for row in ids]
    assert texts[0] == f"short {texts[1]}" and texts[1].startswith(json.dumps(tools)) and len(texts) == 2
    assert manifest["skipped"] == {"bad_tools": 1}
    trained = trained_template({"data": {"kind": "sft", "prefixes": [f"{tmp_path}/out_sft"]}})
    text = file.read_text()
    file.unlink()
    assert trained == TrainedTemplate(str(file), False, text, '{"short": true}')
    prompts = PromptBuilder(tokenizer, trained)
    assert prompts.ids([{"role": "user", "content": "q"}])[:4] == tokenizer.encode("short ")[:4]
    shutil.copytree(folder, tmp_path / "hf")
    write_trained_template({"data": {"kind": "sft", "prefixes": [f"{tmp_path}/out_sft"]}}, tmp_path / "hf")
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == text
    assert_refused(prepare(folder, source, tmp_path / "no", "--chat-template-kwargs", "[1]"), "write a JSON object")
