"""One record of a fine-tuning set to a conversation: turns with a role and a text; or the reason why it is no good.

Formats as they are exported: OpenAI's and TRL's `messages`, ShareGPT's `conversations`, prompt and completion,
preference sets (the chosen answer is taken), Alpaca, GSM8K, and labelled TSV through a template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from data_prep.lib.records import BadLine

# What a bad record is counted under, beside records.REASONS.
REASONS = {
    "unknown_format": "the record has none of the keys that the formats have",
    "bad_messages": "the list of turns is no list of turns",
    "unknown_role": "a turn's role is none of system, user, assistant",
    "content_not_text": "a turn's content is no text (an image, a number, null)",
    "empty_content": "a turn's content is empty, or only white space",
    "no_assistant_turn": "there is no answer to learn",
    "bad_columns": "the line has not as many columns as the header",
    "unknown_label": "the label is not one of the template's",
    "control_token": "a turn's text holds one of the tokenizer's control tokens",
    "template_refuses": "the chat template does not take the conversation",
    "too_long": "the example has more tokens than a sequence",
    "answer_cut_off": "nothing of the answer is left of an example that was cut",
}
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
}
FORMATS = ("auto", "messages", "sharegpt", "prompt_completion", "preference", "alpaca", "gsm8k", "tsv")

# Stanford Alpaca's two prompts, to the letter.
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)


@dataclass(frozen=True)
class Labelled:
    """How a labelled line is asked and answered."""

    prompt: str
    """with the columns' names in braces"""
    label: str
    """the column that holds the label"""
    words: Mapping[str, str]
    """label to answer"""


LABELLED = {
    "qnli": Labelled(
        "Question: {question}\nSentence: {sentence}\n"
        "Does the sentence contain the answer to the question? Answer yes or no.",
        "label",
        {"entailment": "yes", "not_entailment": "no"},
    ),
    "sst2": Labelled(
        "Review: {sentence}\nIs the review positive or negative?", "label", {"1": "positive", "0": "negative"}
    ),
}


@dataclass(frozen=True)
class Turn:
    """What one side says."""

    role: str
    """system, user or assistant"""
    text: str
    learn: bool = True
    """for the assistant's: whether it is to be learned (OpenAI's weight 0 says no)"""


Turns = list[Turn]


class Bad(Exception):
    """A record that can't be used."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.line = BadLine(reason, detail)


def turns_of(record: Mapping[str, Any], format: str) -> tuple[Turns, list[str]]:
    """A record's conversation up to its last answer, and notes on what was left out of it.

    Raises:
        Bad: the record can't be used.
    """
    kind = _detected(record) if format == "auto" else format
    turns = _READERS[kind](record)
    notes = []
    if turns and turns[0].role == "system" and not turns[0].text.strip():
        turns, notes = turns[1:], ["empty system turn left out"]
    for number, turn in enumerate(turns):
        if not turn.text.strip():
            raise Bad("empty_content", f"turn {number + 1}, of the {turn.role}, is empty")
        try:
            turn.text.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(turn.text[error.start])
            raise Bad("lone_surrogate", f"U+{code:04X} at character {error.start} of turn {number + 1}") from None
    answers = [number for number, turn in enumerate(turns) if turn.role == "assistant" and turn.learn]
    if not answers:
        raise Bad("no_assistant_turn", f"{len(turns)} turns, none of them an answer to learn")
    if answers[-1] + 1 < len(turns):
        notes.append("turns after the last answer left out")
    return turns[: answers[-1] + 1], notes


def labelled_turns(columns: Sequence[str], values: Sequence[str], template: Labelled) -> Turns:
    """The conversation of a line of a labelled table; raises Bad."""
    if len(columns) != len(values):
        raise Bad("bad_columns", f"{len(values)} columns where the header has {len(columns)}")
    row = dict(zip(columns, values, strict=True))
    if row[template.label] not in template.words:
        raise Bad("unknown_label", f"{row[template.label][:60]!r} is none of {', '.join(template.words)}")
    empty = [name for name in re.findall(r"{(\w+)}", template.prompt) if not row[name].strip()]
    if empty:
        raise Bad("empty_content", f"column {empty[0]} is empty")
    prompt = template.prompt.format_map(row)
    return [Turn("user", prompt), Turn("assistant", template.words[row[template.label]])]


def _detected(record: Mapping[str, Any]) -> str:
    """The format that the record's keys say."""
    keys = record.keys()
    for kind, needed in (
        ("messages", {"messages"}),
        ("sharegpt", {"conversations"}),
        ("preference", {"chosen"}),
        ("prompt_completion", {"prompt", "completion"}),
        ("alpaca", {"instruction", "output"}),
        ("gsm8k", {"question", "answer"}),
    ):
        if needed <= keys:
            return kind
    raise Bad("unknown_format", f"its keys are {', '.join(sorted(keys)[:8])[:200] or 'none'}")


def _key(record: Mapping[str, Any], key: str) -> Any:
    if key not in record:
        raise Bad("unknown_format", f"no key {key!r}; there is {', '.join(sorted(record)[:8])[:200] or 'nothing'}")
    return record[key]


def _text(value: Any, where: str) -> str:
    """A content as text: a string, or OpenAI's list of parts that are all text."""
    if isinstance(value, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value):
        return "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise Bad("content_not_text", f"{where} is {'null' if value is None else 'a ' + type(value).__name__}")
    return value


def _listed(turns: Any, role_key: str, text_key: str) -> Turns:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Bad("bad_messages", f"it is a {type(turns).__name__}, not a list of objects")
    found = []
    for number, turn in enumerate(turns):
        role = turn.get(role_key)
        if not isinstance(role, str) or role not in ROLES:
            raise Bad("unknown_role", f"turn {number + 1} is of {str(role)[:60]!r}")
        learn = turn.get("weight", 1) != 0
        found.append(Turn(ROLES[role], _text(turn.get(text_key), f"turn {number + 1}"), learn))
    return found


def _messages(record: Mapping[str, Any]) -> Turns:
    return _listed(_key(record, "messages"), "role", "content")


def _sharegpt(record: Mapping[str, Any]) -> Turns:
    return _listed(_key(record, "conversations"), "from", "value")


def _dialogue(text: str) -> Turns | None:
    """The turns of Anthropic's and rm-static's `\\n\\nHuman: ...\\n\\nAssistant: ...`; None for any other text."""
    if not re.match(r"\s*Human:", text):
        return None
    turns = []
    for match in re.finditer(r"(Human|Assistant):(.*?)(?=\n\nHuman:|\n\nAssistant:|\Z)", text, re.DOTALL):
        turns.append(Turn("user" if match[1] == "Human" else "assistant", match[2].strip()))
    return turns


def _side(value: Any, where: str, role: str) -> Turns:
    """One side of a pair: turns, a dialogue, or a text of ``role``."""
    if isinstance(value, list) and (not value or "role" in value[0]):
        return _listed(value, "role", "content")
    text = _text(value, where)
    return _dialogue(text) or [Turn(role, text)]


def _pair(record: Mapping[str, Any], answer_key: str) -> Turns:
    """What is asked, which is not to be learned, and the answer, which is."""
    answer = _side(_key(record, answer_key), answer_key, "assistant")
    if len(answer) > 1 and answer[0].role != "assistant":
        # The whole conversation: as in hh-rlhf and most sets of messages, only its last answer was chosen.
        return [*(replace(turn, learn=False) for turn in answer[:-1]), answer[-1]]
    asked = _side(_key(record, "prompt"), "prompt", "user")
    if asked and asked[-1].role == "assistant" and not asked[-1].text.strip():
        asked = asked[:-1]  # "Assistant:" at a prompt's end only says who is next
    return [
        *(replace(turn, learn=False) for turn in asked),
        *(replace(turn, text=turn.text.strip()) for turn in answer),
    ]


def _prompt_completion(record: Mapping[str, Any]) -> Turns:
    return _pair(record, "completion")


def _preference(record: Mapping[str, Any]) -> Turns:
    return _pair(record, "chosen")


def _alpaca(record: Mapping[str, Any]) -> Turns:
    fields = {key: _text(_key(record, key), key) for key in ("instruction", "output")}
    extra = record.get("input") or ""
    if not fields["instruction"].strip():
        raise Bad("empty_content", "the instruction is empty")
    prompt = ALPACA_INPUT if _text(extra, "input").strip() else ALPACA
    return [
        Turn("user", prompt.format(instruction=fields["instruction"], input=extra)),
        Turn("assistant", fields["output"]),
    ]


def _gsm8k(record: Mapping[str, Any]) -> Turns:
    return [
        Turn("user", _text(_key(record, "question"), "question")),
        Turn("assistant", _text(_key(record, "answer"), "answer")),
    ]


_READERS: dict[str, Callable[[Mapping[str, Any]], Turns]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "prompt_completion": _prompt_completion,
    "preference": _preference,
    "alpaca": _alpaca,
    "gsm8k": _gsm8k,
}
