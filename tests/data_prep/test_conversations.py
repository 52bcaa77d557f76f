"""Fine-tuning records: each format to the conversation it means."""

from __future__ import annotations

from typing import Any

import pytest

from data_prep.lib.conversations import LABELLED, Turn, labelled_turns, turns_of

TWO = [Turn("user", "q"), Turn("assistant", "a")]
ASKED = [Turn("user", "q", False), Turn("assistant", "a")]
RECORDS: list[tuple[str, dict[str, Any], list[Turn]]] = [
    ("messages", {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, TWO),
    (
        "messages, parts, developer, weight 0",
        {
            "messages": [
                {"role": "developer", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant", "content": "b", "weight": 0},
                {"role": "assistant", "content": "a"},
            ]
        },
        [Turn("system", "s"), Turn("user", "q"), Turn("assistant", "b", False), Turn("assistant", "a")],
    ),
    ("sharegpt", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, TWO),
    ("prompt and completion", {"prompt": "q", "completion": " a"}, ASKED),
    (
        "prompt and completion as messages",
        {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
        ASKED,
    ),
    (
        "rm-static",
        {
            "prompt": "\n\nHuman: q1\n\nAssistant: a1\n\nHuman: q2\nmore\n\nAssistant:",
            "chosen": " a2",
            "rejected": " never",
        },
        [
            Turn("user", "q1", False),
            Turn("assistant", "a1", False),
            Turn("user", "q2\nmore", False),
            Turn("assistant", "a2"),
        ],
    ),
    (
        "hh-rlhf",
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: never"},
        ASKED,
    ),
    (
        "preference, messages",
        {"chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "rejected": []},
        ASKED,
    ),
    ("gsm8k", {"question": "q", "answer": "1+1\n#### 2"}, [Turn("user", "q"), Turn("assistant", "1+1\n#### 2")]),
]


@pytest.mark.parametrize(("record", "turns"), [case[1:] for case in RECORDS], ids=[case[0] for case in RECORDS])
def test_formats(record: dict[str, Any], turns: list[Turn]) -> None:
    assert turns_of(record, "auto") == (turns, [])


def test_alpaca_prompts_are_the_published_ones() -> None:
    plain, _ = turns_of({"instruction": "Do it.", "input": "", "output": "Done."}, "auto")
    assert plain[0].text == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nDo it.\n\n### Response:"
    )
    given, _ = turns_of({"instruction": "Do it.", "input": "x", "output": "Done."}, "alpaca")
    assert given[0].text == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nDo it.\n\n### Input:\nx\n\n### Response:"
    )
    assert given[1] == Turn("assistant", "Done.")


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


def test_what_is_left_out_is_noted() -> None:
    messages = [
        {"role": r, "content": c} for r, c in (("system", " "), ("user", "q"), ("assistant", "a"), ("user", "x"))
    ]
    turns, notes = turns_of({"messages": messages}, "auto")
    assert turns == TWO and notes == ["empty system turn left out", "turns after the last answer left out"]
