"""Texts for users within 79 columns: messages, and commands that can still be pasted into a shell."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence

WIDTH = 79
"""Columns of texts for users: one fewer than a terminal's, which some terminals fill with the cursor."""
INDENT = "    "
"""Additional indent of a continued line."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters, other than tab and newline, that a terminal obeys or cannot show, or that reverse the text after them."""

_QUOTED = r"""(?<![\w)\]}.,;:!?%])(?:'[^']*'|"[^"]*")"""
"""Quoted part of a word. An apostrophe after a letter opens no quotes."""
_WORDS = re.compile(rf"\s+|(?:{_QUOTED}|\S)+")
_NAMES = r"python[\d.]*|megatron-llama|torchrun|srun|sbatch|mpirun|ssh|hf|make|pip"
_PROGRAM = re.compile(rf"""\(?['"]?(?:\S.*/)?(?:{_NAMES})['"]?""")
_VERBS = {"megatron-llama": 1, "hf": 1, "make": 1}
"""Words after a program that are not an argument, such as the name of a command."""
_ARGUMENT = re.compile(r"""-|[\w.+~]+=|.*[/'"]|.*\.py\b|[\dA-Z_]+\b[^a-z]*$|\.\.\.""")
"""Words that continue a command: flags, settings, paths, quoted words, numbers and names of placeholders."""


def escape_controls(text: str) -> str:
    """Replace control characters by their escapes, so that a terminal does not obey text of untrusted files."""
    return CONTROL.sub(lambda found: repr(found.group())[1:-1], text)


def wrap_lines(text: str, first: str = "", rest: str | None = None, *, width: int = WIDTH) -> list[str]:
    """Wrap a paragraph. Line feeds count as spaces; an empty text has no lines.

    Words such as paths are not broken, so that they can be copied. Commands in the text are on one line, or on several
    lines that end with a backslash.

    Args:
        first: Start of the first line.
        rest: Start of the other lines; default: spaces of the length of ``first``.
        width: Most columns of a line, unless a word needs more.
    """
    rest = " " * len(first) if rest is None else rest
    wrapper = _Wrapper(
        width, first, rest, break_long_words=False, break_on_hyphens=False, replace_whitespace=False, expand_tabs=False
    )
    lines = wrapper.wrap(text.replace("\n", " "))
    return [part for line in lines for part in (_cut_command(line, rest, width) if len(line) > width else [line])]


def fill(label: str, text: str) -> str:
    """Wrap a labeled text with a hanging indent."""
    return "\n".join(wrap_lines(text, label)) or label


def wrap(text: str, start: str = "") -> str:
    """Wrap each line of ``start`` and ``text``; further lines have the line's indent and four spaces."""
    wrapped = []
    for line in (start + text).split("\n"):
        indent = line[: len(line) - len(line.lstrip(" "))]
        wrapped += wrap_lines(line.lstrip(" "), indent, indent + INDENT) if len(line) > WIDTH else [line]
    return "\n".join(wrapped)


def wrap_command(words: Sequence[str]) -> str:
    """Quote the words of a command for the shell and wrap it, with a backslash at the end of each unfinished line."""
    return "\n".join(_with_backslashes([shlex.quote(word) for word in words], "  ", f"  {INDENT}", WIDTH))


class _Wrapper(textwrap.TextWrapper):
    """TextWrapper that does not break lines in commands and in quotes."""

    def _split(self, text: str) -> list[str]:
        chunks: list[str] = []
        words, space = _WORDS.findall(text), self.width - len(self.subsequent_indent)
        while words:
            count = _command_length(words)
            chunk = "".join(words[:count])
            # Quotes outside a command may be a text of any length.
            chunks += [chunk] if count > 1 or len(chunk) <= space else re.findall(r"\s+|\S+", chunk)
            del words[:count]
        return chunks


def _command_length(words: Sequence[str]) -> int:
    """Return how many of the words and spaces between them are the command at their start; 1 if there is none."""
    if not _PROGRAM.fullmatch(words[0]):
        return 1
    verbs, takes_value, takes_all = _VERBS.get(words[0].lstrip("("), 0), False, False
    count = 1
    for number in range(2, len(words), 2):
        word = words[number]
        if not (takes_value or takes_all or _ARGUMENT.match(word)):
            if not verbs:
                break
            verbs -= 1
        takes_all |= word == "install"  # names of packages
        takes_value = word.startswith("-") or word in ("pip", "install")
        count = number + 1
        if word[-1] in ",;:)" or (word[-1] == "." and word.strip(".")):
            break
    return count


def _cut_command(line: str, rest: str, width: int) -> list[str]:
    """Return the lines of a line that is too long: a command at its start is cut, any other line is not.

    Args:
        rest: Start of the following lines. A comment's mark can not follow a backslash.
    """
    words = _WORDS.findall(line)
    number = next((number for number, word in enumerate(words) if _PROGRAM.fullmatch(word)), None)
    if number is None or _command_length(words[number:]) == 1 or rest.strip():
        return [line]
    label, command = "".join(words[:number]), [word for word in words[number:] if word.strip()]
    command[-1] = command[-1].rstrip(",;:") or command[-1]  # lines that are pasted as a whole
    if command[-1].strip("."):
        command[-1] = command[-1].removesuffix(".")
    return list(_with_backslashes(command, label, rest + INDENT, width))


def _with_backslashes(words: Sequence[str], first: str, rest: str, width: int) -> Iterator[str]:
    """Yield the lines of a command; ``first`` and ``rest`` are the starts of the lines."""
    line = first + words[0]
    for word in words[1:]:
        if len(line) + len(word) + 3 > width:  # the spaces around it and the backslash
            yield line + " \\"
            line = rest + word
        else:
            line += " " + word
    yield line
