"""Templates from untrusted sources have time and memory limits, which templates of real models do not reach."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_llama.system.errors import UserError
from megatron_llama.text.chat_template import Jinja
from megatron_llama.text.conversation import RecordError, Turn
from megatron_llama.text.sandbox import MOST_SECONDS, SMALL

TURNS = [Turn("user", "question " * 20), Turn("assistant", "answer " * 20)]
DOUBLED = (
    "{% set ns = namespace(x='12345678') %}{% for i in range(99) %}{% set ns.x = BODY %}{% endfor %}{{ ns.x | length }}"
)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A quarter of a GiB more than there is now."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}" + "text" * 9999 + "{% endfor %}",
        "{% for i in [1] recursive %}"
        + "text" * 999
        + "{% if loop.depth < 4 %}{{ loop(range(999)) }}{% endif %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [0] * 10**10 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        DOUBLED.replace("BODY", "ns.x + ns.x"),
        DOUBLED.replace("BODY", "ns.x ~ ns.x"),
        DOUBLED.replace("BODY", "(ns.x, ns.x)"),
        DOUBLED.replace("BODY", "[ns.x, ns.x]"),
        DOUBLED.replace("BODY", "{1: ns.x, 2: ns.x}"),
        DOUBLED.replace("BODY", "dict(a=ns.x, b=ns.x)"),
        DOUBLED.replace("BODY", "ns.x.replace('', ns.x)"),
        DOUBLED.replace("BODY", "ns.x | replace('', ns.x)"),
        DOUBLED.replace("BODY", "ns.x.join([ns.x] * 99)"),
        DOUBLED.replace("BODY", "[ns.x] * 99 | join(ns.x)"),
        DOUBLED.replace("BODY", "range(9999) | map('string') | join(ns.x)"),
        DOUBLED.replace("BODY", "'{0}{0}'.format(ns.x)"),
        DOUBLED.replace("BODY", "'%s%s' % (ns.x, ns.x)"),
        DOUBLED.replace("BODY", "'%s%s' | format(ns.x, ns.x)"),
        DOUBLED.replace("BODY", "(ns.x ~ '\\n\\n') | indent(9999, first=true)"),
        DOUBLED.replace("BODY", "ns.x.translate({49: ns.x})"),
        DOUBLED.replace("{% set ns.x = BODY %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ 'x'['format'](1) ~ '{:>999999999}'['format'](1) }}",
        "{{ 'x'.center(10**10) }}",
        "{{ 'x' | center(10**10) }}",
        "{{ ['x'] | map('center', 10**10) | list }}",
        "{{ 'a\\tb'.expandtabs(10**9) }}",
        "{{ [1] | batch(10**9, 0) | list }}",
        "{{ messages | batch(200000000, 'x') | list }}",
        "{{ messages | slice(200000000) | list }}",
        "{{ messages | tojson(indent=200000000) }}",
        "{{ messages * 900 | tojson(indent=9999) }}",
        "{{ ('x' * 10**6).encode('punycode') }}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}" + "text" * 99 + "{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    ],
)
def test_a_bomb_is_refused(source: str) -> None:
    begin = time.thread_time()
    with pytest.raises((RecordError, UserError)) as refused:
        Jinja(source, {}, [], "there").render(TURNS)
    assert "MemoryError" not in str(refused.value)
    str(refused.value).encode()
    assert time.thread_time() - begin < MOST_SECONDS + 2


def test_equal_tuples_that_stand_for_much_are_not_compared() -> None:
    """Jinja's own operators run in C, where no clock is read."""
    steps = "".join(f"{{% set {name} = ({name}, {name}) %}}" for name in "xy" for _ in range(60))
    with pytest.raises(RecordError, match="makes a value of more than"):
        Jinja("{% set x = 'ab' %}{% set y = 'a' ~ 'b' %}" + steps + "{{ x == y }}", {}, [], "there").render(TURNS)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ '(' }}" + "{% if true %}" * 500 + "{% endif %}" * 500, "nested too deeply"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "nested too deeply"),
        ("{{ " + "-" * 9999 + "1 }}", "nested too deeply"),
        ("x" * (SMALL + 1), "characters"),
        ("{{ 'a' | urlize }}", "No filter"),
    ],
)
def test_templates_that_do_not_compile(source: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Jinja(source, {}, [], "there")


def test_large_conversations_are_rendered() -> None:
    """The limits grow with the rendered text."""
    source = (
        "{% for message in messages %}{% set text = message.content.split('</think>')[-1].strip() %}"
        "{{ '<|' ~ message['role'] ~ '|>' + text | replace('x', 'yy') }}{{ (message | tojson(indent=2)) | length }}"
        "{% if messages | selectattr('role', 'equalto', 'tool') %}{{ '%s' % loop.index }}{% endif %}"
        "{% if loop.last or loop.length > 5 %}{{ ['a', message.role] | join(', ') }}{% endif %}\n{% endfor %}"
    )
    turns = [Turn("user", "x" * 200_000), Turn("assistant", "y" * 200_000)] * 10
    text = Jinja(source, {}, [], "there").render(turns)
    assert text.count("yy" * 200_000) == 10 and text.count("a, assistant") == 10


def test_limits_count_each_rendering() -> None:
    template = Jinja("{% for i in range(60000) %}x{% endfor %}", {}, [], "there")
    assert {template.render(TURNS) for _ in range(30)} == {"x" * 60000}
