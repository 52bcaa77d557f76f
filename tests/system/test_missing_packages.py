"""Command lines in an environment that lacks packages: one message with what to type, status 2, no traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron_llama.system import missing_packages
from megatron_llama.system.missing_packages import explain_import_error
from megatron_llama.system.programs import program_files
from tests.paths import ROOT
from tests.processes import run_command

COMMANDS = [*(path.relative_to(ROOT).as_posix() for path in program_files().values()), "docs/generate.py"]
# Arguments with which a command imports its first package, if --help does not.
WORDS = {
    "train.py": "data=mock",
    "data_prep/inspect.py": "set",
    "scripts/compile.py": "data=mock",
    "scripts/doctor.py": "--quick",
    "scripts/export_hf.py": "{folder} {folder}/out",
    "scripts/import_config.py": "README.md",
    "scripts/inspect_checkpoint.py": "{folder}",
    "scripts/pipeline.py": "trainer.pp=2",
    "scripts/prove_gpu.py": "--output {folder}/out",
    "scripts/plan.py": "model=llama_2m",
    "scripts/profile.py": "data=mock",
    "scripts/rehearse.py": "data=mock",
    "scripts/report.py": "{folder}",
    "scripts/traffic.py": "data=mock",
    "scripts/tune.py": "data=mock",
    "scripts/verify_checkpoint.py": "{folder}",
}
# Until they start other command lines, at least.
NEED_NOTHING = {"data_prep/python_stdlib.py"}
# Programs that ``python -m`` starts. benchmarks.verify.memory imports no file of the project.
MODULES = [
    "benchmarks",
    "tests.fuzz",
    *(f"benchmarks.verify.{path.stem}" for path in (ROOT / "benchmarks/verify").glob("[a-z]*.py")),
]
MODULES.remove("benchmarks.verify.memory")
# Hides packages: the first word lists them.
HIDING = """
import runpy, sys
from importlib.machinery import PathFinder
hidden = sys.argv.pop(1).split(",")
class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
sys.argv[:1] = []
from megatron_llama.system import missing_packages
sys.modules["__main__"].__file__ = sys.argv[0]
missing_packages.report_missing_packages()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a separate Python with only the project's modules."""
    return run_command(sys.executable, *words, cwd=folder, PYTHONPATH="")


def test_what_is_needed_is_what_pyproject_says() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    requirements = [re.split("[<>=]", requirement)[0] for requirement in project["dependencies"]]
    assert list(missing_packages.REQUIRED.values()) == requirements
    assert f">={'.'.join(map(str, missing_packages.OLDEST_PYTHON))}," in project["requires-python"]
    assert missing_packages.missing_packages() == {}
    missing_packages.require_packages()


def test_a_namespace_is_not_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"google.protobuf": "protobuf", "google.nobody": "a", "nobody.at_all": "b", "nobody": "c"}
    monkeypatch.setattr(missing_packages, "REQUIRED", modules)
    assert list(missing_packages.missing_packages().values()) == ["a", "b", "c"]


@pytest.mark.parametrize("command", COMMANDS)
def test_without_any_package(command: str, tmp_path: Path) -> None:
    done = run("-S", command, *WORDS.get(command, "--help").format(folder=tmp_path).split())
    assert "Traceback" not in done.stderr
    if command in NEED_NOTHING:
        assert done.returncode == 0
        return
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f" not installed in {sys.executable} (Python 3." in done.stderr
    assert done.stderr.startswith(f"{os.path.basename(command)}: error: ") and ". Type " in done.stderr


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_without_any_package(module: str) -> None:
    done = run("-S", "-m", module, "train" if module == "benchmarks" else "--help")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{module}: error: ") and ". Type " in done.stderr
    assert f"-m {module} " in done.stderr or "pip install" in done.stderr


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [
        ("hydra", "hydra-core is not"),
        ("torch", "torch is not"),
        ("megatron", "megatron-core is not"),
        ("google", "protobuf is not"),
        ("rich,matplotlib", "matplotlib and rich are not"),
        ("antlr4", "antlr4 is not"),
    ],
)
def test_a_run_needs_all_packages_before_it_starts(hidden: str, expected: str, tmp_path: Path) -> None:
    done = run(
        "-c", HIDING, hidden, "train.py", "data=mock", "device=cpu", "trainer.steps=1", f"run.dir={tmp_path}/run"
    )
    assert (done.returncode, done.stdout) == (2, "") and not (tmp_path / "run").exists()
    assert done.stderr.startswith(f"train.py: error: {expected} installed in {sys.executable} ")
    assert done.stderr.count("\n") == 1 and "pip install -e " in done.stderr


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of an environment in the test's folder."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    return tmp_path / ".venv/bin/python"


def test_what_to_type(python: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = ModuleNotFoundError(name="hydra")
    monkeypatch.setattr(sys, "argv", ["train.py", "data.name=a b"])
    monkeypatch.setattr(missing_packages, "VENV", tmp_path / "none")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.chdir(tmp_path)
    assert str(explain_import_error(error)).endswith(f"Type {sys.executable} -m pip install -e {ROOT}")
    other = explain_import_error(ModuleNotFoundError(name="hypothesis"))
    assert str(other).endswith(f"-m pip install -e '{ROOT}[dev]'")
    # Another interpreter was taken than the project's own.
    monkeypatch.setattr(missing_packages, "VENV", tmp_path / ".venv")
    assert f". Type {python} train.py 'data.name=a b', which uses" in str(explain_import_error(error))
    monkeypatch.setattr(missing_packages, "ROOT", tmp_path)
    assert ". Type .venv/bin/python train.py 'data.name=a b', which uses" in str(explain_import_error(error))


@pytest.mark.parametrize(
    ("active", "prefix", "folder", "command"),
    [
        (None, ".venv", ".", ".venv/bin/python -m pip install"),
        (None, "/usr", ".", ".venv/bin/python -m pip install"),
        (None, "/usr", "other", "{venv}/bin/python -m pip install"),
        ("conda", "/usr", ".", ".venv/bin/python -m pip install"),  # active, but another interpreter runs
        (None, "conda", ".", "{executable} -m pip install"),
        ("conda", "conda", ".", "pip install"),
        (".venv", ".venv", "other", "pip install"),
    ],
)
@pytest.mark.usefixtures("python")
def test_pip_is_that_of_the_environment(
    active: str | None, prefix: str, folder: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    if active is not None:
        monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / active))
    monkeypatch.setattr(missing_packages, "ROOT", tmp_path)
    monkeypatch.setattr(missing_packages, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(sys, "prefix", prefix if prefix == "/usr" else str(tmp_path / prefix))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.chdir(tmp_path / folder)
    start = command.format(venv=tmp_path / ".venv", executable=sys.executable)
    assert missing_packages.pip_install("torchao==0.18.0") == f"{start} torchao==0.18.0"
    project = "." if folder == "." else str(tmp_path)
    assert missing_packages.pip_install(extra="wandb") == f"{start} -e '{project}[wandb]'"
    assert missing_packages.pip_install() == f"{start} -e {project}"


def test_messages_name_no_bare_pip() -> None:
    """Texts of the sources get their pip command from ``pip_install``."""
    sources = [
        ROOT / "train.py",
        *(p for f in ("megatron_llama", "data_prep", "scripts") for p in (ROOT / f).rglob("*.py")),
    ]
    assert [path for path in sources if "pip install " in path.read_text(encoding="utf-8")] == []


def test_a_python_that_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
    monkeypatch.setattr(missing_packages, "VENV", tmp_path)
    message = explain_import_error(TypeError("unsupported operand"))
    assert message and "is Python 3.10.13; this project needs 3.11 or newer. Type make -C " in message
    assert explain_import_error(KeyboardInterrupt()) is None


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError(name="megatron_llama.nothing"),
        ModuleNotFoundError(name="_lzma"),
        ModuleNotFoundError("no name"),
        ImportError("cannot import name", name="torch"),
        TypeError("ours"),
    ],
    ids=str,
)
def test_other_errors_keep_their_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert explain_import_error(error) is None
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    main = sys.modules["__main__"]
    for file, taken in ((ROOT / "scripts" / "plan.py", True), (ROOT / "tests" / "oracle.py", False)):
        monkeypatch.setattr(main, "__file__", str(file), raising=False)
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        missing_packages.report_missing_packages()
        assert (sys.excepthook is not sys.__excepthook__) == taken, "only in the project's own command lines"
        sys.excepthook(type(error), error, None)
        assert type(error).__name__ in capfd.readouterr().err


def test_warnings_that_no_user_can_act_on_are_hidden() -> None:
    """Torch's about CUDA_HOME without a GPU, and the compiler's about megatron-core; all others are printed."""
    code = """import logging, warnings, megatron_llama.devices
for text in ("No CUDA runtime is found, using CUDA_HOME='/usr'", "no nvcc"):
    logging.getLogger("torch.utils.cpp_extension").warning(text)
for name in ("megatron/core/block", "megatron/other"):
    warnings.warn_explicit("invalid escape sequence '\\\\-'", SyntaxWarning, f"/lib/{name}.py", 1)
"""
    shown = [line for line in run_command(sys.executable, "-c", code).stderr.splitlines() if not line.startswith(" ")]
    assert shown == ["no nvcc", "/lib/megatron/other.py:1: SyntaxWarning: invalid escape sequence '\\-'"]


PAGE = (ROOT / "docs/getting-started/quickstart.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
# Files of the repository that the commands use.
NEEDED = ("megatron_llama", "data_prep", "scripts", "conf", "docs", "train.py")


def commands() -> list[str]:
    """Return the page's commands without the installation; a quoted text may have several lines."""
    return [command for command in re.split(r"\n+(?=mkdir|python|echo)", "\n".join(BLOCKS[1:]).strip()) if command]


def test_installation_and_ten_commands() -> None:
    assert BLOCKS[0].splitlines() == ["make venv", "source .venv/bin/activate"]
    assert len(commands()) == 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_commands_lead_to_a_model_that_answers(tmp_path: Path) -> None:
    for name in NEEDED:
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands():
        done = run_command("bash", "-c", command, cwd=tmp_path, timeout=1800, PATH=path, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "A small Llama." in done.stdout
    assert (tmp_path / "runs/chat_hf/model.safetensors").is_file()
