"""Parse JSON lines: records of fine-tuning datasets to conversations, and records of text.

Formats: OpenAI's and TRL's ``messages``, ShareGPT's ``conversations``, prompt and completion, preference pairs (the
chosen answer, or both), answers with a label, Alpaca, Dolly and GSM8K. Other keys of a record are used, noted in the
manifest or rejected.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_llama.config.data_settings import LABELLED, PAIRS, REJECTED, UNPAIRED
from megatron_llama.config.settings import CHAT_FORMATS, RENDERED
from megatron_llama.system.errors import UserError
from megatron_llama.text import conversation
from megatron_llama.text.conversation import RecordError, TemplateContext, Turn, Turns, parse_calls

_CALLS = ("function_call", "tool_call")
"""Roles of ShareGPT's turns whose text is calls in JSON."""
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
    **dict.fromkeys(_CALLS, "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_LABELS = ("label", "kto_tag")
_LISTS = ("messages", "conversations", "conversation")
REPEATED_KEY = "key given twice: last value used"
"""Note on a record, counted in the manifest."""
_NOTHING: tuple[Any, ...] = (None, False, "", [], {}, "[]", "{}", "null")
FORMATS = ("auto", *CHAT_FORMATS, PAIRS, UNPAIRED, RENDERED, "tsv")

# The two prompts of Stanford Alpaca, verbatim.
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)


def parse_turns(record: Mapping[str, Any], format: str) -> tuple[Turns, list[str]]:
    """Return a record's conversation up to its last answer, and notes on omitted content.

    Raises RecordError if the record is invalid.
    """
    kind = _detected(record) if format == "auto" else format
    notes = _notes_on_other_keys(record, kind)
    turns = _pair(record, kind) if kind == "rejected" else _READERS[kind](record)
    if kind in ("preference", "prompt_completion") and _omits_prompt(record.get("prompt"), turns):
        notes.append("prompt outside of the conversation omitted")
    if turns and turns[0].role == "system" and not turns[0].text.strip():
        turns, notes = turns[1:], [*notes, "empty system turn left out"]  # a key in stored manifests; prose: ok
    for key in ("system", "system_prompt"):  # next to the turns, as in LLaMA-Factory's exports
        text = _text(record.get(key) or "", key)
        if text.strip() and (not turns or turns[0].role != "system"):
            turns = [Turn("system", text), *turns]
        elif text.strip() and turns[0].text != text:
            raise RecordError("bad_messages", f"{key!r} and the first turn are different system texts")
    for number, turn in enumerate(turns):
        if not turn.text.strip() and not turn.calls and turn.role != "tool":
            raise RecordError("empty_content", f"turn {number + 1} ({turn.role}) is empty")
        _check_characters(turn.text, f"turn {number + 1}")
    answers = [number for number, turn in enumerate(turns) if turn.role == "assistant" and turn.learn]
    if not answers:
        raise RecordError("no_assistant_turn", "no turn is an answer with loss")
    if answers[-1] + 1 < len(turns):
        notes.append("turns after the last answer left out")  # a key in stored manifests; prose: ok
    return turns[: answers[-1] + 1], notes


def parse_pair(record: Mapping[str, Any]) -> tuple[list[Turns], list[str]]:
    """Return the conversations with the chosen and with the rejected answer, and notes on omitted content.

    Raises RecordError if the record is invalid, both answers are equal, or their prompts differ.
    """
    chosen, notes = parse_turns(record, "preference")
    try:
        rejected, others = parse_turns(record, "rejected")
    except RecordError as error:
        raise RecordError(error.reason, f"the rejected answer: {error.detail}") from None
    if chosen == rejected:
        raise RecordError("equal_answers", "the chosen answer equals the rejected one")
    first, second = ([turn for turn in turns if not turn.learn] for turns in (chosen, rejected))
    if first != second:
        raise RecordError("different_prompts", "the turns before the chosen and the rejected answer differ")
    return [chosen, rejected], [*notes, *others]


def parse_unpaired(record: Mapping[str, Any]) -> tuple[Turns, int, list[str]]:
    """Return a record's conversation, of which only the last answer has loss, its answer's mark, and notes.

    Raises RecordError if the record is invalid, or has no label.
    """
    label = _key(record, *_LABELS)
    desirable = {"true": True, "false": False}.get(label.strip().lower()) if isinstance(label, str) else label
    if desirable not in (True, False):
        raise RecordError("bad_label", f"the label is {json.dumps(label)[:40]}; write true (desirable) or false")
    turns, notes = parse_turns({key: value for key, value in record.items() if key not in _LABELS}, "auto")
    mark = LABELLED if desirable else LABELLED + REJECTED
    return [*(replace(turn, learn=False) for turn in turns[:-1]), turns[-1]], mark, notes


def parse_record(record: Mapping[str, Any], format: str) -> tuple[dict[int, Turns], TemplateContext, list[str]]:
    """Return a record's conversation, or the two of a pair, by the mark of its tokens; its context, and notes.

    A mark is added to loss masks (config/data_settings.py). Raises RecordError.
    """
    conversations: dict[int, Turns] = {}
    if format == PAIRS:
        (conversations[0], conversations[REJECTED]), notes = parse_pair(record)
    elif format == UNPAIRED:
        turns, mark, notes = parse_unpaired(record)
        conversations[mark] = turns
    else:
        conversations[0], notes = parse_turns(record, format)
    context = _context(record)
    first, *_ = conversations.values()
    system = [turn.text for turn in first if turn.role == "system"]
    if listed := [tool for text in system for tool in conversation.hermes_tools(text)]:
        conversations = {mark: conversation.from_hermes(turns) for mark, turns in conversations.items()}
        context = replace(context, tools=context.tools or tuple(listed))
        notes = [*notes, "Hermes's system text replaced by its tools"]
    return conversations, context, notes


def _context(record: Mapping[str, Any]) -> TemplateContext:
    """Return the tools and template variables next to a record's turns. Raises RecordError."""
    keys = [key for key in ("tools", "functions") if not _is_empty(record.get(key))]
    tools = [tool for key in keys for tool in conversation.parse_tools(record[key])]
    variables = record.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise RecordError("bad_tools", "chat_template_kwargs is not an object")
    if names := conversation.reserved_names(variables):
        raise RecordError("bad_tools", f"chat_template_kwargs cannot set {names}")
    return TemplateContext(tuple(tools), {key: value for key, value in variables.items() if value is not None})


def _detected(record: Mapping[str, Any]) -> str:
    """Return the format that the record's keys indicate. A null value counts as a missing key.

    Raises RecordError if no format matches, or two formats match with different answers.
    """
    keys = {key for key, value in record.items() if value is not None}
    if isinstance(record.get("chosen"), (str, list, dict)):
        return "preference"
    matches = [("messages", "messages", name) for name in _LISTS if name in keys]
    for kind, question, answers in (
        ("prompt_completion", "prompt", ("completion", "response")),
        ("alpaca", "instruction", ("output", "response")),
        ("gsm8k", "question", ("answer",)),
    ):
        matches += [(kind, question, name) for name in answers if question in keys and name in keys][:1]
    if not matches:
        instead = "; --format text reads rendered chats" if "text" in keys else ""
        raise RecordError("unknown_format", f"the keys are {', '.join(sorted(record)[:8])[:200] or 'none'}{instead}")
    if len({answer for *_, answer in matches}) > 1:
        both = " and ".join(name if kind == "messages" else f"{first}/{name}" for kind, first, name in matches[:2])
        choices = sorted({kind for kind, *_ in matches})
        instead = f"remove one, or write --format {' or '.join(choices)}" if len(choices) > 1 else "remove one"
        raise RecordError("ambiguous_record", f"the record has {both}; {instead}")
    return matches[0][0]


def _notes_on_other_keys(record: Mapping[str, Any], kind: str) -> list[str]:
    """Return notes on ignored keys. Raises RecordError for keys that the answer depends on."""
    lists = [record.get(key) for key in (*_LISTS, "prompt", "completion", "response", "chosen")]
    listed = [turn for value in lists for turn in (value if isinstance(value, list) else [value])]
    turns = [turn for turn in listed if isinstance(turn, dict)]
    names = (turn.get("name") for turn in turns if _role(turn) != "tool")
    notes = ["name of a turn ignored"] if any(name not in _NOTHING for name in names) else []
    others = [turn for turn in turns if _role(turn) != "assistant"]
    reasoning = [one.get(key) for one in (record, *others) for key in _REASONING]
    reasoning += [value for turn in turns for key in _REASONING if not isinstance(value := turn.get(key), str)]
    if not all(map(_is_empty, reasoning)):
        notes.append(conversation.REASONING_OMITTED)
    if not all(_is_empty(turn.get(key)) for turn in others for key in ("tool_calls", "function_call")):
        notes.append("calls outside of answers omitted")
    if record.get("weight") not in (None, 1):
        notes.append("weight of the record ignored")  # only a turn's weight is read
    key = "label" if kind == "prompt_completion" else "kto_tag"
    if record.get(key, True) in (False, "false", "False"):
        raise RecordError("rejected_answer", f"{key!r} is false; --format {UNPAIRED} reads labels (KTO)")
    return notes


def _role(turn: Mapping[str, Any]) -> str | None:
    """Return the role of a turn; None for unknown ones."""
    return ROLES.get(str(_first_value(turn, "role", "from")).strip().lower())


def repeats_key(line: bytes, keys: Iterable[str]) -> bool:
    """Return whether a JSON line has one of ``keys`` twice. The parsers use the last value."""
    for key in keys:
        name = b'"%b"' % key.encode(errors="replace")
        if line.find(name) != line.rfind(name):  # also in a text or in an inner object
            with contextlib.suppress(RecursionError):
                listed = [name for name, _ in json.loads(line, object_pairs_hook=list)]
                return any(listed.count(one) > 1 for one in keys)
    return False


def _is_empty(value: Any) -> bool:
    """Return whether a value has no content; Arrow fills the fields of missing objects with nulls."""
    if isinstance(value, dict | list):
        return all(map(_is_empty, value.values() if isinstance(value, dict) else value))
    return value in _NOTHING


def _key(record: Mapping[str, Any], *keys: str) -> Any:
    """Return the value of the first of ``keys`` that the record has."""
    if record.keys() & {*keys}:
        return _first_value(record, *keys)
    known = ", ".join(sorted(record)[:8])[:200] or "nothing"
    raise RecordError("unknown_format", f"no key {keys[0]!r}; the keys are {known}")


def _text(value: Any, where: str) -> str:
    """Return content as text: a string, or OpenAI's list of text parts."""
    if isinstance(value, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value):
        return "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise RecordError("content_not_text", f"{where} is {'null' if value is None else 'a ' + type(value).__name__}")
    return value


def _listed(turns: Any) -> Turns:
    """Parse turns with role and content (OpenAI) or from and value (ShareGPT)."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise RecordError("bad_messages", f"expected a list of objects, not {type(turns).__name__}")
    parsed = []
    for number, turn in enumerate(turns, start=1):
        role, content = (_first_value(turn, *names) for names in (("role", "from"), ("content", "value")))
        name = role.strip().lower() if isinstance(role, str) else ""
        if name not in ROLES:
            raise RecordError("unknown_role", f"turn {number} has {_described_role(turn, role)}")
        extra = _extra(turn, ROLES[name])
        if name in _CALLS:
            content, extra = "", {**extra, "tool_calls": parse_calls(content)}
        elif content is None and "tool_calls" in extra:
            content = ""
        parsed.append(Turn(ROLES[name], _text(content, f"turn {number}"), _has_loss(turn, number), extra))
    return parsed


def _extra(turn: Mapping[str, Any], role: str) -> dict[str, Any]:
    """Return ``Turn.extra``: calls and reasoning of an answer, name and id of a tool's result."""
    if role == "assistant":
        calls = [parse_calls(turn[key]) for key in ("tool_calls", "function_call") if not _is_empty(turn.get(key))]
        thoughts = [turn[key] for key in _REASONING if isinstance(turn.get(key), str) and turn[key].strip()]
        extra = {"tool_calls": calls, "reasoning_content": thoughts}
        return {name: values[0] for name, values in extra.items() if values}
    keys = ("name", "tool_call_id") if role == "tool" else ()
    return {key: turn[key] for key in keys if isinstance(turn.get(key), str)}


def _first_value(turn: Mapping[str, Any], *keys: str) -> Any:
    """Return the first value that is not null: tables with both kinds of columns have nulls in one of them."""
    return next((turn[key] for key in keys if turn.get(key) is not None), None)


def _described_role(turn: Mapping[str, Any], role: Any) -> str:
    if role is None:
        return "the role null" if turn.keys() & {"role", "from"} else "no role"
    return f"the role {str(role)[:60]!r}"


def _has_loss(turn: Mapping[str, Any], number: int) -> bool:
    """Return whether a turn has loss: OpenAI's ``weight``, 0 or 1, and Axolotl's ``train`` or ``training``."""
    for key in ("train_detail", "training_detail"):
        if turn.get(key) not in _NOTHING:
            raise RecordError("bad_weight", f"turn {number} has {key!r}, which is not supported; split the turn")
    learn = True
    for key in ("weight", "train", "training"):
        value = turn.get(key)
        if value is None:
            continue
        if not isinstance(value, (int, float)) or value not in (0, 1):
            shown = json.dumps(value, ensure_ascii=False)[:40]
            raise RecordError("bad_weight", f"turn {number} has {key} {shown}; write 0 (no loss) or 1")
        learn = learn and bool(value)
    return learn


def _dialogue(text: str) -> Turns | None:
    """Parse `\\n\\nHuman: ...\\n\\nAssistant: ...` (Anthropic, rm-static); return None for other text."""
    if not re.match(r"\s*Human:", text) or "\n\nAssistant:" not in text:
        return None
    matches = re.finditer(r"(Human|Assistant):(.*?)(?=\n\nHuman:|\n\nAssistant:|\Z)", text, re.DOTALL)
    return [Turn(ROLES[match[1].lower()], match[2].strip()) for match in matches]


def _side(value: Any, where: str, role: str) -> Turns:
    """Parse one side of a pair: turns, a dialogue, or a text of ``role``."""
    turns = [value] if isinstance(value, dict) else value
    if isinstance(turns, list) and all(isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn in turns):
        return _listed(turns)
    text = _text(value, where)
    return _dialogue(text) or [Turn(role, text)]


def _pair(record: Mapping[str, Any], *answer_keys: str) -> Turns:
    """Return the prompt's turns without loss and the answer with loss."""
    answer = _side(_key(record, *answer_keys), answer_keys[0], "assistant")
    if len(answer) > 1 and answer[0].role != "assistant":
        # The whole conversation, as in hh-rlhf: only its last answer was chosen.
        return [*(replace(turn, learn=False) for turn in answer[:-1]), answer[-1]]
    prompt = _side(_key(record, "prompt", *_LISTS), "prompt", "user")
    if prompt and prompt[-1].role == "assistant" and not prompt[-1].text.strip():
        prompt = prompt[:-1]  # a trailing "Assistant:" of the prompt
    before = [turn for pair in _history(record) for turn in zip(("user", "assistant"), pair, strict=True)]
    return [
        *(Turn(role, text, False) for role, text in before),
        *(replace(turn, learn=False) for turn in prompt),
        *(replace(turn, text=turn.text.strip()) for turn in answer),
    ]


def _omits_prompt(prompt: Any, turns: Turns) -> bool:
    """Return whether a prompt has a text that the conversation of an answer does not contain."""
    whole = "\n".join(turn.text for turn in turns)
    try:
        given = [] if prompt in _NOTHING else _side(prompt, "prompt", "user")
    except RecordError:
        return True
    return any(turn.text.strip() not in whole for turn in given)


def _history(record: Mapping[str, Any]) -> list[list[str]]:
    """Return the previous (prompt, answer) pairs."""
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RecordError("bad_messages", "'history' is not a list of pairs")
    return [[_text(text, "a text of 'history'") for text in pair] for pair in history]


def _alpaca(record: Mapping[str, Any]) -> Turns:
    """Parse Alpaca's records and Dolly's (instruction, context, response)."""
    instruction = _text(_key(record, "instruction"), "instruction")
    output = _text(_key(record, "output", "response"), "output")
    extra = _text(record.get("input") or record.get("context") or "", "input")
    if not instruction.strip():
        raise RecordError("empty_content", "the instruction is empty")
    turns = []
    for prompt, answered in _history(record):
        turns += [Turn("user", ALPACA.format(instruction=prompt)), Turn("assistant", answered)]
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
    RENDERED: lambda record: [Turn("assistant", _text(_key(record, "text"), "text"))],
}


# Split a JSON array (as ShareGPT and Alpaca are published) into one element per line.
#
# Only strings and brackets are separated, chunk by chunk, in constant memory. Parsing validates the JSON.

_OUTSIDE, _INSIDE = re.compile(rb'["\[\]{},]|\s+'), re.compile(rb'\\.?|["\n]', re.DOTALL)
"""Marks outside and inside a string. A backslash at the end of a chunk escapes the first byte of the next one."""


def element_lines(path: str, chunks: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    """Yield chunks of lines, one array element per line, each with its input chunk's bytes on disk.

    Raises UserError if the array is truncated, or other content follows it.
    """
    depth = 0  # number of open brackets and braces
    has_begun = in_string = escaped = False
    filled = (pair for pair in chunks if pair[0])
    for number, (chunk, position) in enumerate(filled):
        chunk = chunk if number else chunk.removeprefix(BOM)
        output, offset = [chunk[:escaped].replace(b"\n", b"\r")], int(escaped)
        escaped = False
        while offset < len(chunk):
            match = (_INSIDE if in_string else _OUTSIDE).search(chunk, offset)
            start, end = match.span() if match else (len(chunk), len(chunk))
            text, mark, offset = chunk[offset:start], chunk[start:end], end
            if in_string:  # a raw line feed, invalid in JSON strings, becomes an equally invalid CR
                output += (text, mark.replace(b"\n", b"\r"))
                in_string, escaped = mark != b'"', mark == b"\\"
                continue
            if depth == 0:
                if text or not (mark.isspace() or (mark == b"[" and not has_begun)):
                    raise UserError(f"{path}: content follows the JSON array. Write one array, or one record per line")
                if mark == b"[":
                    depth, has_begun = 1, True
                continue
            in_string = mark == b'"'
            depth += (mark in (b"[", b"{")) - (mark in (b"]", b"}"))
            if depth == 0 and mark == b"}":
                raise UserError(f"{path} is not a valid JSON array: brackets do not match")
            ends_element = depth == 0 or (depth == 1 and mark == b",")
            output += (text, b"\n" if ends_element else b" " if mark.isspace() else mark)
        if lines := b"".join(output):
            yield lines, position
    if depth or not has_begun:
        raise UserError(f"{path} is truncated: its JSON array has no end. Download it again, or remove it from --input")


# Parse one JSON line to its text.
#
# orjson is used if installed. Lines that it rejects are parsed again by Python's json, which accepts the same lines as
# Megatron's preprocessing (such as NaN in metadata) and reports the exact error.

BOM = b"\xef\xbb\xbf"
loads: Callable[[bytes], Any]
_fast_dumps: Callable[[Any], bytes] | None = None
try:
    import orjson

    loads, _fast_dumps = orjson.loads, orjson.dumps
except ImportError:
    loads = json.loads


def dump_texts(record: dict[str, str] | list[str]) -> bytes:
    """Serialize texts as a JSON line, with the same bytes with and without orjson.

    Characters of ``surrogateescape`` become the original bytes, which are not UTF-8.
    """
    if _fast_dumps is not None:
        with contextlib.suppress(TypeError):  # orjson rejects surrogates
            return _fast_dumps(record)
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


def parse_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """Return the texts under ``keys``. Raises RecordError if one is missing or not a string."""
    try:
        record = loads(line)
        texts = [record[key] for key in keys]
        for text in texts:
            if type(text) is not str:
                return _parse_line_slowly(line, keys)
            if not text.isascii():
                text.encode()
        return texts
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return _parse_line_slowly(line, keys)


def parse_text(data: bytes) -> str:
    """Decode UTF-8. Raises RecordError."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecordError("bad_utf8", f"byte {data[error.start]:#04x} at {error.start}: {error.reason}") from None


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse a line to a JSON object. Raises RecordError."""
    with contextlib.suppress(ValueError, RecursionError):
        record = loads(line)
        if isinstance(record, dict):
            return record
    return _parse_slowly(line)


def _parse_slowly(line: bytes) -> dict[str, Any]:
    """Parse a line that orjson rejected. Raises RecordError with the exact reason."""
    text = parse_text(line)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError("bad_json", str(error) or type(error).__name__) from None
    if not isinstance(record, dict):
        raise RecordError("not_an_object", f"it is a {type(record).__name__}")
    return record


def _parse_line_slowly(line: bytes, keys: Sequence[str]) -> list[str]:
    """Return the texts of a line that orjson rejected. Raises RecordError with the exact reason."""
    record = _parse_slowly(line)
    for key in keys:
        if key not in record:
            existing = ", ".join(sorted(record)[:8]) or "none"
            raise RecordError("missing_text", f"no key {key!r}; the keys are {existing[:200]}")
        text = record[key]
        if text is None:
            raise RecordError("null_text", f"{key!r} is null")
        if not isinstance(text, str):
            raise RecordError("text_not_a_string", f"{key!r} is a {type(text).__name__}")
        _check_characters(text, repr(key))
    return [record[key] for key in keys]


def _check_characters(text: str, where: str) -> None:
    """Raise RecordError for a surrogate, which has no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        detail = f"U+{ord(text[error.start]):04X} at character {error.start} of {where}"
        raise RecordError("lone_surrogate", detail) from None
