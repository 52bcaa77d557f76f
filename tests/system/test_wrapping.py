"""Wrapping of texts for users: commands in them can be pasted into a shell."""

from __future__ import annotations

import shlex

import pytest

from megatron_llama.system.wrapping import WIDTH, fill, wrap, wrap_command, wrap_lines

PATH = "/data/my own files/of the year 2026/it's a 'dataset' of chats/part 1.jsonl"
COMMAND = f"python data_prep/sft.py --input {shlex.quote(PATH)} --seq-length 64 --on-bad-line skip --x 'a b'"
COMMANDS = [
    COMMAND,
    f"hf download OWNER/NAME --local-dir {shlex.quote(PATH)}",
    f"make -C {shlex.quote(PATH)} venv",
    f"{shlex.quote('/my own/.venv/bin/python')} -m pip install -e '/a b/c[dev]' {'more ' * 20}numpy",
    f"/a/.venv/bin/python train.py model=llama_2m {'trainer.steps=1 ' * 8}{shlex.quote('run.dir=' + PATH)}",
    f"megatron-llama export-hf {shlex.quote(PATH)} --out X",
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("before", [0, 5, 20, 60])
@pytest.mark.parametrize("after", ["", ", or write data=mock", ". More is in the guide, which has many more words too"])
def test_a_command_in_a_text_can_be_pasted(command: str, before: int, after: str) -> None:
    text = f"{'w ' * before}do this: {command}{after}"
    for wrapped in (wrap(text), fill("    instead  ", text), "\n".join(wrap_lines(text, "  ", width=70))):
        start = wrapped.index(command.split()[0])
        pasted = wrapped[start:].replace("\\\n", " ")
        words, expected = shlex.split(pasted.partition("\n")[0]), shlex.split(command)
        is_cut = "\\\n" in wrapped
        assert words == expected if is_cut else words[: len(expected)][:-1] == expected[:-1]


def test_lines_have_79_columns_and_words_are_whole() -> None:
    text = f"the user's file isn't there: {'word ' * 40}'{'quoted text ' * 20}' {'/path' * 20} and the ranks' files"
    lines = wrap(text).split("\n")
    assert max(len(line) for line in lines if "/path" not in line) <= WIDTH
    assert " ".join(" ".join(lines).split()) == text and f"{'/path' * 20}" in wrap(text).split()


def test_quotes_outside_a_command_are_not_broken_if_they_fit() -> None:
    lines = wrap_lines(f"{'word ' * 13}write 'data.prefixes=[/a b/c]'")
    assert lines[-1] == "'data.prefixes=[/a b/c]'"


def test_a_command_in_a_comment_is_not_broken() -> None:
    lines = wrap_lines(f"{'word ' * 12}{COMMAND}", "# ", "#   ")
    assert len(lines) == 2 and lines[1] == f"#   {COMMAND}"


def test_prose_after_a_program_has_no_backslash() -> None:
    text = f"{'word ' * 12}python train.py --help lists the recipes, which {'have more words ' * 8}"
    assert "\\" not in wrap(text) and "python train.py --help" in wrap(text)


def test_starts_of_lines() -> None:
    assert wrap_lines("a b", "- ", width=4) == ["- a", "  b"]
    assert wrap_lines("a b", "- ", "", width=4) == ["- a", "b"]
    assert wrap_lines("a\nb") == ["a b"] and wrap_lines("") == []
    assert fill("label ", "") == "label "
    assert wrap(f"  {'word ' * 20}\nsecond").split("\n")[1:] == ["      word word word word word", "second"]


def test_a_command_of_words_is_quoted_and_continued() -> None:
    words = ["python", "train.py", *["trainer.steps=1"] * 6, f"run.dir={PATH}"]
    wrapped = wrap_command(words)
    assert shlex.split(wrapped.replace("\\\n", " ")) == words
    assert all(line.endswith(" \\") and len(line) <= WIDTH for line in wrapped.split("\n")[:-1])
