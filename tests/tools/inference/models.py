"""A tiny Llama of transformers' with random weights and a tokenizer, and commands that a user starts with it."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_llama.plan import Plan
from megatron_llama.tools.inference import evaluate_cli, generate_cli
from megatron_llama.tools.inference.arguments import inference_plan
from megatron_llama.tools.inference.generator import Generator, open_generator
from megatron_llama.tools.inference.saved_model import SavedModel, open_saved_model
from tests.golden import GoldenFiles
from tests.processes import run_forked
from tests.ranks import run_ranks

TEXTS = ["the cat sat on the mat", "a dog and a cat", "é ü 😀", "system user assistant answer question Hello"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROPE_SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_theta": 10000.0, **ROPE_SCALING},
    "initializer_range": 0.3,  # so that the likeliest ids differ from position to position
    "tie_word_embeddings": False,
}


def make_folder(folder: Path, template: bool = True, **shape: Any) -> Path:
    """Write the folder; returns it."""
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama
    import transformers.models.mistral.modeling_mistral  # noqa: F401  seconds, once in place of in each fork

    size = write_tokenizer(folder, template)
    run_ranks(_save, 1, folder, {**SHAPE, "vocab_size": size, **shape})
    return folder


def write_tokenizer(folder: Path, template: bool) -> int:
    """A byte-level tokenizer; returns the number of its ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    if template:
        settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()


def train_sentencepiece(path: Path, **options: Any) -> Path:
    """Write a sentencepiece model of 290 pieces with bytes; return its path."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "a dog and a cat on the mat"] * 5), model_prefix=str(path),
        vocab_size=290, byte_fallback=True, model_type="bpe", hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    return path.with_suffix(".model")


def _save(rank: int, folder: Path, shape: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    kind = {"model_type": "mistral" if "sliding_window" in shape else "llama", **shape}
    llama = AutoModelForCausalLM.from_config(AutoConfig.for_model(**kind, bos_token_id=None, eos_token_id=0))
    for name, parameter in llama.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith(".bias"):
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
    llama.save_pretrained(folder)


PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [200], [17, 250, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42], [90, 91, 92]]
NOTHING: frozenset[int] = frozenset()


def with_generator(
    work: Callable[[Generator], Any],
    folder: Path,
    tp: int = 1,
    stop: frozenset[int] = NOTHING,
    missing: Sequence[int] = (),
    cp: int = 1,
) -> Any:
    """Return the result of ``work`` on each rank."""
    source = open_saved_model(folder)
    return run_ranks(in_generator, tp * cp, work, source, inference_plan(source.model, tp, "cpu", cp=cp), stop, missing)


def in_generator(
    rank: int,
    work: Callable[[Generator], Any],
    source: SavedModel,
    plan: Plan,
    stop: frozenset[int],
    missing: Sequence[int] = (),
) -> Any:
    os.environ["LOCAL_WORLD_SIZE"] = "64"  # one thread: more are slower while other tests run
    with open_generator(source, plan, stop, missing) as made:
        return work(made)


# Inference commands as a user starts them, in a forked process.
Main = Callable[[Sequence[str]], int]
CPU = ("--device", "cpu")


class Ended(NamedTuple):
    status: int
    out: str
    err: str


def command(main: Main, *arguments: object, stdin: str = "", timeout: float = 150, reader: bool = True) -> Ended:
    """Run ``main`` with arguments and stdin (``surrogateescape`` for other bytes).

    Without ``reader`` its stdout is a pipe whose read end is closed.
    """

    import megatron_llama.tools.inference.chat  # noqa: F401  both before the fork

    with tempfile.TemporaryDirectory() as folder:
        given, out, err = (Path(folder, name) for name in ("stdin", "stdout", "stderr"))
        given.write_text(stdin, errors="surrogateescape")

        def program() -> None:
            os.dup2(os.open(given, os.O_RDONLY), 0)
            if not reader:
                read_end, pipe = os.pipe()
                os.close(read_end)
                os.dup2(pipe, 1)
            sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
            sys.stderr = open(2, "w", buffering=1, closefd=False)
            torch.set_num_threads(1)
            sys.exit(main([str(argument) for argument in arguments]))

        return Ended(run_forked(program, out, err, timeout), out.read_text(), err.read_text())


generate, evaluate = generate_cli.main, evaluate_cli.main


def check_refusals(
    name: str,
    main: Main,
    rows: Sequence[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Check the status 2 of command lines in ``folder``, and their messages with a golden file."""
    monkeypatch.chdir(folder)
    page = ""
    for row in rows:
        assert main([*CPU, *shlex.split(row)]) == 2, row
        page += f"$ {ascii(row)[1:-1][:79]}\n{capsys.readouterr().err}\n"
    assert "Traceback" not in page
    GoldenFiles.check(f"tools/inference/refused_{name}.txt", page, {r"found:\s+/\S+/": "found: FOLDER/"})
