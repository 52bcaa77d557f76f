"""Templates from untrusted sources have time and memory limits, which templates of real models do not reach."""

from __future__ import annotations

import os
import re

import pytest

from megatron_llama.system.errors import UserError
from megatron_llama.text import sandbox
from megatron_llama.text.chat_template import Jinja
from megatron_llama.text.conversation import RecordError, Turn

TURNS = [Turn("user", "question " * 20), Turn("assistant", "answer " * 20)]
DOUBLED = "{% set ns = namespace(x='12345678') %}{% for i in range(99) %}{% set ns.x = BODY %}{% endfor %}{{ ns.x }}"
TIME, MEMORY = "takes more than 0.3 s of CPU time", "needs more than 256 MiB of memory"
SIZE = "characters; the limit is"


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", TIME),
        ("{% set n = 9 %}{{ n ** (n ** 8) }}", TIME),  # one operation in C
        ("{{ 'a' * 10**10 }}", MEMORY),
        ("{{ messages | batch(10**9, 'x') | list }}", f"{MEMORY}|{TIME}"),
        ("{{ '%999999999d' % 1 }}", MEMORY),
        (DOUBLED.replace("BODY", "ns.x ~ ns.x"), MEMORY),
        (DOUBLED.replace("BODY", "[ns.x, ns.x]"), f"{MEMORY}|{TIME}"),  # its text
        ("{{ 'x' * 10**7 }}", SIZE),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "nested too deeply"),
        ("{{ cycler() }}", "status 1"),
        (r"{{ '\ud800' }}", "surrogates not allowed"),
    ],
)
def test_a_bomb_is_refused(source: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.3)
    monkeypatch.setattr(sandbox, "MOST_MEMORY", 1 << 28)
    template = Jinja("{% if messages | length > 1 %}" + source + "{% endif %}fine", {}, [], "there")
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RecordError, match=fault):
        template.render(TURNS)
    assert template.render(TURNS[:1]) == "fine" and len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("{{ '(' }}" + "{% if true %}" * 500 + "{% endif %}" * 500, "nested too deeply"),
        ("{{ 9 ** (9 ** 8) }}", TIME),  # evaluated at compilation
        ("{{ 'a' | absent }}", "No filter"),
        ("\ud800", "surrogates not allowed"),
    ],
)
def test_templates_that_do_not_compile(source: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.3)
    with pytest.raises(UserError, match=fault):
        Jinja(source, {}, [], "there")


def test_the_limit_on_the_output_grows_with_the_conversation() -> None:
    turns = [Turn("user", "x" * 200_000), Turn("assistant", "y" * 200_000)] * 10
    source = "{% for message in messages %}{{ message.content | replace('x', 'yy') }}{% endfor %}"
    assert Jinja(source, {}, [], "there").render(turns) == "y" * 6_000_000


def test_forks_have_a_process_each() -> None:
    template = Jinja("{{ messages[0].content }}", {}, [], "there")
    assert template.render(TURNS) == TURNS[0].text
    if (child := os.fork()) == 0:
        local = [template.render([Turn("user", str(number))]) for number in range(50)]
        os._exit(local != [str(number) for number in range(50)])
    replies = [template.render([Turn("user", "parent")]) for _ in range(50)]
    assert os.waitpid(child, 0)[1] == 0 and replies == ["parent"] * 50


def test_a_date_is_the_same_in_all_texts_of_a_conversation() -> None:
    program = sandbox.Sandbox("{{ strftime_now('%H%M%S%f') }}{% for i in range(messages | length * 999) %}{% endfor %}")
    texts = program.render({}, [{"role": "user", "content": "a"}] * 9, [(number, False) for number in range(9)])
    assert len(set(texts)) == 1 and re.fullmatch(r"\d{12}", texts[0])
