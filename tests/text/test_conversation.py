"""Fine-tuning records: each format to the conversation it means."""

from __future__ import annotations

from typing import Any

import pytest

from data_prep.lib.records import parse_turns
from megatron_llama.text.conversation import LABELLED, REASONS, RecordError, Turn, labelled_turns

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
TWO = [Turn("user", "q"), Turn("assistant", "a")]
ASKED = [Turn("user", "q", False), Turn("assistant", "a")]
RECORDS: dict[str, tuple[dict[str, Any], list[Turn]]] = {
    "messages": ({"messages": [Q, A]}, TWO),
    "messages with calls of nulls, as Arrow fills missing structs": (
        {"messages": [Q, {**A, "function_call": {"name": None, "arguments": ""}, "tool_calls": [{"f": {"a": None}}]}]},
        TWO,
    ),
    "messages, parts, developer, weight 0": (
        {
            "messages": [
                {"role": "developer", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant", "content": "b", "weight": 0},
                A,
            ]
        },
        [Turn("system", "s"), Turn("user", "q"), Turn("assistant", "b", False), Turn("assistant", "a")],
    ),
    "sharegpt": ({"conversations": SHAREGPT}, TWO),
    "prompt and completion": ({"prompt": "q", "completion": " a"}, ASKED),
    "prompt and completion as messages": ({"prompt": [Q], "completion": [A]}, ASKED),
    "rm-static": (
        {
            "prompt": "\n\nHuman: q1\n\nAssistant: a1\n\nHuman: q2\nmore\n\nAssistant:",
            "chosen": " a2",
            "rejected": " never",
        },
        [Turn("user", "q1", False), Turn("assistant", "a1", False), Turn("user", "q2\nmore", False)]
        + [Turn("assistant", "a2")],
    ),
    "hh-rlhf": ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: never"}, ASKED),
    "preference, messages": ({"chosen": [Q, A], "rejected": []}, ASKED),
    "conversations with role and content": (
        {"conversations": [{**Q, "role": "User"}, {**A, "role": "Assistant"}]},
        TWO,
    ),
    "LMSYS": ({"conversation": [Q, A]}, TWO),
    "messages with from and value": ({"messages": SHAREGPT}, TWO),
    "prompt and response": ({"prompt": "q", "response": "a", "tools": []}, ASKED),
    "system next to the turns": ({"system": "s", "conversations": SHAREGPT}, [Turn("system", "s"), *TWO]),
    "preference next to ShareGPT": ({"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": {}}, ASKED),
    "only the beginning of a dialogue": (
        {"prompt": "Human: q", "completion": "a"},
        [Turn("user", "Human: q", False), TWO[1]],
    ),
    "KTO, a good answer": ({"prompt": "q", "completion": "a", "label": True}, ASKED),
    "gsm8k": ({"question": "q", "answer": "1+1\n#### 2"}, [TWO[0], Turn("assistant", "1+1\n#### 2")]),
}


@pytest.mark.parametrize(("record", "turns"), RECORDS.values(), ids=RECORDS)
def test_formats(record: dict[str, Any], turns: list[Turn]) -> None:
    assert parse_turns(record, "auto") == (turns, [])


def test_alpaca_prompts_are_the_published_ones() -> None:
    plain, _ = parse_turns({"instruction": "Do it.", "input": "", "output": "Done."}, "auto")
    assert plain[0].text == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nDo it.\n\n### Response:"
    )
    given, _ = parse_turns({"instruction": "Do it.", "input": "x", "output": "Done."}, "alpaca")
    assert given[0].text == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nDo it.\n\n### Input:\nx\n\n### Response:"
    )
    assert given[1] == Turn("assistant", "Done.")


def test_alpaca_with_system_and_history_and_dolly() -> None:
    record = {"instruction": "I", "output": "O", "system": "S", "history": [["q", "a"]]}
    turns, _ = parse_turns(record, "auto")
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "user", "assistant"]
    assert [turn.text for turn in turns][::2] == ["S", "a", "O"] and "\nq\n" in turns[1].text and turns[2].learn
    dolly, _ = parse_turns({"instruction": "I", "context": "C", "response": "R", "category": "x"}, "auto")
    assert dolly == parse_turns({"instruction": "I", "input": "C", "output": "R"}, "alpaca")[0]


CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("rejected_answer", {"prompt": "q", "completion": "never", "label": False}),
    ("rejected_answer", {"messages": [Q, A], "kto_tag": False}),
    ("tools_not_supported", {"messages": [Q, CALL, A]}),
    ("tools_not_supported", {"conversations": [Q, A], "tools": '[{"name": "f"}]'}),
    ("content_not_text", {"prompt": [1], "completion": "x"}),
    ("content_not_text", {"prompt": "q", "completion": [A, 1]}),
    ("bad_messages", {"messages": [{"role": "system", "content": "s"}, Q, A], "system": "t"}),
    ("bad_messages", {"instruction": "I", "output": "O", "history": ["q", "a"]}),
    ("content_not_text", {"messages": [Q, A], "system": {"text": "s"}}),
]


@pytest.mark.parametrize(("reason", "record"), BAD)
def test_ambiguous_records_are_refused(reason: str, record: dict[str, Any]) -> None:
    with pytest.raises(RecordError) as refused:
        parse_turns(record, "auto")
    assert refused.value.reason == reason and reason in REASONS


@pytest.mark.parametrize("weight", [2, -1, 0.5, float("nan"), float("inf"), "0", [1], {}])
@pytest.mark.parametrize("layout", ["messages", "conversations", "completion", "chosen"])
def test_a_weight_is_0_or_1(layout: str, weight: Any) -> None:
    answer = {**A, "weight": weight}
    record = {
        "messages": {"messages": [Q, answer]},
        "conversations": {"conversations": [{"from": "human", "value": "q"}, {**answer, "from": "gpt"}]},
        "completion": {"prompt": "q", "completion": [answer]},
        "chosen": {"prompt": "q", "chosen": [Q, answer], "rejected": [Q, A]},
    }[layout]
    with pytest.raises(RecordError, match=r"turn \d has weight .*; write 0 \(no loss\) or 1") as refused:
        parse_turns(record, "auto")
    assert refused.value.reason == "bad_weight"


@pytest.mark.parametrize("key", ["weight", "train", "training"])
def test_a_turn_without_loss(key: str) -> None:
    for value, learn in ((0, False), (0.0, False), (False, False), (1, True), (1.0, True), (True, True), (None, True)):
        turns, notes = parse_turns({"messages": [Q, {**A, key: value}, Q, A]}, "auto")
        assert [turn.learn for turn in turns if turn.role == "assistant"] == [learn, True] and not notes
    with pytest.raises(RecordError, match="train_detail"):
        parse_turns({"messages": [Q, {**A, "train_detail": [{"begin_offset": 0, "train": False}]}]}, "auto")
    record = {"prompt": "q", "completion": "a", "weight": 2, "chat_template_kwargs": {"enable_thinking": False}}
    assert parse_turns(record, "auto")[1] == ["weight of the record ignored", "chat_template_kwargs ignored"]
    assert parse_turns({"name": "x", "messages": [{**Q, "name": "Ann"}, A]}, "auto")[1] == ["name of a turn ignored"]


def test_null_counts_as_a_missing_key() -> None:
    mixed = [
        {"role": None, "from": "human", "content": None, "value": "q"},
        {"role": "assistant", "from": None, "content": "a", "value": None},
    ]
    both = {"messages": None, "conversations": mixed, "prompt": None, "completion": None}
    assert parse_turns(both, "auto") == (TWO, [])
    assert parse_turns({"messages": None, "prompt": "q", "completion": None, "response": "a"}, "auto") == (ASKED, [])
    for turn, words in (({"role": None, "content": "q"}, "turn 1 has the role null"), ({"content": "q"}, "no role")):
        with pytest.raises(RecordError, match=words) as refused:
            parse_turns({"messages": [turn, A]}, "auto")
        assert refused.value.reason == "unknown_role"


PAIRS = [{"prompt": "p", "completion": "c"}, {"instruction": "p", "output": "c"}, {"question": "p", "answer": "c"}]


@pytest.mark.parametrize("other", PAIRS)
def test_a_record_in_two_formats_is_ambiguous(other: dict[str, Any]) -> None:
    record = {"messages": [Q, A], **other}
    with pytest.raises(RecordError, match="messages and .*; remove one, or write --format .*messages") as refused:
        parse_turns(record, "auto")
    assert refused.value.reason == "ambiguous_record" and "ambiguous_record" in REASONS
    assert parse_turns(record, "messages") == (TWO, [])
    assert parse_turns({"messages": [Q, A], "prompt": "q", "prompt_id": "1"}, "auto") == (TWO, [])  # UltraChat's
    with pytest.raises(RecordError, match="messages and conversations; remove one$"):
        parse_turns({"messages": [Q, A], "conversations": [Q, A]}, "auto")


def test_qnli() -> None:
    columns = ["index", "question", "sentence", "label"]
    turns = labelled_turns(columns, ["0", "Who?", "He {did} it.", "not_entailment"], LABELLED["qnli"])
    assert turns == [
        Turn(
            "user",
            "Question: Who?\nSentence: He {did} it.\n"
            "Does the sentence contain the answer to the question? Answer yes or no.",
        ),
        Turn("assistant", "no"),
    ]


def test_omitted_parts_are_noted() -> None:
    messages = [{"role": "system", "content": " "}, Q, A, {"role": "user", "content": "x"}]
    turns, notes = parse_turns({"messages": messages}, "auto")
    assert turns == TWO and notes == ["empty system turn left out", "turns after the last answer left out"]
    reasoning = {"messages": [Q, {**A, "reasoning_content": "r"}]}
    assert parse_turns(reasoning, "auto") == (TWO, ["reasoning beside an answer left out"])
