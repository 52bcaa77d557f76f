"""A conversation to the text that a model sees, in pieces: control tokens and text, learned or not.

A named template is a few strings for each role. The tokenizer's own is Jinja, rendered in a sandbox as transformers
renders it (tests compare the two). Of an answer the model learns what it has to generate: the text and the token that
ends it, not the white space that the template puts after that. A run's
own template, and the token ids of a conversation, are here too.
"""
from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megatron_llama.config.data_settings import split_weights
from megatron_llama.config.settings import CHAT_TEMPLATES
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import read_json, read_whole, write_synced
from megatron_llama.text.conversation import RecordError, Turn
from megatron_llama.text.tokenizer import SETTINGS, Tokenizer, open_tokenizer, read_settings


@dataclass(frozen=True)
class TextSpan:
    """A part of the rendered text."""

    text: str
    learn: bool
    control: bool = False
    """``text`` is a control token's name."""


END = "<|endoftext|>"
"""Means the tokenizer's own end-of-text token where it has none of this name."""


@dataclass(frozen=True)
class NamedTemplate:
    """A template by role: (prefix, suffix) of a turn's text. Names of control tokens are in <| |>."""

    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str, str]
    """(prefix, end of the answer, which is learned, and suffix)"""
    gap: str = ""
    """Between the assistant's prefix and its answer; learned with the answer, so that both can be one token."""

    def render_spans(self, turns: Sequence[Turn]) -> list[TextSpan]:
        """The rendered conversation."""
        found: list[TextSpan] = []
        for turn in turns:
            if turn.role == "assistant":
                before, end, after = self.assistant
                found += _marked(before, False)
                found.append(TextSpan(self.gap + turn.text, turn.learn))
                found += [*_marked(end, turn.learn), *_marked(after, False)]
            else:
                before, after = self.system if turn.role == "system" else self.user
                found += [*_marked(before, False), TextSpan(turn.text, False), *_marked(after, False)]
        return found

    def ask(self, turns: Sequence[Turn]) -> list[TextSpan]:
        """The conversation up to where the assistant's next answer begins, its gap not among it."""
        return [*self.render_spans(turns), *_marked(self.assistant[0], False)]

    def jinja(self, tokenizer: Tokenizer, add_bos: bool) -> str:
        """The template in Jinja, for other programs that use this tokenizer."""
        end_token = "eos_token" if tokenizer.control(END) is None else json.dumps(END)

        def expression(text: str, *values: str) -> str:
            parts = [json.dumps(part) for part in text.split(END)]
            whole = f" + {end_token} + ".join(parts)
            return "{{ " + " + ".join([whole, *values]) + " }}"

        content, (before, close, after) = "message['content']", self.assistant
        roles = [
            f"{expression(one)}{expression('', content)}{expression(other)}" for one, other in (self.system, self.user)
        ]
        answer = expression(before + self.gap, content) + expression(close + after)
        turn = (
            f"{{% if message['role'] == 'assistant' %}}{answer}{{% elif message['role'] == 'system' %}}{roles[0]}"
            f"{{% else %}}{roles[1]}{{% endif %}}"
        )
        begin = "{{ bos_token }}" if add_bos else ""
        asked = f"{{% if add_generation_prompt %}}{expression(before)}{{% endif %}}"
        return f"{begin}{{% for message in messages %}}{turn}{{% endfor %}}{asked}"


NAMED_TEMPLATES = {
    "chatml": NamedTemplate(
        ("<|im_start|>system\n", "<|im_end|>\n"),
        ("<|im_start|>user\n", "<|im_end|>\n"),
        ("<|im_start|>assistant\n", "<|im_end|>", "\n"),
    ),
    "prompter": NamedTemplate(
        ("<|system|> ", f" {END} "), ("<|prompter|> ", f" {END} "), ("<|assistant|>", f" {END}", " "), gap=" "
    ),
    "dialogue": NamedTemplate(("", "\n\n"), ("\n\nHuman: ", ""), ("\n\nAssistant:", END, ""), gap=" "),
    "plain": NamedTemplate(("", "\n\n"), ("", "\n"), ("", END, "")),
}


def _marked(text: str, learn: bool) -> list[TextSpan]:
    """A template's string, split at the names of control tokens."""
    parts = re.split(r"(<\|.*?\|>)", text)  # every second one is a name
    return [TextSpan(part, learn, control=bool(number % 2)) for number, part in enumerate(parts) if part]


MOST_OF_A_DATE = 100
"""Characters of a date's format."""
_NOWHERE = "\ue000\ue001"
"""Characters for private use."""


class Jinja:
    """A chat template in Jinja."""

    def __init__(self, source: str, variables: dict[str, str], ends: Sequence[str], where: str) -> None:
        """``variables`` are bos_token and the like; ``ends`` are the tokens that may end an answer.

        Raises:
            UserError: it does not compile.
        """
        import jinja2

        faults = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError)
        self._errors = (jinja2.TemplateError, *faults)
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            reason = str(error) if isinstance(error, jinja2.TemplateError) else "it is nested too deeply"
            raise UserError(f"{where}: the chat template is no Jinja: {reason}") from None
        self.source, self._variables = source, variables
        self._ends = tuple(ends)

    def render_spans(self, turns: Sequence[Turn]) -> list[TextSpan]:
        """The rendered conversation, control tokens as part of its text. Raises Bad."""
        whole = self.render(turns)
        borders = [0]
        for number, turn in enumerate(turns):
            if turn.role == "assistant" and turn.learn:
                borders += self._answer(whole, turns, number)
        borders.append(len(whole))
        if borders != sorted(borders):
            raise RecordError("template_refuses", "its answers are not in the order of the turns")
        texts = [whole[start:end] for start, end in zip(borders, borders[1:], strict=False)]
        return [TextSpan(text, bool(number % 2)) for number, text in enumerate(texts) if text]

    def ask(self, turns: Sequence[Turn]) -> list[TextSpan]:
        """The conversation up to where the assistant's next answer begins. Raises Bad."""
        return [TextSpan(self.render(turns, ask=True), False)]

    def render(self, turns: Sequence[Turn], ask: bool = False) -> str:
        """The text of ``turns``; with ``ask`` the next answer's beginning too. Raises Bad."""
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        self._environment.start(sum(len(turn.text) for turn in turns))
        try:
            return str(
                self._template.render(messages=messages, add_generation_prompt=ask, tools=None, **self._variables)
            )
        except self._errors as error:
            raise RecordError("template_refuses", f"{type(error).__name__}: {error}"[:200]) from None

    def _answer(self, whole: str, turns: Sequence[Turn], number: int) -> list[int]:
        """[first character, end) of turn ``number``, an answer, in the text."""
        until = self.render(turns[: number + 1])
        asked = self.render(turns[:number], ask=True)
        if not until.startswith(asked):
            # The generation prompt is not what comes before a given answer (it may begin a thought, say). Where an
            # answer begins is found with one that no template contains: the answer itself could be an `A`, which is
            # in `Assistant` too.
            asked = self.render([*turns[:number], Turn("assistant", _NOWHERE)]).partition(_NOWHERE)[0]
            if not until.startswith(asked):
                raise RecordError("template_refuses", f"turn {number + 1} is not found in its text")
        bare = until.rstrip()
        end = bare if bare.endswith(self._ends) and len(bare) > len(asked) else until
        if not (whole.startswith(asked) and whole.startswith(end)):
            raise RecordError("template_refuses", f"turn {number + 1} changes when more turns follow")
        return [len(asked), len(end)]


def _environment() -> Any:
    """Jinja as transformers sets it up for chat templates, in bounds."""
    import jinja2
    import jinja2.ext

    from megatron_llama.text.sandbox import BoundedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`, with which some templates mark answers; we find them without."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    return BoundedEnvironment(
        {"tojson": to_json},
        {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form[:MOST_OF_A_DATE])},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )


def load_own_template(path: Path, ends: Sequence[str]) -> Jinja:
    """The template of the tokenizer at ``path``, a Hugging Face folder or the tokenizer.json in one.

    Raises:
        UserError: it has none.
    """
    if path.is_file() and path.suffix != ".json":
        raise UserError(f"{path} is a sentencepiece model, which has no chat template: write --chat-template NAME")
    folder = path if path.is_dir() else path.parent
    config = read_settings(folder / SETTINGS) or {}
    file = folder / "chat_template.jinja"
    try:
        source = read_whole(file).decode() if file.is_file() else config.get("chat_template")
    except (OSError, ValueError) as error:
        raise UserError(f"{file} can't be read: {error}") from None
    if source is None:
        source = (read_settings(folder / "chat_template.json") or {}).get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next(
            (one.get("template") for one in source if isinstance(one, dict) and one.get("name") == "default"), None
        )
    if not isinstance(source, str):
        names = " or ".join(NAMED_TEMPLATES)
        raise UserError(f"{folder} has no chat template: write --chat-template {names}")
    named = {**(read_settings(folder / "special_tokens_map.json") or {}), **config}
    variables = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"):
        value = named.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            variables[name] = value
    return Jinja(source, variables, ends, str(folder))


# The chat template of a run's fine-tuning, from the manifests of its data sets or from its config; export writes it
# into tokenizers for other programs.

@dataclass(frozen=True)
class TrainedTemplate:
    """How the conversations were rendered that a model was fine-tuned on, so that prompts can be rendered alike."""

    template: str
    """``own`` (the tokenizer's), or a name in ``chat_template.NAMED_TEMPLATES``."""
    add_bos: bool | None = None
    """Whether each example began with BOS; None: as the tokenizer does it."""


def trained_template(settings: Mapping[str, Any]) -> TrainedTemplate | None:
    """The template of the run with these settings; None for pretraining, and where its data sets differ."""
    data = settings.get("data", {})
    if data.get("kind") != "sft" or data.get("mock"):
        return None
    found = set()
    for prefix in split_weights(data.get("prefixes", []))[1]:
        try:
            options = read_json(Path(f"{prefix}.json"))["options"]
            template, add_bos = options["chat_template"], options["add_bos"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if template in CHAT_TEMPLATES:
            found.add(TrainedTemplate(template, bool(add_bos)))
    if not found:  # the sets are gone, or elsewhere
        found = {TrainedTemplate(data.get("chat_template", "own"))}
    return found.pop() if len(found) == 1 else None


def write_trained_template(settings: Mapping[str, Any], folder: Path) -> int | None:
    """Writes the named template that the run was trained with beside the tokenizer in ``folder``, where it replaces
    the tokenizer's own: the model never saw that one. Returns the id that ends its answers.

    Does nothing and returns None for other runs, and where the folder has no tokenizer that can be read.
    """
    trained, settings_file = trained_template(settings), folder / SETTINGS
    if trained is None or trained.template not in NAMED_TEMPLATES or not settings_file.exists():
        return None
    named = NAMED_TEMPLATES[trained.template]
    try:
        content = read_json(settings_file)
        tokenizer = open_tokenizer(folder)
    except (UserError, OSError, ValueError):
        return None
    add_bos = tokenizer.adds_bos if trained.add_bos is None else trained.add_bos
    _rewrite(folder / "chat_template.jinja", named.jinja(tokenizer, add_bos))
    (folder / "chat_template.json").unlink(missing_ok=True)
    if content.pop("chat_template", None) is not None:
        _rewrite(settings_file, json.dumps(content, indent=2) + "\n")
    answer = named.render_spans([Turn("assistant", "")])
    ends = [tokenizer.control(piece.text) for piece in answer if piece.control and piece.learn]
    return ends[-1] if ends else None


def add_stop_token(file: Path, end: int) -> None:
    """Adds an id at which generation stops to a generation_config.json."""
    content = read_json(file)
    known = content.get("eos_token_id")
    ends = known if isinstance(known, list) else [] if known is None else [known]
    if end not in ends:
        _rewrite(file, json.dumps({**content, "eos_token_id": [*ends, end]}, indent=2) + "\n")


def _rewrite(file: Path, content: str) -> None:
    """Replaces a file; not atomic, since the folder is not published yet."""
    file.unlink(missing_ok=True)
    write_synced(file, content.encode())


# Pieces of a rendered conversation to token ids, with a mask that is exact at the borders. A text is encoded whole, as
# at inference. A token across the border of an answer is one that the model can't produce, since the prompt ends there
# at inference: then the two sides are encoded apart.

# Prefixes with which a text is encoded as the middle of another; the first that shares no token with it is taken.
ANCHORS = ("\n", "0", "|", ".")


def encode_spans(
    pieces: Sequence[TextSpan], tokenizer: Tokenizer, parse_special: bool = False
) -> tuple[list[int], list[bool]]:
    """(ids, whether each is learned) of a rendered conversation.

    ``parse_special`` is for the pieces of a tokenizer's own template, which are text with the names of control tokens
    in it. Raises Bad.
    """
    ids: list[int] = []
    learn: list[bool] = []
    for control, group in groupby(pieces, lambda piece: _control_id(piece, tokenizer)):
        run = list(group)
        if control is None:
            found, marks = _encode_run(run, tokenizer, parse_special)
        else:
            found, marks = [control] * len(run), [piece.learn for piece in run]
        ids += found
        learn += marks
    return ids, learn


def _control_id(piece: TextSpan, tokenizer: Tokenizer) -> int | None:
    """The id of a control token, None for text. A template's control token is text to a tokenizer that has none of
    that name; the end of text has an id in any tokenizer."""
    if not piece.control:
        return None
    number = tokenizer.control(piece.text)
    return tokenizer.end if number is None and piece.text == END else number


def _encode_run(run: Sequence[TextSpan], tokenizer: Tokenizer, parse_special: bool) -> tuple[list[int], list[bool]]:
    """(ids, whether each is learned) of pieces of text that follow one another."""
    text = "".join(piece.text for piece in run)
    if not text:
        return [], []
    borders: list[int] = []  # the first characters of stretches that are learned or not
    learn: list[bool] = []
    position = 0
    for piece in run:
        if not learn or learn[-1] != piece.learn:
            borders.append(position)
            learn.append(piece.learn)
        position += len(piece.text)
    spans = tokenizer.spans(text, parse_special)
    starts, ends = np.array(spans.starts), np.array(spans.ends)
    if not any(((starts < border) & (ends > border)).any() for border in borders[1:]):
        return spans.ids, np.array(learn)[np.searchsorted(borders, starts, side="right") - 1].tolist()
    ids: list[int] = []
    marks: list[bool] = []
    for start, stop, is_learned in zip(borders, [*borders[1:], len(text)], learn, strict=True):
        part = _encode_part(text[start:stop], tokenizer, parse_special, is_continued=start > 0)
        ids += part
        marks += [is_learned] * len(part)
    return ids, marks


def _encode_part(text: str, tokenizer: Tokenizer, parse_special: bool, is_continued: bool) -> list[int]:
    """The ids of a text; ``is_continued``: in the middle of another, where no space is added before it."""
    if not is_continued:
        return tokenizer.spans(text, parse_special).ids
    for anchor in ANCHORS:
        before, both = (tokenizer.spans(one, parse_special).ids for one in (anchor, anchor + text))
        if both[: len(before)] == before:
            return both[len(before) :]
    raise RecordError("template_refuses", "no token ends where an answer begins")
