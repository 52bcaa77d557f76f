"""What a command line says where a package that it needs is not installed, instead of a traceback: which, in which
interpreter, and what to type. Imports nothing but Python's own."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from megatron_llama.system.errors import PACKAGES, program, program_name
from megatron_llama.system.exit_status import EXIT_USER

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
OLDEST_PYTHON = (3, 11)
REQUIRED = {
    "torch": "torch",
    "megatron.core": "megatron-core",
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "yaml": "PyYAML",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "zstandard": "zstandard",
    "sentencepiece": "sentencepiece",
    "google.protobuf": "protobuf",
    "tensorboard": "tensorboard",
    "matplotlib": "matplotlib",
    "rich": "rich",
}
"""The packages of pyproject.toml's dependencies, by the modules that are imported."""
_PROGRAMS = ("", "scripts", "data_prep", "benchmarks", "benchmarks/verify", "tests/chaos", "tests/fuzz", "docs")
"""Folders of the project's command lines."""


def missing_packages() -> dict[str, str]:
    """Those of NEEDED that are not installed. Imports none of them."""
    return {module: package for module, package in REQUIRED.items() if not _is_there(module)}


def _is_there(module: str) -> bool:
    whole, _, part = module.partition(".")
    spec = find_spec(whole)
    if spec is None or not part:
        return spec is not None
    # Others may lie in the same namespace; asked for by its name, the part would be imported with it.
    return PathFinder.find_spec(module, spec.submodule_search_locations) is not None


def require_packages() -> None:
    """Raises ModuleNotFoundError where one of NEEDED is missing: a run that draws its curve with the last of them
    should not train for a week first."""
    for module in missing_packages():
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def explain_import_error(error: BaseException) -> str | None:
    """What to say of an error that comes from the interpreter that was taken, or from what is not installed in it; None
    of any other, whose traceback is of use."""
    found = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    if isinstance(error, Exception) and sys.version_info < OLDEST_PYTHON:
        return f"{sys.executable} is {found}, and {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed. {_advice([])}"
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if not name or name.partition(".")[0] in PACKAGES | sys.stdlib_module_names:
        return None
    lacking = missing_packages()
    names = [REQUIRED.get(name) or next((p for m, p in lacking.items() if m.startswith(f"{name}.")), name)]
    names += [package for package in lacking.values() if package not in names]
    if len(names) > 3:
        who = f"{names[0]} and {len(names) - 1} other packages that this project needs are"
    else:
        who = " and ".join(names) + (" are" if len(names) > 1 else " is")
    return f"{who} not installed in {sys.executable} ({found}). {_advice(names)}"


def _advice(names: list[str]) -> str:
    """What to type: the same with the project's own environment where another was taken, else what installs ``names``,
    or makes that environment."""
    python = VENV / "bin" / "python"
    here = Path.cwd() == ROOT
    if python.exists() and Path(sys.prefix).resolve() != VENV.resolve():
        own = os.path.relpath(python) if here else str(python)
        command = shlex.join([own, *program(), *sys.argv[1:]])
        return f"Type {command}, which takes the environment that `make venv` built"
    if sys.version_info < OLDEST_PYTHON:
        return f"Type make -C {shlex.quote(str(ROOT))} venv, which looks for one and builds {python}"
    extra = "" if set(names) <= set(REQUIRED.values()) else "[dev]"
    install = shlex.join([sys.executable, "-m", "pip", "install", "-e", ("." if here else str(ROOT)) + extra])
    return f"Type {install}"


def report_missing_packages() -> None:
    """From now on an uncaught error of this kind is one message and status 2, if the program is one of the project's
    command lines."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is not None and Path(main).resolve().parent in [ROOT / folder for folder in _PROGRAMS]:
        sys.excepthook = _tell


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An ``excepthook``; the SystemExit that it raises is the program's status."""
    said = explain_import_error(error)
    if said is None:
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(f"{program_name()}: error: {said}\n")
    raise SystemExit(EXIT_USER)
