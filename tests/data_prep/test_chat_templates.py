"""Each chat template to its text, masks exact at their borders."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.lib.chat_templates import NAMED, Jinja, Piece, own_template
from data_prep.lib.chat_tokenizer import ChatTokenizer, HuggingFace, SentencePiece, encode_pieces
from data_prep.lib.conversations import Bad, Turn
from tests.data_prep.conftest import CHATML, SPECIAL

INST = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
COLON = (
    "{%- for message in messages -%}\n"
    "    {%- if message.role == 'assistant' %}A: {{ message.content }}{{ eos_token }}\n"
    "    {%- else %}Q: {{ message.content }}\n{% endif %}\n{%- endfor -%}{%- if add_generation_prompt %}A: {% endif %}"
)
TEMPLATES = {"chatml": CHATML, "inst": INST, "colon": COLON}
TALK = [
    Turn("user", "How are you?"),
    Turn("assistant", "Fine."),
    Turn("user", "Sure?"),
    Turn("assistant", " Yes, é🤯!"),
]

GOLDEN = {
    "prompter": "<|system|> S <|endoftext|> <|prompter|> Q <|endoftext|> <|assistant|>« A <|endoftext|>» ",
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n«A<|im_end|>»\n",
    "dialogue": "S\n\n\n\nHuman: Q\n\nAssistant:« A<|endoftext|>»",
    "plain": "S\n\nQ\n«A<|endoftext|>»",
}


def shown(pieces: list[Piece]) -> str:
    """The text, with what is to be learned in «»."""
    return "".join(f"«{piece.text}»" if piece.learn else piece.text for piece in pieces).replace("»«", "")


@pytest.mark.parametrize("name", sorted(NAMED))
def test_named_templates(name: str) -> None:
    turns = [Turn("system", "S"), Turn("user", "Q"), Turn("assistant", "A")]
    assert shown(NAMED[name].pieces(turns)) == GOLDEN[name]
    unlearned = NAMED[name].pieces([*turns[:2], Turn("assistant", "A", learn=False)])
    assert not any(piece.learn for piece in unlearned)


OWN = {
    "chatml": "<|im_start|>system\nBe kind.<|im_end|>\n"
    "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    "«Fine.<|im_end|>»\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n« Yes, é🤯!<|im_end|>»\n",
    "inst": "<|im_start|>[INST] How are you? [/INST]« Fine.<|im_end|>»[INST] Sure? [/INST]«  Yes, é🤯!<|im_end|>»",
    "colon": "Q: How are you?\nA: «Fine.<|im_end|>»Q: Sure?\nA: « Yes, é🤯!<|im_end|>»",
}


@pytest.mark.parametrize("name", sorted(OWN))
def test_own_templates(name: str) -> None:
    template = Jinja(TEMPLATES[name], SPECIAL, ["<|im_start|>", "<|im_end|>"], "test")
    assert shown(template.pieces(TALK)) == OWN[name]


def test_jinja_renders_as_transformers_does(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    for source in TEMPLATES.values():
        ours = Jinja(source, SPECIAL, [], "test")
        for turns, ask in ((TALK, False), (TALK[:1], True), (TALK[:2], False), (TALK[:3], True)):
            messages = [{"role": turn.role, "content": turn.text} for turn in turns]
            expected = theirs.apply_chat_template(
                messages, chat_template=source, tokenize=False, add_generation_prompt=ask
            )
            assert ours.render(turns, ask) == expected
    tokenizer = HuggingFace(str(folder), in_text=True)
    found, _ = encode_pieces(own_template(folder, tokenizer.control_tokens).pieces(TALK), tokenizer)
    messages = [{"role": turn.role, "content": turn.text} for turn in TALK]
    assert found == theirs.apply_chat_template(messages, tokenize=True, return_dict=False)


def test_a_template_is_rendered_in_a_sandbox() -> None:
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}"):
        with pytest.raises(Bad) as caught:
            Jinja(source, {}, [], "test").pieces(TALK)
        assert caught.value.line.reason == "template_refuses"


def learned(pieces: list[Piece], tokenizer: ChatTokenizer) -> str:
    """The tokens' text, with those that are to be learned in «»."""
    ids, marks = encode_pieces(pieces, tokenizer)
    parts, start = [], 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or marks[place] != marks[start]:
            text = tokenizer.encoder.decode(ids[start:place])
            parts.append(f"«{text}»" if marks[start] else text)
            start = place
    return "".join(parts)


@pytest.mark.parametrize("name", sorted(OWN))
def test_masks_of_own_templates(name: str, folder: Path) -> None:
    tokenizer = HuggingFace(str(folder), in_text=True)
    template = Jinja(TEMPLATES[name], SPECIAL, tokenizer.control_tokens, "test")
    assert learned(template.pieces(TALK), tokenizer) == OWN[name]


def test_a_token_that_would_cross_a_border_is_cut(folder: Path, tokenizer: Path) -> None:
    """`answer:` ends in a space, and ` yes` is one token: the model is asked with the space, so it never says it."""
    pieces = [Piece("answer: ", False), Piece("yes", True), Piece("\n", False), Piece("\nno", True)]
    bpe = HuggingFace(str(folder), in_text=True)
    whole = bpe.spans("answer: yes\n\nno")
    assert any(start < 8 < end for start, end in zip(whole.starts, whole.ends, strict=True)), "no token crosses here"
    for encoder in (bpe, SentencePiece(str(tokenizer))):
        ids, marks = encode_pieces(pieces, encoder)
        for wanted, text in ((False, "answer: \n"), (True, "yes\nno")):
            parts = [number for number, mark in zip(ids, marks, strict=True) if mark is wanted]
            assert encoder.encoder.decode(parts).replace(" ", "") == text.replace(" ", "")
        assert "answer: yes" in encoder.encoder.decode(ids), "a space was put in, or lost"


def test_named_templates_on_sentencepiece(tokenizer: Path) -> None:
    encoder = SentencePiece(str(tokenizer))
    ids, marks = encode_pieces(NAMED["prompter"].pieces(TALK[:2]), encoder)
    assert ids[-2 if encoder.encoder.decode([ids[-1]]).strip() == "" else -1] == encoder.encoder.eod
    answer = [number for number, mark in zip(ids, marks, strict=True) if mark]
    assert answer[-1] == encoder.encoder.eod and encoder.encoder.decode(answer[:-1]).strip() == "Fine."
