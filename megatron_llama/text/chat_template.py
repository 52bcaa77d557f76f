"""Chat templates: render a conversation as spans of text and control tokens, with or without loss.

A named template is a few strings per role. The tokenizer's template is Jinja, rendered in a sandbox with the same
result as in transformers (tests compare the two). Loss is on the tokens that the model must generate: the answer's text
and the token that ends it, not the white space after it. loss_spans.py encodes the spans. The template of a run is here
too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_llama.config.data_settings import is_template_file, split_weights
from megatron_llama.config.settings import CHAT_TEMPLATES
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import read_json, read_whole, write_synced
from megatron_llama.text.conversation import NO_CONTEXT, REASONING_OMITTED, RecordError, TemplateContext, Turn
from megatron_llama.text.loss_spans import END, TextSpan, encode_spans
from megatron_llama.text.sandbox import MARKS, Sandbox, TemplateFault
from megatron_llama.text.tokenizer import SETTINGS, Tokenizer, open_tokenizer, read_settings

OWN = "own"
"""Name of the tokenizer's template."""


class TemplateError(UserError):
    """A chat template that is missing, invalid, or does not fit its tokenizer."""

    def __init__(self, rule: str, instead: str = "") -> None:
        """``instead``: values of --chat-template that would work; "" if the template must be corrected."""
        super().__init__(f"{rule}: write --chat-template {instead}" if instead else rule)
        self.rule, self.instead = rule, instead


@dataclass(frozen=True)
class NamedTemplate:
    """Template by role: (prefix, suffix) of a turn's text. Names of control tokens are in <| |>."""

    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str, str]
    """(prefix, end of the answer, which has loss, suffix)"""
    gap: str = ""
    """Text between the assistant's prefix and the answer; it has loss, as it may share a token with the answer."""

    def render_spans(
        self, turns: Sequence[Turn], context: TemplateContext = NO_CONTEXT, notes: list[str] | None = None
    ) -> list[TextSpan]:
        """Return the rendered conversation. Raises RecordError for tools; omitted reasoning is added to ``notes``."""
        if context.tools or any(turn.calls or turn.role == "tool" for turn in turns):
            raise RecordError("tools_not_supported", "a named template has no text for tools")
        spans: list[TextSpan] = []
        for turn in turns:
            if turn.role == "assistant":
                before, end, after = self.assistant
                spans += _marked(before, False)
                spans.append(TextSpan(self.gap + turn.text, turn.learn))
                spans += [*_marked(end, turn.learn), *_marked(after, False)]
            else:
                before, after = self.system if turn.role == "system" else self.user
                spans += [*_marked(before, False), TextSpan(turn.text, False), *_marked(after, False)]
        _note_reasoning("", turns, notes)
        return spans

    def ask(self, turns: Sequence[Turn], context: TemplateContext = NO_CONTEXT) -> list[TextSpan]:
        """Return the conversation up to the assistant's next answer, without the gap before it."""
        return [*self.render_spans(turns, context), *_marked(self.assistant[0], False)]

    def jinja(self, tokenizer: Tokenizer, add_bos: bool) -> str:
        """Return the template as Jinja, for other programs that use this tokenizer."""
        end_token = "eos_token" if tokenizer.control(END) is None else json.dumps(END)

        def expression(text: str, *values: str) -> str:
            whole = f" + {end_token} + ".join([json.dumps(part) for part in text.split(END)])
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
        generation_prompt = f"{{% if add_generation_prompt %}}{expression(before)}{{% endif %}}"
        return f"{begin}{{% for message in messages %}}{turn}{{% endfor %}}{generation_prompt}"


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


@dataclass(frozen=True)
class RenderedText:
    """Template of texts that are rendered chats already: one turn, which ends with the end-of-text token."""

    marker: str | None
    """Text before the last answer, which has the loss. None: all tokens have loss."""
    end: str
    """Name of the tokenizer's end-of-text token; "" without one."""

    def render_spans(
        self, turns: Sequence[Turn], context: TemplateContext = NO_CONTEXT, notes: list[str] | None = None
    ) -> list[TextSpan]:
        """Return prompt and answer. Raises RecordError if the marker or the answer is missing."""
        (turn,), start = turns, 0
        if self.marker is not None:
            start = turn.text.rfind(self.marker) + len(self.marker)
            if start < len(self.marker):
                raise RecordError("no_marker", f"the text does not contain {self.marker!r}")
            if not turn.text[start:].strip():
                raise RecordError("empty_content", "nothing follows the marker")
        stripped = turn.text.rstrip()
        has_end = self.end != "" and stripped.endswith(self.end)
        stop = len(stripped) if has_end else len(turn.text)  # white space after the end token has no loss, as in chats
        parts = turn.text[:start], turn.text[start:stop] + ("" if has_end else self.end), turn.text[stop:]
        return [TextSpan(text, learn) for text, learn in zip(parts, (False, True, False), strict=True) if text]


def _marked(text: str, learn: bool) -> list[TextSpan]:
    """Split a template's string at the names of control tokens."""
    parts = re.split(r"(<\|.*?\|>)", text)  # every second one is a name
    return [TextSpan(part, learn, control=bool(number % 2)) for number, part in enumerate(parts) if part]


OTHERS = "dialogue, prompter or plain"
"""Templates for tokenizers without a template, in messages. chatml needs control tokens that few base models have."""
_NOWHERE = "\ue000\ue001"
"""Private-use characters, which no template contains."""


class Jinja:
    """A chat template in Jinja."""

    def __init__(self, source: str, variables: Mapping[str, Any], ends: Sequence[str], where: str) -> None:
        """Compile a template.

        Args:
            variables: bos_token and similar variables, and chat_template_kwargs.
            ends: Tokens that may end an answer.
            where: Source of the template, for messages.

        Raises:
            TemplateError: The template does not compile.
        """
        try:
            source.encode()  # rejects lone surrogates
            self._sandbox = Sandbox(source)
        except (TemplateFault, UnicodeError) as error:
            raise TemplateError(f"{where}: the chat template is not valid Jinja: {error}") from None
        self.source, self._variables = source, variables
        self._ends = tuple(ends)
        self._marks_answers = re.search(r"{%[-+]?\s*generation\b", source) is not None

    def render_spans(
        self, turns: Sequence[Turn], context: TemplateContext = NO_CONTEXT, notes: list[str] | None = None
    ) -> list[TextSpan]:
        """Return the rendered conversation, with control tokens as part of its text.

        Answers are the template's generation blocks, if it has any. Otherwise an answer is the text that follows the
        prompt for it. ``notes`` gets omitted reasoning, blocks that differ from the answers, and answers without end.

        Raises RecordError.
        """
        learned = [number for number, turn in enumerate(turns) if turn.role == "assistant" and turn.learn]
        try:
            whole, boundaries = self._derive(turns, learned, context)
        except RecordError:
            if not self._marks_answers:
                raise
            whole, boundaries = self.render(turns, context=context), []  # a template may change earlier answers
            _check_complete(whole, turns, context)
        _note_reasoning(whole, turns, notes)
        if self._marks_answers:
            derived, boundaries = boundaries, self._blocks(turns, whole, context)
            trimmed = [len(whole[:at].rstrip()) if number % 2 else at for number, at in enumerate(boundaries)]
            if derived and trimmed != derived and notes is not None:
                notes.append("generation block differs from the answer")
        elif notes is not None and any(not whole[:end].rstrip().endswith(self._ends) for end in boundaries[1::2]):
            notes.append("answer without an end token of the tokenizer")
        boundaries = [0, *boundaries, len(whole)]
        if boundaries != sorted(boundaries):
            raise RecordError("template_refuses", "its answers are not in the order of the turns")
        parts = [whole[start:end] for start, end in zip(boundaries, boundaries[1:], strict=False)]
        return [TextSpan(text, bool(number % 2)) for number, text in enumerate(parts) if text]

    def ask(self, turns: Sequence[Turn], context: TemplateContext = NO_CONTEXT) -> list[TextSpan]:
        """Return the conversation up to the assistant's next answer. Raises RecordError."""
        prompt = self.render(turns, ask=True, context=context)
        _check_complete(prompt, turns, context, ask=True)
        return [TextSpan(prompt, False)]

    def render(self, turns: Sequence[Turn], ask: bool = False, context: TemplateContext = NO_CONTEXT) -> str:
        """Return the text of ``turns``; ``ask`` adds the generation prompt. Raises RecordError."""
        return self._render(turns, context, [(len(turns), ask, False)])[0]

    def _render(
        self, turns: Sequence[Turn], context: TemplateContext, parts: Sequence[tuple[int, bool, bool]]
    ) -> list[str]:
        """Return the texts of ``parts``; see ``Sandbox.render``. Raises RecordError."""
        variables = {**self._variables, **context.variables, "tools": context.tools or None}
        try:
            return self._sandbox.render(variables, [turn.message for turn in turns], parts)
        except TemplateFault as error:
            raise RecordError("template_refuses", str(error)) from None

    def _derive(self, turns: Sequence[Turn], learned: Sequence[int], context: TemplateContext) -> tuple[str, list[int]]:
        """Return the text, and [start, end) of the answers to learn, one after another."""
        prefixes = [part for number in learned for part in ((number + 1, False, False), (number, True, False))]
        whole, *texts = self._render(turns, context, [(len(turns), False, False), *prefixes])
        _check_complete(whole, turns, context)
        boundaries: list[int] = []
        for number, until, prompt in zip(learned, texts[::2], texts[1::2], strict=True):
            boundaries += self._answer(turns, number, whole, until, prompt, context)
        return whole, boundaries

    def _blocks(self, turns: Sequence[Turn], whole: str, context: TemplateContext) -> list[int]:
        """Return [start, end) of the generation blocks of answers with loss, one after another."""
        answers = [turn for turn in turns if turn.role == "assistant"]
        parts = re.split("([" + "".join(MARKS) + "])", self._render(turns, context, [(len(turns), False, True)])[0])
        if parts[1::2] != [*MARKS] * len(answers) or "".join(parts[::2]) != whole:
            raise RecordError("template_refuses", f"its generation blocks do not mark {len(answers)} answers")
        boundaries, position = [], 0
        for number, text in enumerate(parts[::2]):
            if number % 2 and answers[number // 2].learn:
                boundaries += [position, position + len(text)]
                if _find(text, answers[number // 2].text.strip(), 0)[0] < 0:
                    raise RecordError("template_omits", f"answer {number // 2 + 1} is not in its generation block")
            position += len(text)
        return boundaries

    def _answer(
        self, turns: Sequence[Turn], number: int, whole: str, until: str, prompt: str, context: TemplateContext
    ) -> list[int]:
        """Return [start, end) of the answer in turn ``number``, in characters of the text.

        ``until`` is the text up to this turn, ``prompt`` the text that asks for it.
        """
        if not until.startswith(prompt):
            # The generation prompt differs from the text before a given answer (it may begin a thought). Find the
            # answer's start with a text that no template contains: the answer itself could be part of the template.
            thought = {key: _NOWHERE for key in turns[number].extra if key == "reasoning_content"}
            nowhere = Turn("assistant", _NOWHERE, extra=thought)
            prompt = self.render([*turns[:number], nowhere], context=context).partition(_NOWHERE)[0]
            if not until.startswith(prompt):
                raise RecordError("template_refuses", f"turn {number + 1} is not found in its text")
        bare = until.rstrip()
        end = bare if bare.endswith(self._ends) and len(bare) > len(prompt) else until
        if not (whole.startswith(prompt) and whole.startswith(end)):
            raise RecordError("template_refuses", f"turn {number + 1} changes when more turns follow")
        answer = turns[number].text.strip()
        if end.rfind(answer) + len(answer) <= len(prompt):
            raise RecordError("template_omits", f"the answer in turn {number + 1} is not in its text")
        return [len(prompt), len(end)]


def _check_complete(text: str, turns: Sequence[Turn], context: TemplateContext, ask: bool = False) -> None:
    """Raise RecordError if a rendered text omits the text of a turn, a tool or a call.

    Templates may remove white space around a text, may write it as JSON, and may move the system's text. A prompt
    (``ask``) may omit parts of earlier answers, as templates of reasoning models do.
    """
    for function in (tool["function"] for tool in context.tools):
        parameters = function.get("parameters")
        names = parameters.get("properties") if isinstance(parameters, dict) else None
        parts = [function["name"], str(function.get("description", "")), *(names if isinstance(names, dict) else ())]
        for part in parts:
            if _find(text, part, 0)[0] < 0:
                place = "" if part == function["name"] else f"{part[:60]!r} of "
                raise RecordError("template_omits", f"{place}the tool {function['name'][:60]!r} is not in its text")
    position = 0
    for number, turn in enumerate(turns, start=1):
        if ask and turn.role == "assistant":
            continue
        start, end = _find(text, turn.text.strip(), 0 if turn.role == "system" else position)
        if start < 0:
            raise RecordError("template_omits", f"the text of turn {number} ({turn.role}) is not in its text")
        for call in turn.calls:
            for part in (call["name"], *_leaves(call["arguments"])):
                if _find(text, part, position)[0] < 0:
                    raise RecordError("template_omits", f"the call of turn {number} is not complete in its text")
        if turn.role != "system":
            position = end


def _find(text: str, content: str, position: int) -> tuple[int, int]:
    """Return (start, end) of the first of a content's forms in a text: plain, or within JSON; (-1, ...) if missing."""
    for form in chain([content], (json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True))):
        if (start := text.find(form, position)) >= 0:
            return start, start + len(form)
    return -1, position


def _leaves(value: Any) -> Iterator[str]:
    """Yield the keys, texts and numbers in a JSON value."""
    if isinstance(value, dict):
        yield from value
        value = [*value.values()]
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif not isinstance(value, bool) and value is not None:
        yield str(value)


def _note_reasoning(text: str, turns: Sequence[Turn], notes: list[str] | None) -> None:
    """Add a note if a text omits the reasoning of a turn."""
    reasoning = [str(turn.extra.get("reasoning_content", "")).strip() for turn in turns]
    if notes is not None and any(thought not in text for thought in reasoning):
        notes.append(REASONING_OMITTED)


def read_template(file: Path) -> str:
    """Return the text of a Jinja file. Raises TemplateError."""
    try:
        return read_whole(file).decode()
    except (OSError, ValueError) as error:
        rule = getattr(error, "strerror", None) or error
        raise TemplateError(f"{file} cannot be read ({rule})", "own or FILE.jinja") from None


def load_own_template(
    path: Path,
    ends: Sequence[str],
    variables: Mapping[str, Any] = NO_CONTEXT.variables,
    source: str | None = None,
    name: str = OWN,
) -> Jinja:
    """Return the template of the tokenizer at ``path``, a Hugging Face folder or its tokenizer.json.

    Args:
        variables: Additional variables, as ``chat_template_kwargs``.
        source: Another template for this tokenizer.
        name: Its file, for messages.

    Raises:
        TemplateError: The tokenizer has no template, or it does not compile.
    """
    if source is None and path.is_file() and path.suffix != ".json":
        raise TemplateError(f"{path} is a sentencepiece model, which has no chat template", OTHERS)
    folder = path if path.is_dir() else path.parent
    config = read_settings(folder / SETTINGS) or {}
    file = folder / "chat_template.jinja"
    if source is None:
        source = read_template(file) if file.is_file() else config.get("chat_template")
    if source is None:
        source = (read_settings(folder / "chat_template.json") or {}).get("chat_template")
    if isinstance(source, list):  # several, by name
        chosen = (one.get("template") for one in source if isinstance(one, dict) and one.get("name") == "default")
        source = next(chosen, None)
    if not isinstance(source, str):
        raise TemplateError(f"{folder} has no chat template", OTHERS)
    named = {**(read_settings(folder / "special_tokens_map.json") or {}), **config}
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
    values = {name: one.get("content") if isinstance(one := named.get(name), dict) else one for name in names}
    tokens = {name: value for name, value in values.items() if isinstance(value, str)}
    return Jinja(source, {**tokens, **variables}, ends, str(folder) if name == OWN else name)


def own_template_sha256(path: Path) -> str | None:
    """Return the digest of the tokenizer's chat template, as in manifests of datasets; None without a template."""
    try:
        return hashlib.sha256(load_own_template(path, ()).source.encode()).hexdigest()
    except UserError:
        return None


@dataclass(frozen=True)
class TrainedTemplate:
    """Chat template of a fine-tuned model's training data, from its manifests or the config. It renders prompts."""

    template: str
    """``own`` (the tokenizer's), a Jinja file, or a name in ``chat_template.NAMED_TEMPLATES``."""
    add_bos: bool | None = None
    """Whether each example began with BOS; None: the tokenizer's default."""
    source: str | None = None
    """Text of the Jinja file."""
    variables: str = "{}"
    """``chat_template_kwargs``, as JSON."""

    def load(self, path: Path, ends: Sequence[str]) -> NamedTemplate | Jinja:
        """Return the template with the tokenizer at ``path``. Raises UserError."""
        source = self.source
        if source is None and is_template_file(self.template):
            source = read_template(Path(self.template)).removeprefix("\ufeff")  # a byte order mark
        named = NAMED_TEMPLATES.get(self.template)
        return named or load_own_template(path, ends, json.loads(self.variables), source, self.template)


def trained_template(settings: Mapping[str, Any]) -> TrainedTemplate | None:
    """Return the template of a run with these settings; None for pretraining and if its datasets differ."""
    data = settings.get("data", {})
    if data.get("kind") != "sft" or data.get("mock"):
        return None
    templates = set()
    for prefix in split_weights(data.get("prefixes", []))[1]:
        try:
            options = read_json(Path(f"{prefix}.json"))["options"]
            template, add_bos = options["chat_template"], options["add_bos"]
            source, variables = options.get("chat_template_source"), options.get("chat_template_kwargs", {})
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
        if template in CHAT_TEMPLATES or isinstance(source, str):
            templates.add(TrainedTemplate(template, bool(add_bos), source, json.dumps(variables, sort_keys=True)))
    if not templates:  # the datasets were deleted or moved
        variables = json.dumps(data.get("chat_template_kwargs", {}), sort_keys=True)
        templates = {TrainedTemplate(data.get("chat_template", "own"), variables=variables)}
    return templates.pop() if len(templates) == 1 else None


def write_trained_template(settings: Mapping[str, Any], folder: Path) -> int | None:
    """Replace the chat template of the tokenizer in ``folder`` by the run's named template or Jinja file, if any.

    Returns:
        The id that ends answers in the template of training. None for other runs and without a readable tokenizer.
    """
    trained, settings_file = trained_template(settings), folder / SETTINGS
    if trained is None or not settings_file.exists():
        return None
    try:
        content = read_json(settings_file)
        tokenizer = open_tokenizer(folder)
        template = trained.load(folder, tokenizer.added_tokens)
    except (UserError, OSError, ValueError):
        return None
    if trained.template != OWN:
        add_bos = tokenizer.adds_bos if trained.add_bos is None else trained.add_bos
        source = template.source if isinstance(template, Jinja) else template.jinja(tokenizer, add_bos)
        _rewrite(folder / "chat_template.jinja", source)
        (folder / "chat_template.json").unlink(missing_ok=True)
        # "legacy": transformers too begins each text after a control token with the space that sentencepiece prepends.
        is_llama = tokenizer.library == "sentencepiece" or "LlamaTokenizer" in str(content.get("tokenizer_class"))
        legacy = {"legacy": True} if is_llama and not isinstance(template, Jinja) else {}
        if content.pop("chat_template", None) is not None or legacy:
            _rewrite(settings_file, json.dumps(content | legacy, indent=2) + "\n")
    return end_of_answer(template, tokenizer)[0]


def end_of_answer(template: NamedTemplate | Jinja, tokenizer: Tokenizer) -> tuple[int | None, str]:
    """Return the id that ends an answer, None if no single token does, and the text between the answer and its end."""
    try:
        example = template.render_spans([Turn("user", "question"), Turn("assistant", "answer")])
    except RecordError:  # the template rejects the example: answers end with the tokenizer's end-of-text id
        return None, ""
    learned = [span for span in example if span.learn]
    if isinstance(template, Jinja):  # its text contains control tokens
        after = "".join(span.text for span in learned).partition("answer")[2].lstrip()
        names = [name for name in tokenizer.added_tokens if after.startswith(name)]
        return (tokenizer.control(max(names, key=len)) if names else None), ""
    between = ""
    for span in learned[1:]:
        ids = encode_spans([span], tokenizer)[0]
        if span.control and len(ids) == 1:
            return ids[0], between
        between += span.text
    return None, between


def add_stop_token(file: Path, end: int) -> None:
    """Add a stop id to a generation_config.json."""
    content = read_json(file)
    known = content.get("eos_token_id")
    ends = known if isinstance(known, list) else [] if known is None else [known]
    if end not in ends:
        _rewrite(file, json.dumps({**content, "eos_token_id": [*ends, end]}, indent=2) + "\n")


def _rewrite(file: Path, content: str) -> None:
    """Replace a file; not atomic, since the folder is not published yet."""
    file.unlink(missing_ok=True)
    write_synced(file, content.encode())
