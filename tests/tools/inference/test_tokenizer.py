"""Tokenizers and incremental decoding."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor

from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.hf_folder import SafetensorsFiles
from megatron_llama.config import ConfigError, ModelConfig
from megatron_llama.text.tokenizer import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    TokenizerError,
    open_tokenizer,
)
from megatron_llama.tools.inference.chat import Decoder, Printer
from megatron_llama.tools.inference.sampling import StopTexts
from megatron_llama.tools.inference.saved_model import SavedModel, open_saved_model, stop_ids, tokenizer_of
from tests.checkpoint.runner import run_job
from tests.data.files import train_tokenizer
from tests.messages import raises_with_message
from tests.tools.inference.models import train_sentencepiece, write_tokenizer

HARD = "the cat é ü 😀😀 sat\n\n  on日本 the mat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, template=True)
    return path


@pytest.fixture(scope="module")
def spm_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("pieces") / "tokenizer")


def source(tokenizer: Path | None, vocab_size: int = 400, **token_ids: object) -> SavedModel:
    return SavedModel(
        Path(), ModelConfig(vocab_size=vocab_size), SafetensorsFiles(Path(), {}), tokenizer, token_ids, {}, 16
    )


@pytest.fixture(params=["huggingface", "sentencepiece"])
def text(request: pytest.FixtureRequest, folder: Path, spm_file: Path) -> Tokenizer:
    return HuggingFaceTokenizer(folder) if request.param == "huggingface" else SentencePieceTokenizer(spm_file)


def test_ids_of_a_padded_vocabulary_are_missing(text: Tokenizer) -> None:
    assert text.missing_ids(text.size + 3) == [text.size, text.size + 1, text.size + 2]
    assert text.missing_ids(text.size) == []


def test_a_folder_with_only_a_sentencepiece_model(tmp_path: Path, spm_file: Path) -> None:
    """Names of control tokens in a chat template's text become control ids, as in LlamaTokenizer (legacy=False)."""
    (tmp_path / "tokenizer.model").write_bytes(spm_file.read_bytes())
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.path == tmp_path and tokenizer.adds_bos and {"<s>", "</s>"} <= {*tokenizer.control_tokens}
    text = "<s>the cat</s><s>a dog</s>on"
    spans = tokenizer.spans(text, True)
    parts = [text[start:end] for start, end in zip(spans.starts, spans.ends, strict=True)]
    controls = [number for number, part in zip(spans.ids, parts, strict=True) if part.startswith("<")]
    assert controls == [tokenizer.bos, tokenizer.end, tokenizer.bos, tokenizer.end]
    assert "".join(parts) == text
    first = spans.starts.index(len("<s>the cat</s><s>"))
    assert SentencePieceProcessor(model_file=str(spm_file)).id_to_piece(spans.ids[first]) == "a"
    assert {tokenizer.bos, tokenizer.end}.isdisjoint(tokenizer.spans(text, False).ids)


def test_gaps_in_a_vocabulary_are_missing(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 2}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
    assert HuggingFaceTokenizer(tmp_path).missing_ids(5) == [1, 3, 4]


def test_pieces_add_up_to_the_text(text: Tokenizer) -> None:
    ids = text.encode(HARD)
    whole = text.decode(ids)
    for prompt in (0, 1, 5, len(ids) - 1):
        decoder = Decoder(text, ids[:prompt])
        shown = [decoder.add(number) for number in ids[prompt:]]
        assert text.decode(ids[:prompt]) + "".join(shown) + decoder.add(None) == whole or "\ufffd" in text.decode(
            ids[:prompt]
        )
        assert not any("\ufffd" in text_part for text_part in shown), "half a character was shown"


def test_a_batch_is_shown_row_by_row(folder: Path) -> None:
    text, out = HuggingFaceTokenizer(folder), io.StringIO()
    rows = [text.encode(" sat on the mat"), text.encode(" dog")]
    printer = Printer(out, StopTexts(text, []), ["cat", "a"], [text.encode("cat"), text.encode("a")])
    for position in range(max(map(len, rows))):
        for row, ids in enumerate(rows):
            if position < len(ids):
                printer(row, ids[position])
                assert out.getvalue() == "cat" + text.decode(rows[0][: position + 1]) or row == 1
            if position + 1 == len(ids):
                printer(row, None)
    assert out.getvalue() == "cat sat on the mat\n\na dog\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_model_does_not_command_the_terminal(terminal: bool, spm_file: Path) -> None:
    text, out = SentencePieceTokenizer(spm_file), io.StringIO()
    out.isatty = lambda: terminal  # type: ignore[method-assign]
    printer = Printer(out, StopTexts(text, []), ["\x1b[31mred\a\n\té"], [[]])
    printer(0, None)
    assert out.getvalue() == (r"\x1b[31mred\x07" if terminal else "\x1b[31mred\a") + "\n\té\n"


def test_which_tokenizer(folder: Path, spm_file: Path, tmp_path: Path) -> None:
    assert isinstance(tokenizer_of(source(folder)), HuggingFaceTokenizer)
    assert isinstance(tokenizer_of(source(folder), spm_file), SentencePieceTokenizer)
    (tmp_path / "tokenizer.model").write_bytes(spm_file.read_bytes())
    plain, bos = SentencePieceTokenizer(spm_file).encode("cat"), SentencePieceTokenizer(spm_file).bos
    assert tokenizer_of(source(tmp_path)).encode("cat") == [bos, *plain]  # Llama 2's own
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert tokenizer_of(source(tmp_path)).encode("cat") == plain  # ours
    with pytest.raises(ConfigError, match=r"is\s+unknown.*|--tokenizer"):
        tokenizer_of(source(None))
    with pytest.raises(ConfigError, match=r"290\s+ids"):
        tokenizer_of(source(folder, vocab_size=100))
    with pytest.raises(ConfigError, match=r"does\s+not\s+exist"):
        tokenizer_of(source(None), tmp_path / "nothing.model")


@pytest.mark.parametrize(
    ("settings", "named_by_file", "named_by_folder"),
    [(None, False, True), ("{}", True, True), ('{"add_bos_token": false}', False, False)],
)
def test_bos_has_one_rule(
    spm_file: Path, tmp_path: Path, settings: str | None, named_by_file: bool, named_by_folder: bool
) -> None:
    """Preparation, generation and export all see it alike."""
    file = tmp_path / "tokenizer.model"
    file.write_bytes(spm_file.read_bytes())
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(settings)
    assert open_tokenizer(file).adds_bos == named_by_file
    assert open_tokenizer(tmp_path).adds_bos == named_by_folder
    assert (
        len(open_tokenizer(file).encode("cat")) > len(SentencePieceTokenizer(spm_file).encode("cat"))
    ) == named_by_file


def test_damaged_settings_are_refused(spm_file: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(spm_file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": ')
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json|can't\s+be\s+read"):
        tokenizer_of(source(tmp_path))


def test_a_text_that_the_library_cannot_encode_is_refused(tmp_path: Path) -> None:
    """BPE whose unk_token is not in its vocabulary: the file opens, and fails at the first unknown character."""
    model = {"type": "BPE", "unk_token": "", "vocab": {"x": 0}, "merges": []}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    text = open_tokenizer(file)
    for encode in (text.encode, text.encode_text, lambda words: text.spans(words, True)):
        with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot encode a text: Unk token"):
            encode("xy")


def test_what_ends_an_answer(folder: Path) -> None:
    text = HuggingFaceTokenizer(folder)
    assert stop_ids(source(folder), text) == {0}
    assert stop_ids(source(folder, eos_token_id=5), text) == {0, 5}
    assert stop_ids(source(folder, eos_token_id=[5, None, 6]), text) == {0, 5, 6}
    with raises_with_message(ConfigError, r"eos_token_id = 5\.5 rule must be a token id or a list of ids"):
        stop_ids(source(folder, eos_token_id=5.5), text)


# --- relative paths --------------------------------------------------------------------------------------------------


def test_the_tokenizer_is_found_from_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the project was moved: then below a parent of the checkpoint."""
    (tmp_path / "project").mkdir()
    content = train_tokenizer(tmp_path / "project/tokenizer.model").read_bytes()
    monkeypatch.chdir(tmp_path / "project")
    for folder in ("runs/inside", "../elsewhere/outside"):
        run_job(Path(folder), "data.tokenizer=tokenizer.model", "model.vocab_size=512", "trainer.steps=1")
    monkeypatch.chdir("/")
    inside, outside = tmp_path / "project/runs/inside", tmp_path / "elsewhere/outside"
    assert [open_saved_model(run).tokenizer for run in (inside, outside)] == [tmp_path / "project/tokenizer.model"] * 2
    export(find_checkpoint(outside), tmp_path / "exported")
    assert (tmp_path / "exported/tokenizer.model").read_bytes() == content
    (tmp_path / "project").rename(tmp_path / "moved")
    assert open_saved_model(tmp_path / "moved/runs/inside").tokenizer == tmp_path / "moved/tokenizer.model"
    assert open_saved_model(outside).tokenizer is None
