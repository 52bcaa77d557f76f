"""Exactness: the ids are sentencepiece's own, whatever encodes; and no text ever becomes a control id."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from data_prep.lib.tokenizer_backends import FAST, Encode, EncoderMismatch, check_same, first_difference, load_encoder
from megatron_llama.system.errors import UserError
from megatron_llama.text.tokenizer import fast_encoder_obstacle, read_model
from tests.data_prep.helpers import SHARED, Run, assert_refused, outputs, reference, run_script, write_jsonl

V1, V3 = SHARED / "tokenizers/mistral_v1_32000.model", SHARED / "tokenizers/mistral_v3_32768.model"
ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz     \n",
    "0123456789.,-+eE ",
    "<s></s>[INST]<unk><0x0A>\u2581 ",
    "\u2581 \u00a0\t\n\r\u2028\u3000",
    "éèüñçß ŵŷ Ωλπ привет",
    "日本語中文한국어 \u200d\ufe0f",
    "🙂👨👩👧🇩🇪\u200d\U0001f3fd ",
    "\x00\x01\x7f\x85\ufeff\ufffd\ufffe\U0010ffff",
    "(){}[];:=!&|\\/\"'`~@#$%^*_ \t",
]


def fuzz(count: int, seed: int) -> list[str]:
    """Random strings of one alphabet or of all, short and long, with repeats."""
    rng = random.Random(seed)
    texts = []
    for number in range(count):
        letters = ALPHABETS[number % (len(ALPHABETS) + 1)] if number % (len(ALPHABETS) + 1) < len(ALPHABETS) else None
        pool = letters or "".join(ALPHABETS)
        text = "".join(rng.choices(pool, k=rng.choice([1, 2, 5, 20, 60, 200])))
        texts.append(text * rng.choice([1, 1, 1, 2, 9]))
    return texts


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("model", [V1, V3, None], ids=["32000", "32768 with user-defined pieces", "own"])
def test_fast_encoders_give_sentencepieces_ids(name: str, model: Path | None, tokenizer: Path) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    path = model or tokenizer
    if not path.exists():
        pytest.skip(f"{path.name} is missing (folder shared/ next to the repository)")
    encoder = load_encoder("sentencepiece", str(path), name)
    assert encoder.name == name and encoder.is_fast
    texts = fuzz(4000, seed=11)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    specials = [processor.id_to_piece(index) for index in range(min(800, processor.vocab_size()))]
    rng = random.Random(5)
    texts += ["".join(rng.choices([*specials, " ", "a", "\n"], k=rng.choice([1, 3, 8]))) for _ in range(1000)]
    assert first_difference(encoder.encode, processor.encode, texts) is None
    control = {index for index in range(processor.vocab_size()) if processor.is_control(index)}
    assert not control.intersection(id for text in texts for id in encoder.encode(text))


def encoder_with(
    monkeypatch: pytest.MonkeyPatch, encode: Callable[[str, Encode], list[int]] | None, model: Path, **more: Any
) -> Any:
    """Load an encoder while each fast encoder is ``encode(text, reference)``, or is not installed."""

    def load(model: object, reference: Encode) -> Encode:
        if encode is None:
            raise ImportError
        return lambda text: encode(text, reference)

    monkeypatch.setattr("data_prep.lib.tokenizer_backends._FAST_LOADERS", {name: load for name in FAST})
    return load_encoder("sentencepiece", str(model), **more)


def test_wrong_and_missing_fast_encoders(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that turns "</s>" into the control id, as several do, loses against sentencepiece, and is named."""
    encoder = encoder_with(monkeypatch, lambda text, encode: [2] if text == "</s>" else encode(text), tokenizer)
    assert encoder.name == "sentencepiece" and not encoder.is_fast
    assert "gigatoken returns other ids than sentencepiece, for example for '</s>'" in encoder.notes[0]
    with pytest.raises(UserError, match="other ids"):
        load_encoder("sentencepiece", str(tokenizer), "kitoken")
    for sample, is_fast in (("no stripes", True), ("a zebra", False)):  # the user's text is compared too
        encoder = encoder_with(
            monkeypatch, lambda text, encode: [] if "zebra" in text else encode(text), tokenizer, sample=[sample]
        )
        assert encoder.is_fast == is_fast
    encoder = encoder_with(monkeypatch, None, tokenizer)
    assert encoder.name == "sentencepiece" and "pip install gigatoken" in encoder.notes[0]


def test_a_wrong_fast_encoder_is_noticed_during_a_run(tokenizer: Path) -> None:
    encoder = load_encoder("sentencepiece", str(tokenizer))
    good = np.array(encoder.reference("hello"))
    check_same(encoder, "hello", good)
    for wrong in (good[:-1], good + 1):
        with pytest.raises(EncoderMismatch, match="--encoder sentencepiece"):
            check_same(encoder, "hello", wrong)


def test_control_texts_stay_text(tmp_path: Path, preprocess: Run, tokenizer: Path) -> None:
    texts = ["</s>", "<s>a</s>", "<unk>", "x</s>", "</s>" * 50]
    for encoder in ("auto", "sentencepiece"):
        args = ("--input", write_jsonl(tmp_path / "a.jsonl", texts), "--output-prefix", tmp_path / encoder)
        assert preprocess(*args, "--encoder", encoder).returncode == 0
        binary, index = outputs(tmp_path / encoder)
        assert (binary, index) == reference(tokenizer, texts)
        ids = np.frombuffer(binary, "<u2")
        assert (ids == 2).sum() == len(texts) and not (ids == 1).any() and not (ids == 0).any()


def test_wrong_tokenizers_are_refused(tmp_path: Path, preprocess: Run, tokenizer: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "noise.model").write_bytes(b"\x0a\xff\xffnoise" * 50)
    (tmp_path / "empty.model").write_bytes(b"")
    (tmp_path / "cut.model").write_bytes(tokenizer.read_bytes()[:3000])
    (tmp_path / "twice.model").write_bytes(b"\x0a\x0b\x0a\x02a\xbc\x15\x00\x00\x00\x00\x18\x01" * 2)  # not UTF-8
    for model, words in [
        (tmp_path / "none.model", ["cannot be read"]),
        (tmp_path / "noise.model", ["not a sentencepiece model, or it is damaged"]),
        (tmp_path / "empty.model", ["not a sentencepiece model"]),
        (tmp_path / "cut.model", ["not a sentencepiece model"]),
        (tmp_path / "twice.model", ["not a sentencepiece model"]),
        (source, ["not a sentencepiece model"]),
    ]:
        done = preprocess("--input", source, "--output-prefix", tmp_path / "out/x", "--tokenizer-model", model)
        assert_refused(done, *words)
    assert not (tmp_path / "out").exists()


def test_hugging_face_folder_never_makes_control_ids(tmp_path: Path) -> None:
    """The flags as NeMo's users write them: --tokenizer-library huggingface --tokenizer-type FOLDER."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<s>": 0, "</s>": 1, "<": 2, "/": 3, "s": 4, ">": 5, "a": 6, "\u0120": 7}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    source = write_jsonl(tmp_path / "a.jsonl", ["a</s> s", ""])
    done = run_script(
        *("preprocess.py", "--input", source, "--json-keys", "text", "--tokenizer-library", "huggingface"),
        *("--tokenizer-type", tmp_path, "--dataset-impl", "mmap", "--append-eod", "--need-pad-id", "--workers", 2),
        *("--output-prefix", tmp_path / "x"),
    )
    assert done.returncode == 0, done.stderr
    assert np.frombuffer(outputs(tmp_path / "x")[0], "<u2").tolist() == [6, 2, 3, 4, 5, 7, 4, 1]


def test_tiktoken_model_of_llama_3(tmp_path: Path) -> None:
    """All bytes and a few merges, in the published file's form; control texts stay text; ids need four bytes only
    where the vocabulary does."""
    pytest.importorskip("tiktoken")
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the"]
    model = tmp_path / "tokenizer.model"
    model.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    source = write_jsonl(tmp_path / "a.jsonl", ["the the", "<|end_of_text|>"])
    args = ("--input", source, "--output-prefix", tmp_path / "x", "--tokenizer-type", "TikTokenizer", "--append-eod")
    done = run_script("preprocess.py", *args, "--tokenizer-model", model, "--workers", 1)
    assert done.returncode == 0, done.stderr
    ids = np.frombuffer(outputs(tmp_path / "x")[0], "<u2").tolist()
    assert ids[:3] == [257, 258, 260]
    assert ids[3:-1] == list(b"<|end_of_text|>") and ids[-1] == 260


def test_model_file_is_read_as_sentencepiece_reads_it(tokenizer: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    model = read_model(tokenizer)
    assert [one.piece for one in model.pieces] == [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    assert [one.score for one in model.pieces] == [processor.get_score(i) for i in range(processor.vocab_size())]
    assert fast_encoder_obstacle(model) is None and model.normalizer_spec.add_dummy_prefix


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_redpajama_mini_is_identical_in_every_subset(tmp_path: Path) -> None:
    """A slice of each subset's real text; python -m benchmarks.verify.data does all 58.8 MB."""
    folder = SHARED / "redpajama_mini"
    if not folder.exists():
        pytest.skip("the folder shared/ next to the repository is missing")
    from data_prep.lib.find_inputs import find_sources
    from data_prep.lib.input_readers import read_lines

    for source in find_sources([str(folder)]).sources:
        texts: list[str] = []
        for line in read_lines(source):
            texts.append(json.loads(line)["text"])
            if sum(map(len, texts)) > 200_000:
                break
        path = write_jsonl(tmp_path / "a.jsonl", texts)
        done = run_script(
            *("preprocess.py", "--input", path, "--tokenizer-model", V1, "--append-eod", "--overwrite"),
            *("--output-prefix", tmp_path / "x", "--workers", 1),
        )
        assert done.returncode == 0, done.stderr
        assert outputs(tmp_path / "x") == reference(V1, texts), source.path
