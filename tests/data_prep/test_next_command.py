"""The command that each program of data_prep prints at its end can be typed as it is."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import data_prep.preprocess
import data_prep.redpajama
import data_prep.sft
import data_prep.train_tokenizer
from data_prep.lib import next_command
from megatron_llama.config import Config, load_config
from megatron_llama.data.checks import check_data
from megatron_llama.plan import resolve
from tests.data_prep.helpers import GOOD, some_texts, write_jsonl
from tests.paths import CONF, ROOT
from tests.tools.inference.models import make_folder

Main = Callable[..., int]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths are below a folder of the test."""
    monkeypatch.chdir(tmp_path)


def printed(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The words of the printed commands. Each line fits the screen or is one word."""
    commands: list[str] = []
    for line in capsys.readouterr().out.splitlines():
        if line in ("next:", "then:"):
            commands.append("")
        elif commands:
            assert len(line) <= 79 or len(shlex.split(line.removesuffix("\\"))) == 1
            commands[-1] += line + "\n"
    return [shlex.split(command.replace("\\\n", " ")) for command in commands]


def trains(words: list[str]) -> Config:
    """Check that train.py can start the command; return its config."""
    assert words[:2] == ["python", "train.py"]
    config = resolve(load_config([*words[2:], "device=cpu"], CONF), 1).config
    assert check_data(config) == []
    return config


def run(main: Main, *arguments: str) -> None:
    assert main([*arguments, "--workers", "1"]) == 0


def run_command_line(monkeypatch: pytest.MonkeyPatch, program: ModuleType, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [Path(str(program.__file__)).name, *arguments])
    assert program.main() == 0


def test_from_text_to_training(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """train_tokenizer.py names preprocess.py's command, which names train.py's. The folder's name needs quotes."""
    write_jsonl(tmp_path / "my text" / "it's.jsonl", some_texts(200))
    arguments = ("--input", "my text", "--vocab-size", "320", "--model-prefix", "my sets/a,b/tokenizer")
    run_command_line(monkeypatch, data_prep.train_tokenizer, *arguments)
    (words,) = printed(capsys)
    assert words[:2] == ["python", "data_prep/preprocess.py"]
    run(data_prep.preprocess.main, *words[2:])
    (words,) = printed(capsys)
    config = trains(words)
    assert config.data.prefixes == ["my sets/a,b/a,b_text_document"] and config.model.vocab_size == 320
    assert config.data.tokenizer == "my sets/a,b/tokenizer.model"
    run(data_prep.preprocess.main, "--input", "my text", "--tokenizer-model", "my sets/a,b/tokenizer.model",
        "--append-eod", "--output-prefix", "my sets/a,b/a,b")  # fmt: skip
    assert printed(capsys) == [words], "also if the dataset was complete"


def test_several_keys_and_a_folder_of_a_tokenizer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = '{"title": "A title", "body": "A body of text"}\n' * 100
    (tmp_path / "a.jsonl").write_text(lines)
    options = ("--json-keys", "title", "body", "--tokenizer-model", str(folder))
    run(data_prep.preprocess.main, "--input", "a.jsonl", *options, "--output-prefix", "x")
    config = trains(printed(capsys)[0])
    assert config.data.prefixes == ["x_title_document", "x_body_document"] and config.data.tokenizer == str(folder)
    (tmp_path / "empty.jsonl").write_text("")
    run(data_prep.preprocess.main, "--input", "empty.jsonl", *options, "--output-prefix", "y", "--allow-empty")
    assert printed(capsys) == [], "there is nothing to train on"


def test_one_part_of_two(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", some_texts(100))
    options = ("--input", "a.jsonl", "--tokenizer-model", str(tokenizer), "--output-prefix", "x", "--part")
    run(data_prep.preprocess.main, *options, "1/2")
    assert printed(capsys) == []
    run(data_prep.preprocess.main, *options, "2/2")
    assert trains(printed(capsys)[0]).data.prefixes == ["x_text_document"]


def test_fine_tuning(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run begins with the model of the tokenizer, if the tokenizer is in the folder of one."""
    make_folder(tmp_path / "my model")
    (tmp_path / "chat.jsonl").write_text("\n".join(GOOD) + "\n")

    def prepared(*options: str) -> Config:
        run(data_prep.sft.main, "--input", "chat.jsonl", "--chat-template", "plain", *options)
        return trains(printed(capsys)[0])

    options = ("--tokenizer-model", "my model", "--seq-length", "64", "--output-prefix")
    config = prepared(*options, "sets/chat")
    assert config.init_from == "my model" and config.data.prefixes == ["sets/chat_sft"]
    assert config.data.kind == "sft" and config.data.seq_length == 64
    config = prepared(*options, "sets/two", "--split", "30,10")
    assert config.data.prefixes == ["sets/two_train_sft"]
    assert config.data.validation_prefixes == ["sets/two_validation_sft"]
    config = prepared("--tokenizer-model", str(tokenizer), "--seq-length", "4096", "--output-prefix", "chat")
    assert config.data.tokenizer == str(tokenizer) and config.model.vocab_size == 600 and config.init_from is None
    assert config.data.seq_length == 4096


@pytest.mark.parametrize("conf", ["conf/data/mine.yaml", "elsewhere/mine.yaml", "redpajama.yaml"])
def test_redpajama(
    conf: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("arxiv", "wikipedia"):
        write_jsonl(tmp_path / "rp" / name / "a.jsonl", some_texts(200))
    default = data_prep.redpajama.DEFAULT_CONF.relative_to(ROOT)  # here in the test's folder, as without a checkout
    monkeypatch.setattr(data_prep.redpajama, "DEFAULT_CONF", default)
    arguments = ["prepare", "--input", "rp", "--tokenizer-model", str(tokenizer), "--output", "out", "--workers", "1"]
    arguments += ["--conf", conf] * (conf != default.name)
    run_command_line(monkeypatch, data_prep.redpajama, *arguments)
    (words,) = printed(capsys)
    assert words[2].startswith(f"data={Path(conf).stem}") == (not conf.startswith("elsewhere"))
    config = trains(words)
    assert config.data.prefixes[1::2] == [
        str(tmp_path / f"out/{name}_text_document") for name in ("wikipedia", "arxiv")
    ]
    assert config.data.prefixes[0] == pytest.approx(4.5 / 7, abs=1e-6) and config.data.split == "980,10,10"
    assert config.model.vocab_size == 600


def test_redpajama_download(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "urls").write_text("http://localhost/v2/documents/a.jsonl\n")
    monkeypatch.setattr(data_prep.redpajama, "fetch_all", lambda *arguments: None)
    arguments = ("download", "--url-list", "urls", "--base-url", "http://localhost/", "--output", "data/my rp")
    run_command_line(monkeypatch, data_prep.redpajama, *arguments)
    tokenizer, prepare = printed(capsys)
    assert tokenizer[1] == "data_prep/train_tokenizer.py" and "raw_content" in tokenizer
    known = data_prep.redpajama.parser().parse_args(prepare[2:])
    assert prepare[1] == "data_prep/redpajama.py" and known.input == "data/my rp"
    assert known.tokenizer_model == f"{tokenizer[tokenizer.index('--model-prefix') + 1]}.model"


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
