"""Turns of a conversation, and the reasons for which a record of a fine-tuning dataset is invalid.

data_prep/lib/records.py reads records. Lines of labeled tables become questions here.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Reasons for counting invalid records, in addition to data_prep.lib.json_lines.REASONS.
REASONS = {
    "unknown_format": "the record's keys match no known format",
    "bad_messages": "the turns are not a list of turns",
    "ambiguous_record": "the record has two formats, such as messages and prompt/completion",
    "unknown_role": "a turn's role is not system, user or assistant",
    "bad_weight": "a turn's weight is not 0 or 1",
    "content_not_text": "a turn's content is not text (an image, a number, null)",
    "empty_content": "a turn's content is empty or white space",
    "tools_not_supported": "the record has tools or tool calls, which are not supported",
    "equal_answers": "the chosen answer equals the rejected one",
    "rejected_answer": "the record marks its answer as bad (TRL's KTO: label is false)",
    "broken_record": "reading the record failed unexpectedly",
    "no_assistant_turn": "the record has no answer to learn",
    "bad_columns": "the line and the header have different numbers of columns",
    "unknown_label": "the template has no such label",
    "control_token": "a turn's text contains a control token of the tokenizer",
    "template_refuses": "the chat template rejects the conversation",
    "template_omits": "the chat template omits the text of a turn",
    "too_long": "the example has more tokens than a sequence",
    "answer_cut_off": "the truncated example has no token of the answer",
}


@dataclass(frozen=True)
class Template:
    """Prompt template for a record or a line of a table."""

    prompt: str
    """Text with the record's fields in braces."""
    answer: str
    """Field with the correct answer."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """For labeled datasets: text of the answer for each value of the answer's field."""

    @property
    def fields(self) -> list[str]:
        """Required fields of a record, the answer last. Raises ValueError if the braces cannot be parsed."""
        return [name for _, name, _, _ in string.Formatter().parse(self.prompt) if name] + [self.answer]


LABELLED: Mapping[str, Template] = {
    "qnli": Template(
        "Question: {question}\nSentence: {sentence}\n"
        "Does the sentence contain the answer to the question? Answer yes or no.",
        "label",
        {"entailment": "yes", "not_entailment": "no"},
    ),
    "sst2": Template(
        "Review: {sentence}\nIs the review positive or negative?", "label", {"1": "positive", "0": "negative"}
    ),
}


@dataclass(frozen=True)
class Turn:
    """A message of a conversation."""

    role: str
    """system, user or assistant"""
    text: str
    learn: bool = True
    """Whether an assistant's message has loss (not with OpenAI's weight 0)."""


Turns = list[Turn]


class RecordError(Exception):
    """Invalid line or record; ``reason`` is a key of REASONS, here or in json_lines."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def labelled_turns(columns: Sequence[str], values: Sequence[str], template: Template) -> Turns:
    """Return the conversation of a line of a labeled table. Raises RecordError."""
    if len(columns) != len(values):
        raise RecordError("bad_columns", f"{len(values)} columns; the header has {len(columns)}")
    row = dict(zip(columns, values, strict=True))
    label = row[template.answer]
    if label not in template.labels:
        raise RecordError("unknown_label", f"{label[:60]!r} is not one of {', '.join(template.labels)}")
    empty = [name for name in template.fields if not row[name].strip()]
    if empty:
        raise RecordError("empty_content", f"column {empty[0]} is empty")
    return [Turn("user", template.prompt.format_map(row)), Turn("assistant", template.labels[label])]
