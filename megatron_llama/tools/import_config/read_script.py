"""Read the training command of a bash script without running anything: assignments, arrays, if, case, functions.

Words are expanded as bash does, for the forms that training scripts use. An expansion that would run a program, and a
variable that is not set, stay in the word as ``${NAME}``; the converter reports such values as missing. Loops are not
executed.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

from megatron_llama.config.text_checks import names_secret
from megatron_llama.system.files import read_whole

MOST_STEPS, MOST_DEPTH, MOST_TEXT, MOST_EXPANDED = 100_000, 16, 1_000_000, 2_000_000
"""Commands, nested calls, and characters of the script and of its expansions. Larger ones are no training scripts."""
_NAME = r"[A-Za-z_]\w*"
_ASSIGNED = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(rf"(?s)({_NAME}|[0-9]+|[@*#?$!-])(\[[@*]\])?(?:(:?[-=?+])(.*))?")
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_TOKENS = re.compile(r"\\\n|[ \t\r]+|#[^\n]*|\n|;;|&&|\|\||<<-?|\d?&?[<>]+(?:&\d?)?|[;&|()]")
_CLOSERS = {"$(": ")", "${": "}"}
_PLAIN = re.compile(r"[^\\'\"$`]+")
_ENDS = ("\n", ";", "&&", "||", "|", "&", ";;", ")")
_MARKERS = ("--num-layers", "--hidden-size", "--micro-batch-size", "--seq-length", "--tensor-model-parallel-size")


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.floordiv, ast.Mod: operator.mod},
}


class ScriptError(ValueError):
    """The script cannot be read."""


@dataclass
class Command:
    """Training command of a script."""

    words: list[str]
    notes: list[str] = field(default_factory=list)
    """Assumed values of variables, and parts of the script that are not read."""


def read_script(path: Path, given: Mapping[str, str]) -> Command:
    """Return the training command of a script, or the flags in a text file.

    Args:
        path: The script.
        given: Variables of the script's environment, and its arguments under "1", "2", ...

    Raises ScriptError if the script cannot be read, or has no flags of Megatron-LM.
    """
    try:
        text = read_whole(path, MOST_TEXT).decode()
    except (OSError, ValueError) as error:
        raise ScriptError(str(getattr(error, "strerror", None) or error)) from error
    script = _Script(given)
    script.run(_tokens(text))
    if any(command[0].startswith("--") for command in script.commands):  # a text file of flags
        return Command([w for c in script.commands if c[0].startswith("--") for w in c], list(script.notes))
    matches = [command for command in script.commands if any(word.partition("=")[0] in _MARKERS for word in command)]
    if len(matches) > 1:
        script.note(f"the script has {len(matches)} training commands; the first one is read")
    if not matches:  # a file of variables for another script
        lists = {name: _split_texts(words) for name, words in script.variables.items()}
        lists = {name: words for name, words in lists.items() if words and words[0].startswith("--")}
        if not lists:
            raise ScriptError("has no command with Megatron-LM's flags, such as --num-layers")
        script.note(*(note for name in lists for note in script.sources.get(name, ())))
        script.note(f"the script has no training command; the flags in {', '.join(lists)} are read")
        matches = [[word for words in lists.values() for word in words]]
    return Command(matches[0], list(script.notes))


def _tokens(text: str) -> list[str]:
    """Split a script into words, with their quotes, and operators."""
    tokens, at, skipped = list[str](), 0, list[str]()
    while at < len(text):
        match = _TOKENS.match(text, at)
        if match is None:
            end = _end(text, at)
            tokens.append(text[at:end])
            if tokens[-2:-1] and tokens[-2] in ("<<", "<<-"):
                skipped.append(tokens[-1].strip("'\"\\"))
            at = end
            continue
        at = match.end()
        if match[0][0] not in "\\ \t\r#":
            tokens.append(match[0])
        while match[0] == "\n" and skipped:  # here-documents
            line, at = text[at : _after(text, "\n", at)], _after(text, "\n", at)
            if line.strip() == skipped[0]:
                skipped.pop(0)
            elif at >= len(text):
                skipped.clear()
    return tokens


def _after(text: str, char: str, at: int) -> int:
    end = text.find(char, at)
    return len(text) if end < 0 else end + 1


def _end(text: str, at: int, closer: str = "") -> int:
    """Return the end of the word that starts at ``at``, or the position after the ``closer`` of its quote or bracket.

    A missing closer counts as one after the text. An array, and anything in quotes or brackets, is one word.
    Iterative, for nested brackets.
    """
    start, closers = at, [closer] if closer else []
    while at < len(text):
        char, inner = text[at], closers[-1] if closers else ""
        if char == "\\":
            at += 1
        elif char == inner:
            closers.pop()
            if closer and not closers:
                return at + 1
        elif char == '"':
            closers.append(char)
        elif char in "'`" and inner not in ('"', "}"):
            at = _after(text, char, at + 1) - 1
        elif text[at : at + 2] in _CLOSERS:
            closers.append(_CLOSERS[text[at : at + 2]])
            at += 1
        elif char == "#" and inner == ")" and text[at - 1] in " \t\n":
            at = _after(text, "\n", at) - 1
        elif char == "(" and (inner == ")" or (not inner and at > start and text[at - 1] == "=")):
            closers.append(")")
        elif char == "{" and inner == "}":
            closers.append("}")
        elif not inner and char in " \t\r\n;&|()<>":
            break
        at += 1
    return len(text) + 1 if closer else max(min(at, len(text)), start + 1)


class _Script:
    """Interpreter of a script's assignments and branches."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.variables: dict[str, list[str]] = {name: [value] for name, value in given.items()}
        self.sources: dict[str, dict[str, None]] = {}
        self.functions: dict[str, list[str]] = {}
        self.notes: dict[str, None] = {}
        self.commands: list[list[str]] = []
        self.depth = self.steps = self.size = self.at = 0
        self.tokens: list[str] = []
        self.status = True

    def run(self, tokens: list[str]) -> None:
        """Execute the commands of a script or function."""
        outer = self.tokens, self.at
        self.tokens, self.at = tokens, 0
        with self._nested():
            self._block((), True)
        self.tokens, self.at = outer

    @contextmanager
    def _nested(self) -> Iterator[None]:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise ScriptError("has functions, brackets or expansions that are nested too deeply")
        yield
        self.depth -= 1

    def _next(self) -> str:
        """Return the next token, and "" after the last one."""
        self.at += 1
        return self.tokens[self.at - 1] if self.at <= len(self.tokens) else ""

    def _block(self, ends: Sequence[str], live: bool) -> str:
        """Execute commands up to a word of ``ends``, and return it. Unless ``live``, commands are only read."""
        runs = True
        with self._nested():
            while (token := self._next()) and token not in ends:
                if token in ("\n", ";", "&", "|"):
                    runs = True
                elif token in ("&&", "||"):
                    runs = runs and (self.status if token == "&&" else not self.status)
                elif token == "if":
                    self._if(live and runs)
                elif token == "case":
                    self._case(live and runs)
                elif token in ("for", "while", "until", "select"):
                    self._block(("do",), False)
                    self._block(("done",), False)
                    if live and runs:
                        self.note("the loops of the script are not executed")
                elif token in ("{", "("):
                    self._block(("}" if token == "{" else ")",), live and runs)
                elif token not in (")", "done", "fi", "esac", "}", ";;", "then", "do"):
                    self._command(token, live and runs)
        return token

    def _if(self, live: bool) -> None:
        done, word = False, "if"
        while word in ("if", "elif"):
            tests = live and not done
            self._block(("then",), tests)
            chosen = tests and self.status
            word = self._block(("elif", "else", "fi"), chosen)
            done = done or chosen
        if word == "else":
            self._block(("fi",), live and not done)

    def _case(self, live: bool) -> None:
        word, done, end = self._next(), not live, ";;"
        subject = " ".join(self._expand(word)) if live else ""
        while end == ";;":
            patterns = []
            while (token := self._next()) not in (")", "esac", ""):
                patterns += [token] if token not in ("in", "\n", "|", "(", ";;") else []
            if token != ")":
                return
            matches = not done and any(fnmatchcase(subject, "".join(self._expand(each))) for each in patterns)
            end = self._block((";;", "esac"), matches)
            done = done or matches

    def _command(self, first: str, live: bool) -> None:
        """Execute a simple command, whose first token has been read."""
        if first == "function" or self.tokens[self.at : self.at + 2] == ["(", ")"]:
            self._define(first, live)
            return
        tokens, brackets = [first], first == "[["
        while self.at < len(self.tokens) and (brackets or self.tokens[self.at] not in _ENDS):
            tokens.append(self._next())
            brackets = brackets and tokens[-1] != "]]"
        if not live:
            return
        self._count([])
        self.status = True
        is_negated = tokens[0] == "!"
        self._command_words(tokens[is_negated:])
        self.status = self.status != is_negated

    def _command_words(self, tokens: list[str]) -> None:
        assigns = True
        words = list[str]()
        for number, token in enumerate(tokens):
            match = _ASSIGNED.fullmatch(token)
            if match and (assigns or tokens[0] in _DECLARE):
                self._assign(match[1], bool(match[2]), match[3])
                continue
            if token[-1] in "<>" or re.fullmatch(r"<<-|\d?&?[<>]+&\d?", token):
                break  # redirections
            assigns = False
            words += self._expand(token, strict=number > 0 and tokens[0] in ("[", "[[", "test"))
        if not words or words[0] in _DECLARE:
            return
        if words[0] in ("[", "[[", "test"):
            self.status = self._test([word for word in words[1:] if word not in ("]", "]]")])
        elif words[0] in ("source", "."):
            self.note(f"{' '.join(words[1:2])} is not read")
        elif words[0] in self.functions:
            saved = {name: self.variables[name] for name in self.variables if name.isdecimal()}
            self.variables.update({str(number): [word] for number, word in enumerate(words[1:], 1)})
            self.run(self.functions[words[0]])
            self.variables.update(saved)
        elif words := _split_texts(words):
            self.commands.append(words)

    def _define(self, first: str, live: bool) -> None:
        name = self._next() if first == "function" else first
        while self._next() not in ("{", ""):
            pass
        start = self.at
        self._block(("}",), False)
        if live:
            self.functions[name] = self.tokens[start : self.at - 1]

    def _assign(self, name: str, appends: bool, text: str) -> None:
        # A note about a variable counts where its value is used.
        notes, self.notes = self.notes, dict(self.sources.get(name, {})) if appends else {}
        old = self._count(self.variables.get(name, [])) if appends else []
        if text.startswith("("):
            items = [item for item in _tokens(text[1:-1]) if item not in _ENDS]
            self.variables[name] = [*old, *(word for item in items for word in self._expand(item))]
        else:
            quoted = text if '"' in text or "'" in text else f'"{text}"'
            self.variables[name] = [" ".join(old) + " ".join(self._expand(quoted))]
        self.sources[name], self.notes = self.notes, notes

    def note(self, *notes: str) -> None:
        """Add notes on the words of the command."""
        self.size += len(notes)
        self.notes.update(dict.fromkeys(notes))

    def _expand(self, token: str, strict: bool = False) -> list[str]:
        """Return the words of a token. ``strict``: an empty word stays, and no word is split."""
        words, at = list[list[str]](), 0  # the parts of each word
        while at < len(token):
            char = token[at]
            if char == "\\":
                parts, at = [token[at + 1 : at + 2].replace("\n", "")], at + 2
            elif char == "'":
                end = _after(token, "'", at + 1)
                parts, at = [token[at + 1 : end - 1]], end
            elif char == '"':
                end = _end(token, at + 1, '"')
                parts, at = self._quoted(token[at + 1 : end - 1]), end
            elif char in "$`":
                values, at = self._value(token, at)
                parts = [" ".join(values)] if strict else " ".join(values).split()
            else:
                end = at + len(_PLAIN.match(token, at)[0])  # type: ignore[index]
                parts, at = [token[at:end]], end
            if parts and words:
                words[-1].append(parts.pop(0))
            words += [[part] for part in parts]
        return ["".join(parts) for parts in words] or ([""] if strict else [])

    def _quoted(self, text: str) -> list[str]:
        """Return the words of a text in double quotes: several only for ``"${NAME[@]}"``."""
        if match := re.fullmatch(rf"\$\{{({_NAME})\[@\]\}}", text):
            return self._count(self._parameter(match[1]) if match[1] in self.variables else [])
        result, at = "", 0
        while at < len(text):
            if text[at] == "\\" and text[at + 1 : at + 2] in tuple('$`"\\\n'):
                result += text[at + 1].replace("\n", " ")
                at += 2
            elif text[at] in "$`":
                values, at = self._value(text, at)
                result += " ".join(values)
            else:
                result += text[at]
                at += 1
        return [result]

    def _value(self, text: str, at: int) -> tuple[list[str], int]:
        """Return the values of the expansion at ``at``, and the position after it."""
        if text[at] == "`":
            return ["${a command}"], _after(text, "`", at + 1)
        if text.startswith("$((", at):
            end = _end(text, at + 2, ")")
            return [self._arithmetic(text[at + 3 : end - 2])], end
        if text.startswith("$(", at):
            return ["${a command}"], _end(text, at + 2, ")")
        if text.startswith("${", at):
            end = _end(text, at + 2, "}")
            return self._count(self._parameter(text[at + 2 : end - 1])), end
        if match := re.compile(rf"\$({_NAME}|[0-9@*#?$!-])").match(text, at):
            return self._count(self._parameter(match[1])), match.end()
        return ["$"], at + 1

    def _count(self, values: list[str]) -> list[str]:
        """Return ``values``. Raises ScriptError if the script expands to too much text."""
        self.steps += 1
        self.size += sum(map(len, values)) + len(values)
        if self.size > MOST_EXPANDED or self.steps > MOST_STEPS:
            limits = f"{MOST_STEPS} commands and words, or {MOST_EXPANDED} characters"
            raise ScriptError(f"has or expands to more than {limits}")
        return values

    def _parameter(self, text: str) -> list[str]:
        match = _PARAMETER.fullmatch(text)
        if match is None:
            return [f"${{{text}}}"]
        name, _, form, default = match.groups()
        if name in "@*#?$!-":
            return []
        values = self.variables.get(name)
        if values is not None:
            self.note(*self.sources.get(name, ()))
        elif name in os.environ and not names_secret(name):
            values = [os.environ[name]]
            self.note(f"{name}={values[0]}, from the environment")
        if form and form.endswith("+"):
            return [] if not values else self._words(default)
        if values and (any(values) or not form or not form.startswith(":")):
            return values
        if form and form[-1] in "-=":
            values = self._words(default)
            if name not in self.variables:
                label = f"argument {name}" if name.isdecimal() else name
                self.note(f"{label} is not given: its default {' '.join(values) or 'empty'} is used")
            return values
        return values if values is not None else [f"${{{name}}}"]

    def _words(self, default: str) -> list[str]:
        with self._nested():
            return self._expand(default)

    def _arithmetic(self, text: str) -> str:
        """Return the value of an expression of integers."""
        text = "".join(self._quoted(text))
        text = re.sub(_NAME, lambda match: "".join(self._parameter(match[0])), text)
        try:
            return str(_integer(ast.parse(text.strip() if len(text) < 200 else "", mode="eval").body))
        except (SyntaxError, ArithmeticError, ValueError, RecursionError, MemoryError):
            return f"${{(({text}))}}"

    def _test(self, words: list[str]) -> bool:
        """Return the value of a condition. A condition on files or unset variables counts as false."""
        for sign, combine in (("||", any), ("&&", all)):
            if sign in words:
                parts = [list(group) for is_sign, group in groupby(words, sign.__eq__) if not is_sign]
                return combine(map(self._test, parts))
        if words[:1] == ["!"]:
            return not self._test(words[1:])
        words = [word for word in words if word not in ("(", ")")]
        if len(words) == 2 and words[0] in ("-z", "-n"):
            return (not words[1] or words[1].startswith("${")) == (words[0] == "-z")
        if len(words) == 3:
            left, sign, right = words
            if sign in ("=", "==", "!="):
                return fnmatchcase(left, right) != (sign == "!=")
            try:
                a, b = int(left), int(right)
            except ValueError:
                a = b = 0
            results = {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-lt": a < b, "-ge": a >= b, "-le": a <= b}
            if sign in results:
                return results[sign]
        self.note(f"the condition [ {' '.join(words)[:80]} ] counts as false")
        return False


def _integer(node: ast.expr) -> int:
    """Return the value of an expression of integers. Raises ValueError for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
    raise ValueError(node)


def _split_texts(words: Sequence[str]) -> list[str]:
    """Split words that are command lines: an argument of ``bash -c``, or flags in one variable."""

    def split() -> Iterator[str]:
        for word in words:
            if "--" in word and len(word.split()) > 1:
                try:
                    yield from shlex.split(word.replace("\\\n", " "))
                except ValueError:
                    yield from word.split()
            elif word:
                yield word

    return list(split())
