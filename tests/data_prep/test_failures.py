"""Command lines: mistakes, next commands, a folder without permission, memory, and the start of each program."""

from __future__ import annotations

import gzip
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep import redpajama
from data_prep.lib import next_command
from megatron_llama.config import load_config
from megatron_llama.data.checks import check_data
from megatron_llama.plan import resolve
from tests.data.files import numbered, write_indexed
from tests.data_prep.helpers import GOOD, Run, assert_refused, command, run_script, some_texts, write_jsonl
from tests.golden import GoldenFiles
from tests.paths import CONF, ROOT
from tests.tools.inference.models import make_folder

DEFAULTS = {
    "preprocess.py": "--input a.jsonl --tokenizer-model tok.model --output-prefix out/x",
    "sft.py": "--input a.jsonl --tokenizer-model tok.model --output-prefix out/x --seq-length 16",
    "train_tokenizer.py": "--input a.jsonl --model-prefix out/t",
    "analyze.py": "data/a --seq-length 16",
    "split_by_length.py": "",
    "python_stdlib.py": "--output out/text.jsonl",
    "redpajama.py": "",
    "inspect.py": "",
}
"""Arguments before the arguments of a row, which replace equal options."""

HIDDEN = {
    r"folder\s+\S+/a.jsonl:\s+Not\s+a\s+directory": "folder TMP/a.jsonl: Not a directory",
    r"\d+ or less": "NUMBER or less",
    r"[\d,]+ unpacked": "NUMBER unpacked",
}


@pytest.fixture
def files(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with the files that the mistakes name."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(tokenizer, "tok.model")
    source = write_jsonl(Path("a.jsonl"), ["too little text"])
    Path("cut.jsonl.gz").write_bytes(gzip.compress(source.read_bytes() * 50)[:-12])
    Path("noise.jsonl.gz").write_bytes(b"\x00\x01\x02\x03")
    Path("deep.jsonl").write_text('{"text": ' + "[" * 200_000)
    Path("blank.jsonl").write_bytes(b" \n\t\r\n")
    write_jsonl(Path("hollow.jsonl"), [""])
    Path("array.json").write_text('[\n{"text": "a"}\n]\n')
    Path("few.tsv").write_text(
        "index\tquestion\tsentence\tlabel\n0\tWho?\tHe.\tentailment\n1\tWho?\tShe.\tentailment\n"
    )
    Path("empty").mkdir()
    Path("ftp.txt").write_text("ftp://x/y\n")
    Path("up.txt").write_text("http://127.0.0.1:1/v1.0.0/../../etc/passwd\n")
    for name in ("a", "set"):
        Path("data").mkdir(exist_ok=True)
        write_indexed(tmp_path / "data" / name, numbered(60))
    write_indexed(tmp_path / "data/set_mask", [[1]], "B")


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.usefixtures("files")
def test_mistakes_are_reported_and_nothing_is_written(tmp_path: Path) -> None:
    before, page = files_below(tmp_path), ""
    for line in GoldenFiles.commands("data_prep/mistakes.txt"):
        program, *words = shlex.split(line)
        options = "|".join(word for word in words if word.startswith("--")) or "none"
        done = run_script(program, *re.sub(rf"({options}) \S+", "", DEFAULTS[program]).split(), *words)
        assert done.returncode == 2 and not done.stdout.startswith("next"), line
        page += f"$ {line}\n{done.stderr}\n"
    GoldenFiles.check("data_prep/mistakes.txt", page, HIDDEN)
    assert files_below(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path, preprocess: Run) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "closed").mkdir(mode=0o500)
    assert_refused(preprocess("--input", source, "--output-prefix", tmp_path / "closed/x"), "Permission denied")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path, tokenizer: Path) -> None:
    """Compare peak memory for 12 and 48 MB; python -m benchmarks.verify.data uses a gigabyte."""
    script = (
        f"import resource, sys; sys.path[0] = {str(ROOT)!r}\n"
        "from data_prep.preprocess import main\n"
        "main(sys.argv[1:])\n"
        "main_peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1]\n"
        "print('peaks', main_peak, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    part = write_jsonl(tmp_path / "part.jsonl", some_texts(500)).read_bytes()
    peaks = []
    for times in (8, 32):
        (path := tmp_path / f"{times}.jsonl").write_bytes(part * 4 * times)
        words = ["--input", path, "--output-prefix", tmp_path / f"x{times}", "--workers", 2, "--block-mib", 1]
        args = [sys.executable, "-c", script, *map(str, [*words, "--tokenizer-model", tokenizer])]
        done = subprocess.run(args, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        main_peak, largest_worker = map(int, done.stdout.rpartition("peaks")[2].split())
        peaks.append(1024 * (main_peak + 2 * largest_worker))
    assert peaks[0] > 10e6
    grown = 24 * 4 * len(part)
    assert peaks[1] < 600e6 and peaks[1] - peaks[0] < 0.4 * grown, (peaks, grown)


def test_help_from_any_folder(tmp_path: Path) -> None:
    """inspect.py in the scripts' folder must not hide the standard library's inspect."""
    done = subprocess.run(command("analyze.py", "--help"), cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    scripts = {script: (ROOT / "data_prep" / script).read_text(encoding="utf-8") for script in DEFAULTS}
    assert [script for script, text in scripts.items() if "\n    sys.path[0] = " not in text] == []


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
def records(tmp_path: Path, tokenizer: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(redpajama.download, "fetch_all", lambda *arguments: None)


@pytest.mark.usefixtures("records")
def test_each_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """train.py can start its commands, and the other programs parse theirs."""
    page = ""
    for line in GoldenFiles.commands("data_prep/next_commands.txt"):
        name, *words = shlex.split(line)
        program = importlib.import_module(f"data_prep.{name.removesuffix('.py')}")
        monkeypatch.setattr(sys, "argv", [name, *words])
        assert (program.main(words) if name in ("preprocess.py", "sft.py") else program.main()) == 0, line
        output = capsys.readouterr().out
        page += f"$ {line}\n{''.join(output.partition('next:')[1:]).strip()}\n\n"
        for python, file, *arguments in commands_of(output):
            if file == "train.py":
                assert python == "python"
                config = resolve(load_config([*arguments, "device=cpu"], CONF), 1).config
                assert check_data(config) == [] and config.data.prefixes
                page += f"validates on {config.data.validation_prefixes}\n\n" * bool(config.data.validation_prefixes)
                if name == "redpajama.py":
                    paths = [str(tmp_path / f"out/{each}_text_document") for each in ("wikipedia", "arxiv")]
                    assert config.data.prefixes[1::2] == paths and config.data.split == "980,10,10"
                    assert config.data.prefixes[0] == pytest.approx(4.5 / 7, abs=1e-6)
                    assert config.model.vocab_size == 600
            elif file == "data_prep/redpajama.py":
                assert redpajama.parser().parse_args(arguments).input == "data/my rp"
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
