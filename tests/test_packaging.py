"""The wheel and the console script: files, commands and their texts, and a run without a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from megatron_llama import __main__ as console
from megatron_llama.system import programs
from tests.paths import CONF, ROOT
from tests.processes import run_command, steps

BUILD = "import os, sys, setuptools.build_meta as b; os.write(3, b.build_wheel(sys.argv[1]).encode())"


def sources() -> set[str]:
    """Return the files of the repository, by git, or all files if there is no history."""
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}
    folders = ("megatron_llama", "data_prep", "conf", "scripts")
    inside = {p.relative_to(ROOT).as_posix() for f in folders for p in (ROOT / f).rglob("*") if p.is_file()}
    return {name for name in inside if "__pycache__" not in name} | {p.name for p in ROOT.iterdir() if p.is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Build the wheel of a copy of the checkout, with the backend and no network."""
    folder = tmp_path_factory.mktemp("wheel")
    needed = re.compile(r"(megatron_llama|data_prep|conf|scripts)/|[^/]+$")
    for name in filter(needed.match, sources()):
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tree" / name).symlink_to(ROOT / name)
    reader, writer = os.pipe()
    command = [sys.executable, "-c", BUILD.replace("3", str(writer)), str(folder)]
    try:
        done = subprocess.run(command, cwd=folder / "tree", capture_output=True, text=True, pass_fds=[writer])
    finally:
        os.close(writer)
    assert done.returncode == 0, done.stderr
    with open(reader, encoding="utf-8") as name:
        yield folder / name.read()


def test_wheel_has_all_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {name for name in sources() if name.startswith("megatron_llama/") and not name.endswith(".md")}
    shared = {name for name in sources() if re.match(r"(conf|data_prep|scripts)/|train\.py$|\w+\.slurm$", name)}
    expected |= {f"megatron_llama/share/{name}" for name in shared}
    assert sorted(packed) == sorted(expected), "correct [tool.setuptools.package-data] in pyproject.toml"


def run_wheel(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m megatron_llama`` with the package unpacked in ``folder``, from another folder."""
    (folder / "work").mkdir(exist_ok=True)
    command = (sys.executable, "-m", "megatron_llama", *words)
    return run_command(*command, cwd=folder / "work", PYTHONPATH=str(folder / "site"), **more)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel's files in ``site``."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder


def test_plan_without_a_checkout(installed: Path) -> None:
    done = run_wheel(installed, "train", "--dry-run", "model=llama_2m", "data=mock", "device=cpu", "trainer.tp=2")
    assert done.returncode == 0, done.stderr
    assert "llama_2m" in done.stdout


@pytest.mark.slow
def test_run_without_a_checkout(installed: Path) -> None:
    settings = ["model=llama_2m", "data=mock", "device=cpu", "trainer.steps=2", "trainer.tp=2", "run.dir=run"]
    done = run_wheel(installed, "train", *settings, "data.seq_length=16")
    assert done.returncode == 0, done.stderr
    assert (installed / "work/run/checkpoints/step_00000002").is_dir()
    verified = run_wheel(installed, "verify", "run")
    assert verified.returncode == 0 and "every hash is right" in verified.stdout
    wrong = run_wheel(installed, "plan", "model=llama_2m", "tune.steps=3")
    assert wrong.returncode == 2 and "megatron-llama tune" in wrong.stderr and ".py" not in wrong.stderr


def test_data_preparation_without_a_checkout(installed: Path) -> None:
    (installed / "work").mkdir(exist_ok=True)
    (installed / "work/text.txt").write_text("Some words to count. " * 200)
    words = ["--input", "text.txt", "--vocab-size", "280", "--model-prefix", "tokenizer"]
    done = run_wheel(installed, "train-tokenizer", *words)
    assert done.returncode == 0, done.stderr
    words = ["--input", "text.txt", "--tokenizer-model", "tokenizer.model", "--output-prefix", "set", "--workers", "2"]
    done = run_wheel(installed, "preprocess", *words)
    assert done.returncode == 0, done.stderr
    assert (installed / "work/set_text_document.bin").exists()


def test_every_program_has_a_command() -> None:
    files = [ROOT / "train.py", *(ROOT / "scripts").glob("*.py"), *(ROOT / "data_prep").glob("[a-z]*.py")]
    assert sorted(programs.program_files().values()) == sorted(files)
    text = console.list_of_commands()
    for name, path in programs.program_files().items():
        assert f"\n  {name} " in text and console.description(path)
    assert max(map(len, text.splitlines())) <= 79


def test_names_of_commands_and_versions() -> None:
    assert console.find_command("export_hf") == console.find_command("export") == "export-hf"
    assert console.find_command("train") == "train", "an exact name has precedence"
    assert console.find_command("p") is None and console.find_command("") is None
    assert "type megatron-llama train model=x" in console._unknown(["model=x"])
    assert "; type train;" in console._unknown(["trian"])
    with open(ROOT / "pyproject.toml", "rb") as file:
        version = tomllib.load(file)["project"]["version"]
    lines = [line.split() for line in console.versions().splitlines()]
    assert [name for name, _ in lines] == ["megatron_llama", "torch", "megatron-core", "python"]
    assert lines[0][1] == version


def test_folders_of_a_checkout_shadow_no_package() -> None:
    """A folder that programs create in a checkout is a namespace package for programs that start there."""
    ignored = re.findall(r"^/(\w+)/$", (ROOT / ".gitignore").read_text(), flags=re.MULTILINE)
    files = "".join(path.read_text() for path in [ROOT / "Makefile", *CONF.rglob("*.yaml")])
    default = re.findall(r"(?:STDLIB := |--output-prefix |prefixes: \[|tokenizer: |^ +- )(\w+)/", files, re.MULTILINE)
    assert set(default) >= {"corpora"} and set(default) <= set(ignored)
    folders = set(ignored) - {"datasets"} | set(default)  # datasets/ is only of older versions
    spec = PathFinder.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    probes = (Path(spec.origin).parent / "utils/import_utils.py").read_text(encoding="utf-8")
    optional = set(re.findall(r'_is_package_available\("(\w+)"', probes))
    assert "datasets" in optional and not optional & folders
    path = [folder for folder in sys.path if Path(folder).resolve() != ROOT]
    assert [name for name in default if PathFinder.find_spec(name, path)] == []


def test_texts_name_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    assert programs.name_commands("python scripts/plan.py") == "python scripts/plan.py", "in a checkout"
    monkeypatch.setattr(sys, "argv", ["megatron-llama plan", "data=mock"])
    named = programs.name_commands
    assert named("usage: python scripts/plan.py [--json]\n                              [x]") == (
        "usage: megatron-llama plan [--json]\n                           [x]"
    )
    assert named("write python data_prep/train_tokenizer.py, then train.py") == (
        "write megatron-llama train-tokenizer, then megatron-llama train"
    )
    assert named("torchrun --nnodes 2 \\\n  scripts/profile.py x") == (
        "torchrun --nnodes 2 \\\n  -m megatron_llama profile x"
    )
    for text in ("my/train.py", "data_prep/lib/pool.py", "retrain.py", "docs/train.md"):
        assert named(text) == text
    words = "word " * 12
    assert named(f"{words}python train.py\nends.") == f"{words.strip()}\nmegatron-llama train ends.", "79 columns"


HELP = """
import os, sys
from megatron_llama import __main__ as console
for name in console.program_files():
    print(f"@{name}", flush=True)
    if os.fork() == 0:
        console.start(name, ["--help"])
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.mark.slow
def test_help_names_commands() -> None:
    """Each command's help names commands, not files, and fits 79 columns."""
    done = run_command(sys.executable, "-c", HELP, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    texts = dict(part.split("\n", 1) for part in done.stdout.removeprefix("@").split("\n@"))
    assert sorted(texts) == sorted(programs.program_files())
    for name, text in texts.items():
        assert f"megatron-llama {name} " in text
        assert not re.search(r"(python |scripts/|data_prep/|\btrain\.py)", text), name
        assert [line for line in text.splitlines() if len(line) > 79 and "{" not in line] == [], name


TINY = (
    "model=llama_2m",
    "data=mock",
    "data.seq_length=16",
    "trainer.micro_batch_size=1",
    "trainer.global_batch_size=2",
)


# The finder of an editable install would find tools/ in this checkout.
START = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with the trainer only."""
    tree = tmp_path_factory.mktemp("trainer")
    ignored = shutil.ignore_patterns("tools", "__pycache__")
    for folder in ("megatron_llama", "data_prep", "conf"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    shutil.copy(ROOT / "train.py", tree)
    assert not (tree / "megatron_llama" / "tools").exists()
    return tree


def run_train_py(tree: Path, *overrides: str) -> tuple[int, str]:
    """The exit status and all output of train.py in ``tree``."""
    done = run_command(sys.executable, "-c", START, *TINY, *overrides, cwd=tree, PYTHONPATH=str(tree))
    return done.returncode, done.stdout + done.stderr


def test_a_step_is_trained(trainer: Path, tmp_path: Path) -> None:
    status, output = run_train_py(trainer, "trainer.steps=1", f"run.dir={tmp_path}/run", "device=cpu")
    assert status == 0, output
    assert steps(tmp_path / "run") == [1]
    assert (tmp_path / "run" / "checkpoints" / "step_00000001").is_dir()


def test_a_run_that_does_not_fit_is_refused_with_its_numbers(trainer: Path) -> None:
    overrides = ("dry_run=true", "device=cuda", "model=llama7b", "device.memory_gib=8", "trainer.dp=1")
    status, output = run_train_py(trainer, *overrides)
    assert status == 2 and "Traceback" not in output, output
    assert "the heaviest rank needs" in output and "write a smaller model" in output
    assert "trainer.zero=" not in output and "trainer.offload=" not in output, "no change was tried"


def test_a_profile_is_refused_in_words(trainer: Path) -> None:
    status, output = run_train_py(trainer, "dry_run=true", "trainer.profile=[1,1]")
    assert status == 2 and "Traceback" not in output, output
    assert "needs megatron_llama/tools/profile, which is not installed here" in output
