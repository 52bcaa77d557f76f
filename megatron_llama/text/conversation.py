"""A conversation's turns, and the reasons why a record of a fine-tuning set gives none.

Records are read in data_prep/lib/records.py; the lines of labelled tables become questions here.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# What a bad record is counted under, beside data_prep.lib.json_lines.REASONS.
REASONS = {
    "unknown_format": "the record has none of the keys that the formats have",
    "bad_messages": "the list of turns is no list of turns",
    "unknown_role": "a turn's role is none of system, user, assistant",
    "content_not_text": "a turn's content is no text (an image, a number, null)",
    "empty_content": "a turn's content is empty, or only white space",
    "tools_not_supported": "the record offers tools or calls them, and templates here render none",
    "rejected_answer": "the record says that its answer is a bad one (TRL's KTO: label is false)",
    "broken_record": "reading the record failed in a way that was not foreseen",
    "no_assistant_turn": "there is no answer to learn",
    "bad_columns": "the line has not as many columns as the header",
    "unknown_label": "the label is not one of the template's",
    "control_token": "a turn's text holds one of the tokenizer's control tokens",
    "template_refuses": "the chat template does not take the conversation",
    "too_long": "the example has more tokens than a sequence",
    "answer_cut_off": "nothing of the answer is left of an example that was cut",
}


@dataclass(frozen=True)
class Template:
    """From a record, or a line of a table, to its prompt and its right answer."""

    prompt: str
    """With the record's fields in braces."""
    answer: str
    """The field of the right answer."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """For labelled sets: the text of the answer for each value of the answer's field."""

    @property
    def fields(self) -> list[str]:
        """The fields that a record must have, the answer's last. Raises ValueError where the braces can't be parsed."""
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
    """A message."""

    role: str
    """system, user or assistant"""
    text: str
    learn: bool = True
    """of the assistant's: whether it is learned (not with OpenAI's weight 0)"""


Turns = list[Turn]


class RecordError(Exception):
    """A line or a record that can't be used; ``reason`` is a key of REASONS, here or in json_lines."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def labelled_turns(columns: Sequence[str], values: Sequence[str], template: Template) -> Turns:
    """The conversation of a line of a labelled table; raises Bad."""
    if len(columns) != len(values):
        raise RecordError("bad_columns", f"{len(values)} columns where the header has {len(columns)}")
    row = dict(zip(columns, values, strict=True))
    label = row[template.answer]
    if label not in template.labels:
        raise RecordError("unknown_label", f"{label[:60]!r} is none of {', '.join(template.labels)}")
    empty = [name for name in template.fields if not row[name].strip()]
    if empty:
        raise RecordError("empty_content", f"column {empty[0]} is empty")
    return [Turn("user", template.prompt.format_map(row)), Turn("assistant", template.labels[label])]
