"""Fine-tuning records: each format to the conversation it means, rendered by chat templates in a sandbox."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from data_prep.lib.record_formats import parse_record, parse_turns
from data_prep.lib.sft_and_text_sets import ExampleOptions, build_chat_format
from megatron_llama.system.errors import MachineError, UserError
from megatron_llama.text import sandbox
from megatron_llama.text.chat_template import NAMED_TEMPLATES, Jinja, load_own_template
from megatron_llama.text.conversation import LABELLED, RecordError, Turn, labelled_turns
from megatron_llama.text.loss_spans import TextSpan, encode_spans
from megatron_llama.text.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from tests.data_prep.helpers import CHATML, LLAMA31, SPECIAL, shown
from tests.golden import GoldenFiles

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def test_formats() -> None:
    """A line of the page: the format, the case and the record; below, what it means or why it is refused."""
    page = []
    for line in GoldenFiles.commands("text/records.txt"):
        case, _, record = line.partition(" | ")
        page.append(f"$ {line}")
        try:
            conversations, context, notes = parse_record(json.loads(record), case.partition(": ")[0])
            page += [f"{name}: {value}" for name, value in asdict(context).items() if value]
            for mark, turns in conversations.items():
                page += [f"mark {mark}"] if mark else []
                page += [f"{t.role}{'' if t.learn else ', not learned'}: {t.text!r} {t.extra or ''}" for t in turns]
            page += [f"note: {note}" for note in notes]
        except RecordError as refused:
            page.append(f"{refused.reason}: {refused}")
    GoldenFiles.check("text/records.txt", "\n".join(page))


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


INST = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
COLON = (
    "{%- for message in messages -%}\n"
    "    {%- if message.role == 'assistant' %}A: {{ message.content }}{{ eos_token }}\n"
    "    {%- else %}Q: {{ message.content }}\n{% endif %}\n{%- endfor -%}{%- if add_generation_prompt %}A: {% endif %}"
)
TEMPLATES = {"chatml": CHATML, "inst": INST, "colon": COLON}
# The shapes of Llama 2's and DeepSeek-R1's templates, in our own words; helpers.py has Llama 3.1's.
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set told = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set talk = messages[1:] %}{% else %}{% set told = '' %}{% set talk = messages %}{% endif %}"
    "{% for message in talk %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('they take turns') }}{% endif %}"
    "{% set text = told + message['content'] if loop.first else message['content'] %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
R1 = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(told='') %}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{% set ns.told = message['content'] %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.told }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' and message['content'] is not none %}{% set text = message['content'] %}"
    "{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|Assistant|>' + text + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
)
REALISTIC = {"llama2": LLAMA2, "llama3": LLAMA31, "r1": R1}
TALK = [
    Turn("user", "How are you?"),
    Turn("assistant", "Fine."),
    Turn("user", "Sure?"),
    Turn("assistant", " Yes, é🤯!"),
]

GOLDEN = {
    "prompter": "<|system|> S <|endoftext|> <|prompter|> Q <|endoftext|> <|assistant|>« A <|endoftext|>» ",
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n«A<|im_end|>»\n",
    "dialogue": "S\n\n\n\nHuman: Q\n\nAssistant:« A<|endoftext|>»",
    "plain": "S\n\nQ\n«A<|endoftext|>»",
}


@pytest.mark.parametrize("name", sorted(NAMED_TEMPLATES))
def test_named_templates(name: str) -> None:
    turns = [Turn("system", "S"), Turn("user", "Q"), Turn("assistant", "A")]
    assert shown(NAMED_TEMPLATES[name].render_spans(turns)) == GOLDEN[name]
    unlearned = NAMED_TEMPLATES[name].render_spans([*turns[:2], Turn("assistant", "A", learn=False)])
    assert not any(span.learn for span in unlearned)


OWN = {
    "chatml": "<|im_start|>system\nBe kind.<|im_end|>\n"
    "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    "«Fine.<|im_end|>»\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n« Yes, é🤯!<|im_end|>»\n",
    "inst": "<|im_start|>[INST] How are you? [/INST]« Fine.<|im_end|>»[INST] Sure? [/INST]«  Yes, é🤯!<|im_end|>»",
    "colon": "Q: How are you?\nA: «Fine.<|im_end|>»Q: Sure?\nA: « Yes, é🤯!<|im_end|>»",
}


def template_of(name: str, added: list[str]) -> Jinja:
    return Jinja({**TEMPLATES, **REALISTIC}[name], SPECIAL, added, "test")


def test_jinja_renders_as_transformers_does(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    with_system = [Turn("system", " Be brief. "), *TALK[:1], Turn("assistant", "<think>\nWell.</think>\n\nFine.")]
    for name, source in {**TEMPLATES, **REALISTIC}.items():
        ours = template_of(name, [])
        cases = [(TALK, False), (TALK[:1], True), (TALK[:2], False), (TALK[:3], True)]
        for turns, ask in [*cases, (with_system, False), (with_system[:2], True)] if name in REALISTIC else cases:
            messages = [{"role": turn.role, "content": turn.text} for turn in turns]
            expected = theirs.apply_chat_template(
                messages, chat_template=source, tokenize=False, add_generation_prompt=ask
            )
            assert ours.render(turns, ask) == expected
    tokenizer = HuggingFaceTokenizer(folder)
    rendered = load_own_template(folder, tokenizer.added_tokens).render_spans(TALK)
    actual, _ = encode_spans(rendered, tokenizer, parse_special=True)
    messages = [{"role": turn.role, "content": turn.text} for turn in TALK]
    assert actual == theirs.apply_chat_template(messages, tokenize=True, return_dict=False)


@pytest.mark.parametrize("answer", ["A", "s", "a", "art", "is", ">", "<", "<thin", "think", "Assistant"])
@pytest.mark.parametrize("source", [R1, R1.replace("{{ '<|Assistant|>' + text", "{{ '<|Assistant|>' + text | trim")])
def test_an_answer_is_not_matched_in_its_prompt(source: str, answer: str) -> None:
    """A model of thoughts is asked with `<think>`, and the set's answers are given without."""
    turns = [Turn("user", "is it A?"), Turn("assistant", answer), Turn("user", "a"), Turn("assistant", answer)]
    template = Jinja(source, SPECIAL, ["<|im_end|>"], "test")
    one = f"<|Assistant|>«{answer}<|im_end|>»"
    assert shown(template.render_spans(turns)) == f"<|im_start|><|User|>is it A?{one}<|User|>a{one}"
    thought = [turns[0], Turn("assistant", f"<think>\nhm {answer}</think>{answer}")]
    without_split = R1.replace("text.split('</think>')[-1]", "text")
    assert shown(Jinja(without_split, SPECIAL, ["<|im_end|>"], "test").render_spans(thought)) == (
        f"<|im_start|><|User|>is it A?<|Assistant|><think>\n«hm {answer}</think>{answer}<|im_end|>»"
    )


NO_SYSTEM = COLON.replace("{%- else %}", "{%- elif message.role == 'user' %}")
LAST_SYSTEM = (  # as Mistral 0.3: the system's text is only in a last user turn
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' }}{% if loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content + '\n' }}{% endif %}{{ m.content + '[/INST]' }}{% elif m.role == 'assistant' %}"
    "{{ m.content + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "turns", "omitted"),
    [
        (LAST_SYSTEM, [Turn("system", "Be brief."), *TALK], "turn 1 (system)"),
        (NO_SYSTEM, [Turn("system", "Be brief."), *TALK[:2]], "turn 1 (system)"),
        (R1, [TALK[0], Turn("assistant", "<think>hm</think>Fine.")], "turn 2 (assistant)"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content[:3] }}\n{% endfor %}", TALK[:2], "turn 1 (user)"),
        ("{{ messages[0].content }}A: {{ eos_token }}", [TALK[0], Turn("assistant", "A")], "the answer in turn 2"),
    ],
)
def test_a_turn_that_the_template_omits_is_reported(source: str, turns: list[Turn], omitted: str) -> None:
    """No text is lost silently: the record is rejected and counted."""
    with pytest.raises(RecordError, match=re.escape(omitted)) as caught:
        Jinja(source, SPECIAL, ["<|im_end|>"], "test").render_spans(turns)
    assert caught.value.reason == "template_omits"


def test_a_prompt_omits_reasoning_but_no_question() -> None:
    turns = [Turn("system", "Be brief."), TALK[0], Turn("assistant", "<think>hm</think>Fine."), TALK[2]]
    assert "Be brief." in shown(Jinja(R1, SPECIAL, [], "test").ask(turns))
    with pytest.raises(RecordError, match=re.escape("turn 1 (system)")):
        Jinja(NO_SYSTEM, SPECIAL, [], "test").ask(turns)


LEARNED = {
    "llama2": "[INST] How are you? [/INST]« Fine. <|im_end|>»",
    "llama3": "<|im_start|>assistant\n«Fine.<|im_end|>»",
    "r1": "<|User|>How are you?<|Assistant|>«Fine.<|im_end|>»",
}


@pytest.mark.parametrize("name", sorted(LEARNED))
def test_masks_of_realistic_templates(name: str) -> None:
    assert shown(template_of(name, ["<|im_end|>"]).render_spans(TALK[:2])).endswith(LEARNED[name])


def test_an_end_that_is_not_flagged_special(folder: Path, tmp_path: Path) -> None:
    """The line feed after it is not learned either; and a text may hold such a token."""
    settings = json.loads((folder / "tokenizer.json").read_text())
    for token in settings["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert tokenizer.control_tokens == [] and "<|im_end|>" in tokenizer.added_tokens
    assert shown(list(build_chat_format(ExampleOptions(str(tmp_path), 8), []).render(TALK))) == OWN["chatml"]


def test_a_template_is_rendered_in_a_sandbox() -> None:
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}"):
        with pytest.raises(RecordError) as caught:
            Jinja(source, {}, [], "test").render_spans(TALK)
        assert caught.value.reason == "template_refuses"


def learned(text_spans: list[TextSpan], tokenizer: Tokenizer) -> str:
    """Decode the tokens, with the text that has a loss in «»."""
    ids, marks = encode_spans(text_spans, tokenizer, parse_special=True)
    parts, start = [], 0
    for position in range(1, len(ids) + 1):
        if position == len(ids) or marks[position] != marks[start]:
            text = tokenizer.decode(ids[start:position], skip_special=False)
            parts.append(f"«{text}»" if marks[start] else text)
            start = position
    return "".join(parts)


@pytest.mark.parametrize("name", sorted(OWN))
def test_masks_of_own_templates(name: str, folder: Path) -> None:
    assert shown(template_of(name, ["<|im_start|>", "<|im_end|>"]).render_spans(TALK)) == OWN[name]
    tokenizer = HuggingFaceTokenizer(folder)
    assert learned(template_of(name, tokenizer.added_tokens).render_spans(TALK), tokenizer) == OWN[name]


def test_a_token_that_would_cross_a_span_boundary_is_cut(folder: Path, tokenizer: Path) -> None:
    """The prompt `answer: ` ends in a space, so the answer must not begin with the token ` yes`."""
    text_spans = [TextSpan("answer: ", False), TextSpan("yes", True), TextSpan("\n", False), TextSpan("\nno", True)]
    bpe = HuggingFaceTokenizer(folder)
    whole = bpe.spans("answer: yes\n\nno", parse_special=True)
    assert any(start < 8 < end for start, end in zip(whole.starts, whole.ends, strict=True)), "no token crosses here"
    for encoder in (bpe, SentencePieceTokenizer(tokenizer)):
        ids, marks = encode_spans(text_spans, encoder, parse_special=True)
        for learn_flag, text in ((False, "answer: \n"), (True, "yes\nno")):
            parts = [number for number, mark in zip(ids, marks, strict=True) if mark is learn_flag]
            assert encoder.decode(parts).replace(" ", "") == text.replace(" ", "")
        assert "answer: yes" in encoder.decode(ids), "a space was put in, or lost"


def test_named_templates_on_sentencepiece(tokenizer: Path) -> None:
    encoder = SentencePieceTokenizer(tokenizer)
    ids, marks = encode_spans(NAMED_TEMPLATES["prompter"].render_spans(TALK[:2]), encoder)
    assert ids[-2 if encoder.decode([ids[-1]]).strip() == "" else -1] == encoder.end
    answer = [number for number, mark in zip(ids, marks, strict=True) if mark]
    assert answer[-1] == encoder.end and encoder.decode(answer[:-1]).strip() == "Fine."


TURNS = [Turn("user", "question " * 20), Turn("assistant", "answer " * 20)]
DOUBLED = "{% set ns = namespace(x='12345678') %}{% for i in range(99) %}{% set ns.x = BODY %}{% endfor %}{{ ns.x }}"
TIME, MEMORY, SIZE = (
    "takes more than 0.3 s of CPU time",
    "needs more than 256 MiB of memory",
    "characters; the limit is",
)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", TIME),
        ("{% set n = 9 %}{{ n ** (n ** 8) }}", TIME),  # one operation in C
        ("{{ 'a' * 10**10 }}", MEMORY),
        ("{{ messages | batch(10**9, 'x') | list }}", f"{MEMORY}|{TIME}"),
        ("{{ '%999999999d' % 1 }}", MEMORY),
        (DOUBLED.replace("BODY", "ns.x ~ ns.x"), f"{MEMORY}|{TIME}"),
        ("{{ 'x' * 10**7 }}", "characters; the limit is"),
        ("{{ 9 ** (9 ** 8) }}", TIME),  # at compilation
        ("{{ '(' }}" + "{% if true %}" * 500 + "{% endif %}" * 500, "nested too deeply"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "nested too deeply"),
        (r"{{ '\ud800' }}", "surrogates not allowed"),
    ],
)
def test_a_bomb_is_refused(source: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.3)
    monkeypatch.setattr(sandbox, "MOST_MEMORY", 1 << 28)
    template = None
    with pytest.raises((RecordError, UserError), match=fault):
        template = Jinja("{% if messages | length > 1 %}" + source + "{% endif %}fine", {}, [], "there")
        template.render(TURNS)
    assert template is None or template.render(TURNS[:1]) == "fine"


def test_forks_have_a_process_each() -> None:
    template = Jinja("{{ messages[0].content }}", {}, [], "there")
    assert template.render(TURNS) == TURNS[0].text
    if (child := os.fork()) == 0:
        try:
            assert all(template.render([Turn("user", text)]) == text for text in map(str, range(50)))
            os._exit(0)
        finally:
            os._exit(1)
    assert all(template.render([Turn("user", "a")]) == "a" for _ in range(50)) and os.waitpid(child, 0)[1] == 0


def test_processes_that_end_are_replaced_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    template = Jinja("{{ messages[0].content }}", {}, [], "there")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        template._sandbox._process.kill()  # type: ignore[union-attr]
        with pytest.raises(RecordError, match="ended the process that renders it, with status -9"):
            template.render(TURNS)
        assert template.render(TURNS) == TURNS[0].text
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.setattr(sandbox, "MOST_MEMORY", 1 << 20)  # too little to import jinja2
    with pytest.raises(MachineError, match="the process that renders chat templates ended at its start"):
        Jinja("", {}, [], "there")


def test_a_date_and_a_long_conversation_are_rendered_once() -> None:
    program = sandbox.Sandbox("{{ strftime_now('%H%M%S%f') }}{% for i in range(messages | length * 999) %}{% endfor %}")
    texts = program.render({}, [{"role": "user", "content": "a"}] * 9, [(number, False, False) for number in range(9)])
    assert len(set(texts)) == 1
    turns = [Turn("user", "ж" * 90_000), Turn("assistant", "щ" * 90_000)] * 6
    source = "{% for turn in messages %}<{{ turn.content }}>{% endfor %}{{ '<' if add_generation_prompt }}"
    assert sum(len(span.text) for span in Jinja(source, {}, [], "").render_spans(turns)) == 12 * 90_002 > sandbox.SMALL
