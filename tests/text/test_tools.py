"""Tools, calls, reasoning and generation blocks in chat data, as templates of published models render them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.lib.record_formats import parse_record, parse_turns
from megatron_llama.text.chat_template import NAMED_TEMPLATES, Jinja
from megatron_llama.text.conversation import (
    REASONING_OMITTED,
    RecordError,
    TemplateContext,
    Turn,
    called_functions,
    check_control_tokens,
    parse_calls,
)
from tests.data_prep.helpers import LLAMA31, QWEN25, SPECIAL, shown

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Weather of a city.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
RESULT = '{"sky": "clear"}'
REPLACED = "Hermes's system text replaced by its tools"
ASK, ANSWER = "How is the weather in Zürich?", "It is clear."
TURNS = [
    Turn("user", ASK),
    Turn("assistant", "", extra={"tool_calls": [{"type": "function", "function": CALL}]}),
    Turn("tool", RESULT),
    Turn("assistant", ANSWER),
]
HERMES = {
    "conversations": [
        {"from": "system", "value": f"You call functions. <tools> {json.dumps(TOOLS)} </tools> Use <tool_call> tags."},
        {"from": "human", "value": ASK},
        {"from": "gpt", "value": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"},
        {"from": "tool", "value": f"<tool_response>\n{RESULT}\n</tool_response>"},
        {"from": "gpt", "value": ANSWER},
    ]
}


def test_hermes_in_a_pair_and_in_a_text_of_the_user() -> None:
    """Only a system text lists tools, in each format."""
    *prompt, answer = HERMES["conversations"]
    rejected = [{"from": "gpt", "value": "No."}]
    conversations, context, notes = parse_record({"prompt": prompt, "chosen": [answer], "rejected": rejected}, "pairs")
    assert context == TemplateContext((*TOOLS,)) and REPLACED in notes
    for turns, text in zip(conversations.values(), (ANSWER, "No."), strict=True):
        assert [turn.role for turn in turns] == ["user", "assistant", "tool", "assistant"] and turns[-1].text == text
    quoted = {"conversations": [{**prompt[0], "from": "human"}, answer]}
    conversations, context, notes = parse_record(quoted, "auto")
    assert "<tools>" in conversations[0][0].text and not context.tools and not notes


QWEN3 = """{%- set ns = namespace(last=0) %}{%- for message in messages %}{%- if message.role == 'user' %}
{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}""" + QWEN25.replace(
    "{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}",
    "{%- if message.reasoning_content and loop.index0 > ns.last %}"
    "{{- '\\n<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}{%- endif %}"
    "{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}",
).replace(
    "'assistant' and not message.tool_calls)",
    "'assistant' and not message.tool_calls and not (message.reasoning_content and loop.index0 > ns.last))",
).replace(
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    "{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}",
)
MISTRAL = """{{- bos_token }}{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and loop.index0 == 0 %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
{%- endfor %}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
{%- else %}{{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' }}
{{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"""
LEARNED = {
    "llama 3.1": (LLAMA31, '«{"name": "weather", "parameters": {"city": "Zürich", "days": 2}}<|im_end|>»'),
    "qwen 2.5": (QWEN25, f"«<tool_call>\n{json.dumps(CALL, ensure_ascii=False)}\n</tool_call><|im_end|>»"),
    "qwen 3": (QWEN3, f"«<tool_call>\n{json.dumps(CALL, ensure_ascii=False)}\n</tool_call><|im_end|>»"),
    "mistral v3": (
        MISTRAL,
        f'«[TOOL_CALLS] [{json.dumps(CALL, ensure_ascii=False)[:-1]}, "id": "call00001"}}]<|im_end|>»',
    ),
}


def template(source: str, **variables: Any) -> Jinja:
    return Jinja(source, {**SPECIAL, **variables}, ["<|im_end|>"], "test")


CALLED = {"tool_calls": [{"id": "call00001", "type": "function", "function": CALL}]}
RETURNED = Turn("tool", RESULT, extra={"tool_call_id": "call00001"})
WITH_IDS = [TURNS[0], Turn("assistant", "", extra=CALLED), RETURNED, TURNS[3]]


@pytest.mark.parametrize("name", LEARNED)
def test_published_templates(name: str, folder: Path) -> None:
    from transformers import AutoTokenizer

    source, learned = LEARNED[name]
    spans = template(source).render_spans(WITH_IDS, TemplateContext(TOOLS))
    theirs = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        [turn.message for turn in WITH_IDS], tools=TOOLS, chat_template=source, tokenize=False
    )
    assert "".join(span.text for span in spans) == theirs
    text = shown(spans)
    assert learned in text and f"{ANSWER}<|im_end|>»" in text and text.count("«") == 2
    assert "sky" not in "".join(span.text for span in spans if span.learn)


@pytest.mark.parametrize(
    ("source", "lost", "reason"),
    [
        (QWEN25.replace("{{- tool | tojson }}", ""), "the tool 'weather'", "template_omits"),
        (QWEN25.replace("{{- call.arguments | tojson }}", "{}"), "the call of turn 2", "template_omits"),
        (QWEN25.replace("message.content + '\\n</tool_r", "'\\n</tool_r"), "turn 3 (tool)", "template_omits"),
        (LLAMA31.replace("length != 1", "length == 1"), "one call only", "template_refuses"),
    ],
)
def test_omitted_tools_and_calls_are_reported(source: str, lost: str, reason: str) -> None:
    with pytest.raises(RecordError) as refused:
        template(source).render_spans(TURNS, TemplateContext(TOOLS))
    assert refused.value.reason == reason and lost in str(refused.value)


@pytest.mark.parametrize(("turns", "tools"), [(TURNS[::3], TOOLS), (TURNS, [])])
def test_named_templates_have_no_tools(turns: list[Turn], tools: list[dict[str, Any]]) -> None:
    with pytest.raises(RecordError, match="no text for tools"):
        NAMED_TEMPLATES["chatml"].render_spans(turns, TemplateContext(tools))


THOUGHT = [TURNS[0], Turn("assistant", ANSWER, extra={"reasoning_content": "The sky is clear."})]


def test_reasoning_is_learned_or_reported() -> None:
    notes: list[str] = []
    text = shown(template(QWEN3).render_spans(THOUGHT, notes=notes))
    assert f"«<think>\nThe sky is clear.\n</think>\n\n{ANSWER}<|im_end|>»" in text and not notes
    for source in (LLAMA31, QWEN25):
        template(source).render_spans(THOUGHT, notes=notes)
    NAMED_TEMPLATES["plain"].render_spans(THOUGHT, notes=notes)
    template(QWEN25.replace("im_end", "stop")).render_spans(TURNS, notes=notes)  # no token of the tokenizer
    assert notes == [REASONING_OMITTED] * 3 + ["answer without an end token of the tokenizer"]
    record = {"messages": [{"role": "user", "content": ASK}, {**THOUGHT[1].message, "thinking": "x"}]}
    assert parse_turns(record, "auto") == (THOUGHT, [])


@pytest.mark.parametrize(
    ("role", "extra", "note"),
    [
        ("assistant", {"reasoning": ["a list"]}, REASONING_OMITTED),
        ("user", {"reasoning": "a text"}, REASONING_OMITTED),
        ("user", {"tool_calls": [CALL]}, "calls outside of answers omitted"),
    ],
)
def test_parts_of_turns_that_no_template_gets_are_counted(role: str, extra: dict[str, Any], note: str) -> None:
    turns = [{"role": one, "content": "x", **(extra if one == role else {})} for one in ("user", "assistant")]
    assert parse_turns({"messages": turns}, "auto")[1] == [note]


def test_variables_of_a_template() -> None:
    off = {"enable_thinking": False}
    for made in (template(QWEN3, **off).ask(TURNS[:1]), template(QWEN3).ask(TURNS[:1], TemplateContext(variables=off))):
        assert made[0].text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    record = {"prompt": "q", "completion": "a", "chat_template_kwargs": {**off, "x": None}}
    assert parse_record(record, "auto")[1] == TemplateContext(variables=off)


def test_reasoning_after_another_generation_prompt_is_learned() -> None:
    """The prompt without thinking ends in an empty thought, which the record's answer replaces."""
    text = shown(template(QWEN3, enable_thinking=False).render_spans(THOUGHT))
    assert f"<think>\n«The sky is clear.\n</think>\n\n{ANSWER}<|im_end|>»" in text


@pytest.mark.parametrize("place", ["text", "call", "reasoning", "tool"])
def test_control_tokens_are_refused_in_all_parts_of_a_record(place: str) -> None:
    bad = "a<|im_end|>"
    turns = {
        "text": [Turn("user", bad)],
        "call": [Turn("assistant", "", extra={"tool_calls": parse_calls({"name": "f", "arguments": {"x": bad}})})],
        "reasoning": [Turn("assistant", "a", extra={"reasoning_content": bad})],
    }.get(place, TURNS)
    context = TemplateContext([{**TOOLS[0], "description": bad}] if place == "tool" else TOOLS)
    with pytest.raises(RecordError, match="contains <.im_end.>"):
        check_control_tokens(turns, context, ["<|im_end|>"])
    check_control_tokens(TURNS, TemplateContext(TOOLS), ["<|im_end|>"])


MARKED = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{%- generation %}{{- message.content }}END{%- endgeneration %}{{- '\\n' }}
{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
EMPTY = MARKED.replace("{{- message.content }}END{%- endgeneration %}", "{%- endgeneration %}{{- message.content }}")
TWO = [Turn("user", "q"), Turn("assistant", "a", learn=False), Turn("user", "r"), Turn("assistant", "b")]


def test_generation_blocks_are_the_answers(folder: Path) -> None:
    whole = MARKED.replace("END", "{{- '<|im_end|>' }}")
    notes: list[str] = []
    spans = template(whole).render_spans(TWO, notes=notes)
    assert shown(spans).endswith(
        "assistant\na<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n«b<|im_end|>»\n"
    )
    assert not notes
    # Without the end token a model would not stop: reported. Templates that change earlier answers have a mask too.
    without_end = MARKED.replace("END", "").replace("{%- endgeneration %}", "{%- endgeneration %}{{- '<|im_end|>' }}")
    assert "«b»" in shown(template(without_end).render_spans(TWO, notes=notes))
    assert notes == ["generation block differs from the answer"]
    shortened = whole.replace("{{- message.content }}", "{{- message.content[:9 if loop.last else 1] }}")
    turns = [Turn("user", "q"), Turn("assistant", "a"), Turn("user", "r"), Turn("assistant", "b c")]
    assert shown(template(shortened).render_spans(turns)).count("«") == 2
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        [turn.message for turn in TWO], chat_template=whole, return_dict=True, return_assistant_tokens_mask=True
    )
    assert sum(theirs["assistant_masks"]) > 0


@pytest.mark.parametrize(
    ("source", "reason"),
    [(MARKED.replace("message.role == 'assistant'", "loop.last"), "template_refuses"), (EMPTY, "template_omits")],
)
def test_generation_blocks_without_the_answers(source: str, reason: str) -> None:
    with pytest.raises(RecordError) as refused:
        template(source).render_spans(TWO)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("answer", "rest"),
    [
        (f"Let me look.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>", "Let me look."),
        (json.dumps({"name": "weather", "parameters": CALL["arguments"]}), ""),
        (f'[TOOL_CALLS] [{{"name": "weather", "arguments": {json.dumps(CALL["arguments"])}, "id": "call00001"}}]', ""),
        (f'Let me {{look}}: [1] {{"name": "Ana"}} {json.dumps(CALL)} and {{', ""),
    ],
)
def test_calls_in_an_answer(answer: str, rest: str) -> None:
    text, (call,) = called_functions(answer, TOOLS)
    assert (text, call["function"]) == (rest, CALL)
    assert [called_functions(*case)[0] for case in ((answer, []), ("[{" * 99, TOOLS))] == [answer, "[{" * 99]
