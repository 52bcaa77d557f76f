"""Templates from untrusted sources have time and memory limits, which templates of real models do not reach."""

from __future__ import annotations

import os

import pytest

from megatron_llama.system.errors import MachineError, UserError
from megatron_llama.text import sandbox
from megatron_llama.text.chat_template import Jinja
from megatron_llama.text.conversation import RecordError, Turn

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


def test_a_long_conversation_of_another_alphabet() -> None:
    turns = [Turn("user", "ж" * 90_000), Turn("assistant", "щ" * 90_000)] * 6
    source = "{% for turn in messages %}<{{ turn.content }}>{% endfor %}{{ '<' if add_generation_prompt }}"
    assert sum(len(span.text) for span in Jinja(source, {}, [], "").render_spans(turns)) == 12 * 90_002 > sandbox.SMALL


def test_a_date_is_the_same_in_all_texts_of_a_conversation() -> None:
    program = sandbox.Sandbox("{{ strftime_now('%H%M%S%f') }}{% for i in range(messages | length * 999) %}{% endfor %}")
    texts = program.render({}, [{"role": "user", "content": "a"}] * 9, [(number, False) for number in range(9)])
    assert len(set(texts)) == 1
