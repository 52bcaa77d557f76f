"""One record of a fine-tuning set to a conversation, in the formats that sets are exported in.

OpenAI's and TRL's `messages`, ShareGPT's `conversations`, prompt and completion, preference sets (the chosen answer is
taken), Alpaca and Dolly, GSM8K. Other keys of a record are used, noted or refused, never dropped in
silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron_llama.text.conversation import Bad, Turn, Turns

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
_LISTS = ("messages", "conversations", "conversation")
_NOTHING: tuple[Any, ...] = (None, False, "", [], {}, "[]", "{}", "null")
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


def turns_of(record: Mapping[str, Any], format: str) -> tuple[Turns, list[str]]:
    """A record's conversation up to its last answer, and notes on what was left out of it.

    Raises:
        Bad: the record can't be used.
    """
    kind = _detected(record) if format == "auto" else format
    notes = _notes_on_other_keys(record, kind)
    turns = _READERS[kind](record)
    if turns and turns[0].role == "system" and not turns[0].text.strip():
        turns, notes = turns[1:], [*notes, "empty system turn left out"]
    for key in ("system", "system_prompt"):  # beside the turns, as in LLaMA-Factory's exports
        text = _text(record.get(key) or "", key)
        if text.strip() and (not turns or turns[0].role != "system"):
            turns = [Turn("system", text), *turns]
        elif text.strip() and turns[0].text != text:
            raise Bad("bad_messages", f"{key!r} and the first turn are two system texts")
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


def _detected(record: Mapping[str, Any]) -> str:
    """The format that the record's keys indicate."""
    keys = record.keys()
    if isinstance(record.get("chosen"), (str, list, dict)):
        return "preference"
    if keys & set(_LISTS):
        return "messages"
    for kind, question, answers in (
        ("prompt_completion", "prompt", {"completion", "response"}),
        ("alpaca", "instruction", {"output", "response"}),
        ("gsm8k", "question", {"answer"}),
    ):
        if question in keys and keys & answers:
            return kind
    raise Bad("unknown_format", f"its keys are {', '.join(sorted(keys)[:8])[:200] or 'none'}")


def _notes_on_other_keys(record: Mapping[str, Any], kind: str) -> list[str]:
    """Notes on the keys besides a record's texts; raises Bad where its answers mean nothing without it."""
    notes = []
    lists = [record.get(key) for key in (*_LISTS, "prompt", "completion", "response", "chosen")]
    turns = [turn for value in lists for turn in (value if isinstance(value, list) else [value])]
    for where in (record, *(turn for turn in turns if isinstance(turn, dict))):
        for key in ("tools", "functions", "tool_calls", "function_call"):
            if where.get(key) not in _NOTHING:
                raise Bad("tools_not_supported", f"there is something under {key!r}")
        if any(where.get(key) not in _NOTHING for key in ("reasoning_content", "reasoning", "thinking")):
            notes = ["reasoning beside an answer left out"]
    key = "label" if kind == "prompt_completion" else "kto_tag"
    if record.get(key, True) in (False, "false", "False"):
        raise Bad("rejected_answer", f"{key!r} is false")
    return notes


def _key(record: Mapping[str, Any], *keys: str) -> Any:
    """The value of the first of ``keys`` that the record has."""
    for key in keys:
        if key in record:
            return record[key]
    raise Bad("unknown_format", f"no key {keys[0]!r}; there is {', '.join(sorted(record)[:8])[:200] or 'nothing'}")


def _text(value: Any, where: str) -> str:
    """A content as text: a string, or OpenAI's list of parts that are all text."""
    if isinstance(value, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value):
        return "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise Bad("content_not_text", f"{where} is {'null' if value is None else 'a ' + type(value).__name__}")
    return value


def _listed(turns: Any) -> Turns:
    """A list of role and content (OpenAI's names) or from and value (ShareGPT's), by each turn's keys."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Bad("bad_messages", f"it is a {type(turns).__name__}, not a list of objects")
    found = []
    for number, turn in enumerate(turns):
        role = turn.get("role", turn.get("from"))
        known = ROLES.get(role.strip().lower()) if isinstance(role, str) else None
        if known is None:
            raise Bad("unknown_role", f"turn {number + 1} is of {str(role)[:60]!r}")
        learn = turn.get("weight", 1) != 0
        found.append(Turn(known, _text(turn.get("content", turn.get("value")), f"turn {number + 1}"), learn))
    return found


def _dialogue(text: str) -> Turns | None:
    """The turns of Anthropic's and rm-static's `\\n\\nHuman: ...\\n\\nAssistant: ...`; None for any other text."""
    if not re.match(r"\s*Human:", text) or "\n\nAssistant:" not in text:
        return None
    matches = re.finditer(r"(Human|Assistant):(.*?)(?=\n\nHuman:|\n\nAssistant:|\Z)", text, re.DOTALL)
    return [Turn(ROLES[match[1].lower()], match[2].strip()) for match in matches]


def _side(value: Any, where: str, role: str) -> Turns:
    """One side of a pair: turns, a dialogue, or a text of ``role``."""
    turns = [value] if isinstance(value, dict) else value
    if isinstance(turns, list) and all(isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn in turns):
        return _listed(turns)
    text = _text(value, where)
    return _dialogue(text) or [Turn(role, text)]


def _pair(record: Mapping[str, Any], *answer_keys: str) -> Turns:
    """What is asked, which is not to be learned, and the answer, which is."""
    answer = _side(_key(record, *answer_keys), answer_keys[0], "assistant")
    if len(answer) > 1 and answer[0].role != "assistant":
        # The whole conversation: as in hh-rlhf and most sets of messages, only its last answer was chosen.
        return [*(replace(turn, learn=False) for turn in answer[:-1]), answer[-1]]
    asked = _side(_key(record, "prompt", *_LISTS), "prompt", "user")
    if asked and asked[-1].role == "assistant" and not asked[-1].text.strip():
        asked = asked[:-1]  # "Assistant:" at a prompt's end only says who is next
    before = [turn for pair in _history(record) for turn in zip(("user", "assistant"), pair, strict=True)]
    return [
        *(Turn(role, text, False) for role, text in before),
        *(replace(turn, learn=False) for turn in asked),
        *(replace(turn, text=turn.text.strip()) for turn in answer),
    ]


def _history(record: Mapping[str, Any]) -> list[list[str]]:
    """What was asked and answered before."""
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise Bad("bad_messages", "'history' is no list of pairs")
    return [[_text(text, "a text of 'history'") for text in pair] for pair in history]


def _alpaca(record: Mapping[str, Any]) -> Turns:
    """Stanford's, and Dolly's (instruction, context, response), which are asked alike."""
    instruction = _text(_key(record, "instruction"), "instruction")
    output = _text(_key(record, "output", "response"), "output")
    extra = _text(record.get("input") or record.get("context") or "", "input")
    if not instruction.strip():
        raise Bad("empty_content", "the instruction is empty")
    turns = []
    for asked, answered in _history(record):
        turns += [Turn("user", ALPACA.format(instruction=asked)), Turn("assistant", answered)]
    prompt = (ALPACA_INPUT if extra.strip() else ALPACA).format(instruction=instruction, input=extra)
    return [*turns, Turn("user", prompt), Turn("assistant", output)]


_READERS: dict[str, Callable[[Mapping[str, Any]], Turns]] = {
    "messages": lambda record: _listed(_key(record, *_LISTS)),
    "sharegpt": lambda record: _listed(_key(record, *_LISTS)),
    "prompt_completion": lambda record: _pair(record, "completion", "response"),
    "preference": lambda record: _pair(record, "chosen"),
    "alpaca": _alpaca,
    "gsm8k": lambda record: [
        Turn(role, _text(_key(record, key), key)) for role, key in (("user", "question"), ("assistant", "answer"))
    ],
}
