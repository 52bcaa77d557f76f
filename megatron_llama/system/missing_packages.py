"""Messages instead of a traceback: for missing packages the interpreter and the command to run, and for small limits.

Imports the standard library only.
"""

from __future__ import annotations

import os
import shlex
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from megatron_llama.system.errors import PACKAGES, program, program_name
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_USER
from megatron_llama.system.interrupts import is_own_program
from megatron_llama.system.programs import IN_CHECKOUT, ROOT
from megatron_llama.system.ulimits import explain_limit

VENV = ROOT / ".venv"
OLDEST_PYTHON = (3, 11)
_MODULES = (
    *("torch", "megatron.core", "hydra", "omegaconf", "yaml", "numpy", "safetensors", "zstandard", "sentencepiece"),
    *("google.protobuf", "tensorboard", "matplotlib", "rich"),
)
_PACKAGE = {"megatron.core": "megatron-core", "hydra": "hydra-core", "yaml": "PyYAML", "google.protobuf": "protobuf"}
REQUIRED = {module: _PACKAGE.get(module, module) for module in _MODULES}
"""Distribution names of pyproject.toml's dependencies, by imported module."""


def missing_packages() -> dict[str, str]:
    """Return the entries of REQUIRED that are not installed. Imports none of them."""
    return {module: package for module, package in REQUIRED.items() if not _is_there(module)}


def _is_there(module: str) -> bool:
    whole, _, part = module.partition(".")
    spec = find_spec(whole)
    if spec is None or not part:
        return spec is not None
    # find_spec("a.b") would import a; other packages may share the namespace.
    return PathFinder.find_spec(module, spec.submodule_search_locations) is not None


def require_packages() -> None:
    """Raise ModuleNotFoundError if a required package is missing, so that a long run does not fail at its end."""
    for module in missing_packages():
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def explain_import_error(error: BaseException) -> str | None:
    """Return the message for a missing package or an old interpreter; None for other errors."""
    version = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    if isinstance(error, Exception) and sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return f"{sys.executable} is {version}; this project needs {oldest} or newer. {_suggestion([])}"
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if not name or name.partition(".")[0] in PACKAGES | sys.stdlib_module_names:
        return None
    lacking = missing_packages()
    names = [REQUIRED.get(name) or next((p for m, p in lacking.items() if m.startswith(f"{name}.")), name)]
    names += [package for package in lacking.values() if package not in names]
    if len(names) > 3:
        subject = f"{names[0]} and {len(names) - 1} other packages that this project needs are"
    else:
        subject = " and ".join(names) + (" are" if len(names) > 1 else " is")
    return f"{subject} not installed in {sys.executable} ({version}). {_suggestion(names)}"


def _suggestion(names: list[str]) -> str:
    """Return the command to run: with the project's ``.venv``, or one that installs ``names`` or builds ``.venv``."""
    if not IN_CHECKOUT:
        return f"Type {shlex.join([sys.executable, '-m', 'pip', 'install', *names])}" if names else "Use such a Python"
    python = VENV / "bin" / "python"
    here = Path.cwd() == ROOT
    if python.exists() and Path(sys.prefix).resolve() != VENV.resolve():
        command = shlex.join([os.path.relpath(python) if here else str(python), *program(), *sys.argv[1:]])
        return f"Type {command}, which uses the environment that `make venv` built"
    if sys.version_info < OLDEST_PYTHON:
        return f"Type make -C {shlex.quote(str(ROOT))} venv, which finds one and builds {python}"
    return f"Type {pip_install(extra='' if set(names) <= set(REQUIRED.values()) else 'dev')}"


def pip_install(*requirements: str, extra: str = "") -> str:
    """Return the command that installs requirements, or without them this project with an extra.

    ``pip`` alone is the environment that the user activated. Without one it may be the system's, so the command names
    the interpreter: the project's ``.venv`` if this process uses it or no environment, else this process's own.
    """
    here = Path.cwd() == ROOT
    prefix, python = Path(sys.prefix).resolve(), VENV / "bin" / "python"
    active = [os.environ[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.environ.get(name)]
    if prefix in [Path(folder).resolve() for folder in active]:
        pip = ["pip"]
    elif python.exists() and (prefix == VENV.resolve() or sys.prefix == sys.base_prefix):
        pip = [os.path.relpath(python) if here else str(python), "-m", "pip"]
    else:
        pip = [sys.executable, "-m", "pip"]
    project = ["-e", "." if here else str(ROOT)] if IN_CHECKOUT else ["megatron_llama"]  # pip adds a wheel's extras
    project[-1] += f"[{extra}]" if extra else ""
    return shlex.join([*pip, "install", *(requirements or project)])


def report_missing_packages() -> None:
    """Install an ``excepthook`` that reports missing packages, if the program is a command line of this project."""
    if is_own_program():
        sys.excepthook = _report_error


def _report_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the message for a missing package (status 2) or a limit of the shell (status 1): an ``excepthook``."""
    message, status = explain_import_error(error), EXIT_USER
    if message is None:
        message, status = explain_limit(error), EXIT_FAILED
    if message is None:
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(f"{program_name()}: error: {message}\n")
    raise SystemExit(status)
