"""The command that each program of data_prep prints at its end can be typed as it is."""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from data_prep import redpajama
from data_prep.lib import next_command
from megatron_llama.config import load_config
from megatron_llama.data.checks import check_data
from megatron_llama.plan import resolve
from tests.data_prep.helpers import GOOD, some_texts, write_jsonl
from tests.golden import GoldenFiles
from tests.paths import CONF
from tests.tools.inference.models import make_folder

TEXT = "--input 'my text' --tokenizer-model 'my sets/a,b/tokenizer.model' --append-eod --output-prefix"
TEXT += " 'my sets/a,b/a,b'"
KEYS = "--json-keys title body --tokenizer-model hf"
CHAT = "sft.py --input chat.jsonl --chat-template plain --tokenizer-model"
PART = "preprocess.py --input a.jsonl --tokenizer-model tok.model --output-prefix parts --part"
RED = "redpajama.py prepare --input rp --tokenizer-model tok.model --output out --conf"
LINES = [
    "train_tokenizer.py --input 'my text' --vocab-size 320 --model-prefix 'my sets/a,b/tokenizer'",
    *[f"preprocess.py {TEXT} --workers 1"] * 2,  # the second time the dataset is complete
    f"preprocess.py --input keys.jsonl {KEYS} --output-prefix x --workers 1",
    f"preprocess.py --input empty.jsonl {KEYS} --output-prefix y --workers 1 --allow-empty",  # nothing to train on
    *(f"{PART} {part}/2 --workers 1" for part in (1, 2)),
    # The run begins with the model of the tokenizer, if the tokenizer is in the folder of one.
    f"{CHAT} 'my model' --seq-length 64 --output-prefix sets/chat --workers 1",
    f"{CHAT} 'my model' --seq-length 64 --output-prefix sets/two --split 30,10 --workers 1",
    f"{CHAT} tok.model --seq-length 4096 --output-prefix chat --workers 1",
    *(f"{RED} {conf} --workers 1" for conf in ("conf/data/mine.yaml", "elsewhere/mine.yaml")),
    "redpajama.py download --url-list urls --base-url http://localhost/ --output 'data/my rp'",
]


def commands_of(output: str) -> list[list[str]]:
    """The words of the printed commands. Each line fits the screen or is one word."""
    commands: list[str] = []
    for line in output.splitlines():
        if line in ("next:", "then:"):
            commands.append("")
        elif commands:
            assert len(line) <= 79 or len(shlex.split(line.removesuffix("\\"))) == 1
            commands[-1] += line + "\n"
    return [shlex.split(command.replace("\\\n", " ")) for command in commands]


@pytest.fixture
def files(tmp_path: Path, tokenizer: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with the files that the lines name. Some names need quotes."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(tokenizer, "tok.model")
    shutil.copytree(folder, "hf")
    make_folder(tmp_path / "my model")
    write_jsonl(Path("my text/it's.jsonl"), some_texts(200))
    write_jsonl(Path("a.jsonl"), some_texts(100))
    for name in ("arxiv", "wikipedia"):
        write_jsonl(Path("rp", name, "a.jsonl"), some_texts(200))
    Path("keys.jsonl").write_text('{"title": "A title", "body": "A body of text"}\n' * 100)
    Path("empty.jsonl").write_text("")
    Path("chat.jsonl").write_text("\n".join(GOOD) + "\n")
    Path("urls").write_text("http://localhost/v2/documents/a.jsonl\n")
    monkeypatch.setattr(redpajama, "fetch_all", lambda *arguments: None)


@pytest.mark.usefixtures("files")
def test_each_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """train.py can start its commands, and the other programs parse theirs."""
    page = ""
    for line in LINES:
        name, *words = shlex.split(line)
        program = importlib.import_module(f"data_prep.{name.removesuffix('.py')}")
        monkeypatch.setattr(sys, "argv", [name, *words])
        assert (program.main(words) if name in ("preprocess.py", "sft.py") else program.main()) == 0, line
        output = capsys.readouterr().out
        page += f"$ {line}\n{''.join(output.partition('next:')[1:]).strip()}\n\n"
        for command in commands_of(output):
            if command[1] == "train.py":
                assert command[0] == "python"
                config = resolve(load_config([*command[2:], "device=cpu"], CONF), 1).config
                assert check_data(config) == [] and config.data.prefixes
                page += f"validates on {config.data.validation_prefixes}\n\n" * bool(config.data.validation_prefixes)
                if name == "redpajama.py":
                    paths = [str(tmp_path / f"out/{each}_text_document") for each in ("wikipedia", "arxiv")]
                    assert config.data.prefixes[1::2] == paths and config.data.split == "980,10,10"
                    assert config.data.prefixes[0] == pytest.approx(4.5 / 7, abs=1e-6)
                    assert config.model.vocab_size == 600
            elif command[1] == "data_prep/redpajama.py":
                assert redpajama.parser().parse_args(command[2:]).input == "data/my rp"
    GoldenFiles.check("data_prep/next_commands.txt", page.replace(str(tmp_path), "FOLDER"))


def test_the_form_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has the interpreter and the folder of the running program; the console script has commands."""
    monkeypatch.setattr(sys, "argv", ["../tree/data_prep/sft.py"])
    monkeypatch.setattr(sys, "orig_argv", [".venv/bin/python", *sys.argv])
    assert next_command.next_command("train.py", ["a=b c"]) == "next:\n  .venv/bin/python ../tree/train.py 'a=b c'"
    monkeypatch.setattr(sys, "argv", ["data_prep/sft.py"])
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *sys.argv])
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    name = os.path.basename(sys.executable)
    assert next_command.next_command("data_prep/sft.py", []) == f"next:\n  {name} data_prep/sft.py"
    monkeypatch.setattr(sys, "argv", ["megatron-llama sft"])
    assert next_command.next_command("train.py", ["x"]) == "next:\n  megatron-llama train x"
    expected = ["next:", "megatron-llama", "train-tokenizer", "--input"]
    assert next_command.next_command("data_prep/train_tokenizer.py", ["--input"]).split() == expected
