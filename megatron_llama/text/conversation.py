"""Turns of a conversation, their tools and calls, and errors of the records of fine-tuning datasets.

data_prep/lib/record_formats.py reads records. Lines of labeled tables become questions here.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_llama.config.settings import CHAT_TEMPLATES


@dataclass(frozen=True)
class Template:
    """Prompt template for a record or a line of a table."""

    prompt: str
    """Text with the record's fields in braces."""
    answer: str
    """Field with the correct answer."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """For labeled datasets: text of the answer for each value of the answer's field."""

    @property
    def fields(self) -> list[str]:
        """Required fields of a record, the answer last. Raises ValueError if the braces cannot be parsed."""
        return [name for _, name, _, _ in string.Formatter().parse(self.prompt) if name] + [self.answer]


LABELLED: Mapping[str, Template] = {
    "qnli": Template(
        "Question: {question}\nSentence: {sentence}\n"
        "Does the sentence contain the answer to the question? Answer yes or no.",
        "label",
        {"entailment": "yes", "not_entailment": "no"},
    ),
    "sst2": Template(
        "Review: {sentence}\nIs the review positive or negative?", "label", {"1": "positive", "0": "negative"}
    ),
}


@dataclass(frozen=True)
class Turn:
    """A message of a conversation."""

    role: str
    """system, user, assistant or tool"""
    text: str
    learn: bool = True
    """Whether an assistant's message has loss (not with OpenAI's weight 0)."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the message for Jinja templates: tool_calls, tool_call_id, name and reasoning_content."""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Called functions, with ``name`` and ``arguments``."""
        return [call["function"] for call in self.extra.get("tool_calls", ())]

    @property
    def message(self) -> dict[str, Any]:
        """The message for a Jinja template."""
        return {"role": self.role, "content": self.text, **self.extra}


Turns = list[Turn]


@dataclass(frozen=True)
class TemplateContext:
    """Values of a record for a Jinja template besides the messages."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the assistant may call, in OpenAI's format (JSON schemas)."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Other variables, as chat_template_kwargs in TRL."""


REASONING_OMITTED = "reasoning beside an answer left out"  # a key in stored manifests; prose: ok
"""Note on a record, counted in the manifest."""
NO_CONTEXT = TemplateContext()
_RESERVED = ("add_generation_prompt", "messages", "tools")


def reserved_names(variables: Mapping[str, Any]) -> str:
    """List the variables of a Jinja template that ``chat_template_kwargs`` cannot set; "" if there are none."""
    return ", ".join(name for name in _RESERVED if name in variables)


def variables_problems(template: str, variables: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of ``chat_template_kwargs`` for a chat template."""
    if names := reserved_names(variables):
        yield f"{names} cannot be set"
    if variables and template != "own" and template in CHAT_TEMPLATES:
        yield f"the template {template} has no variables"


class RecordError(Exception):
    """Invalid line or record; docs/guides/data/data.md and sft_data.md list the reasons, which manifests count."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def check_control_tokens(turns: Sequence[Turn], context: TemplateContext, names: Sequence[str]) -> None:
    """Raise RecordError if a text, a call, a reasoning or a tool contains the name of a control token."""
    texts = [(f"the {turn.role}'s text", turn.text + (_as_json(turn.extra) if turn.extra else "")) for turn in turns]
    texts += [("a tool", _as_json(tool)) for tool in context.tools]
    for where, name in ((where, name) for where, text in texts for name in names if name in text):
        raise RecordError("control_token", f"{where} contains {name}")


def labelled_turns(columns: Sequence[str], values: Sequence[str], template: Template) -> Turns:
    """Return the conversation of a line of a labeled table. Raises RecordError."""
    if len(columns) != len(values):
        raise RecordError("bad_columns", f"{len(values)} columns; the header has {len(columns)}")
    row = dict(zip(columns, values, strict=True))
    label = row[template.answer]
    if label not in template.labels:
        raise RecordError("unknown_label", f"{label[:60]!r} is not one of {', '.join(template.labels)}")
    empty = [name for name in template.fields if not row[name].strip()]
    if empty:
        raise RecordError("empty_content", f"column {empty[0]} is empty")
    return [Turn("user", template.prompt.format_map(row)), Turn("assistant", template.labels[label])]


# Tools and calls, in the formats of OpenAI, ShareGPT (LLaMA-Factory) and Hermes. Templates get OpenAI's.

_HERMES_TOOLS = re.compile(r"<tools>\s*(\[.*?\]|\{.*?\})\s*</tools>", re.DOTALL)
_HERMES_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_HERMES_RESPONSE = re.compile(r"\s*<tool_response>\s*(.*?)\s*</tool_response>\s*", re.DOTALL)


def parse_tools(value: Any) -> list[dict[str, Any]]:
    """Return tools in OpenAI's format, from a list or its JSON text, with or without ``function`` around each.

    Null values, with which Arrow fills missing keys, are omitted. Raises RecordError.
    """
    return [{"type": "function", "function": _without_nulls(function)} for _, function in _functions(value, "tool")]


def parse_calls(value: Any) -> list[dict[str, Any]]:
    """Return calls in OpenAI's format, with arguments as an object, from one or several calls or their JSON text.

    Raises RecordError.
    """
    calls = []
    for call, function in _functions(value, "call"):
        arguments = _from_json(function.get("arguments", function.get("parameters")) or {}, "arguments")
        if not isinstance(arguments, dict):
            raise RecordError(
                "bad_tools", f"the arguments of {function['name']} are not an object: {_as_json(arguments)[:60]}"
            )
        named = {"name": function["name"], "arguments": _without_nulls(arguments)}
        number = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        calls.append({**number, "type": "function", "function": named})
    return calls


def _functions(value: Any, kind: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (entry, its function) of tools or calls, one or a list, or their JSON text. Raises RecordError."""
    listed = _from_json(value, f"{kind}s")
    for entry in listed if isinstance(listed, list) else [listed]:
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RecordError("bad_tools", f"a {kind} has no name: {_as_json(entry)[:60]}")
        yield entry, function


def hermes_tools(system: str) -> list[dict[str, Any]]:
    """Return the tools in a system text of Hermes's format; [] for other texts. Raises RecordError."""
    block = _HERMES_TOOLS.search(system)
    if block is None:
        return []
    lines = block[1].splitlines() if block[1].startswith("{") else [block[1]]
    return [tool for line in lines if line.strip() for tool in parse_tools(line)]


def from_hermes(turns: Sequence[Turn]) -> Turns:
    """Return turns with Hermes's tags as calls and results, without the system text, which lists the tools."""
    parsed = []
    for turn in turns:
        calls = _HERMES_CALL.findall(turn.text) if turn.role == "assistant" else []
        if calls:
            listed = [call for text in calls for call in parse_calls(text)]
            text = _HERMES_CALL.sub("", turn.text).strip()
            parsed.append(replace(turn, text=text, extra={**turn.extra, "tool_calls": listed}))
        elif turn.role == "tool" and (results := _HERMES_RESPONSE.findall(turn.text)):
            parsed += [replace(turn, text=result) for result in results]
        elif turn.role != "system" or not _HERMES_TOOLS.search(turn.text):
            parsed.append(turn)
    return parsed


def called_functions(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return the text and the calls of ``tools`` in a generated answer.

    A call is a JSON object with a name and arguments (Llama: parameters). Only Hermes's format has text with calls.
    """
    calls, position, decoder, names = [], 0, json.JSONDecoder(), [tool["function"]["name"] for tool in tools]
    while start := re.search(r"[{\[]", text[position:]):
        try:
            value, end = decoder.raw_decode(text, position + start.start())
            calls += [call for call in parse_calls(value) if call["function"]["name"] in names]
            position = end
        except (ValueError, RecordError, RecursionError):
            position += start.end()
    return (_HERMES_CALL.sub("", text).strip() if _HERMES_CALL.search(text) else "") if calls else text, calls


def _from_json(value: Any, where: str) -> Any:
    """Return a value; for a text, the value of its JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise RecordError("bad_tools", f"the {where} are not JSON: {_as_json(value)[:60]}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
