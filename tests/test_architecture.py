"""The house as docs and DESIGN say it is built: imports go down only, and every file and function can be read at
once."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_llama"
# Rooms that may import from all floors below their own, but not from each other.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("launch",),
    ("train", "evaluate"),
    ("generate",),  # above checkpoint, which it loads from; evaluation has it write
    ("checkpoint", "compare", "data", "optim", "plan"),
    ("parallel",),
    ("model",),
    ("devices",),
    ("topology",),
    ("config", "records"),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# What a floor's rooms must have of one another, with the reason.
ALLOWED = {
    ("checkpoint", "optim"): "what a checkpoint holds is the optimizer's state too",
    ("checkpoint", "data"): "and the position in the data",
}
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 400, 70

SOURCES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.Module, *, running: bool) -> Iterator[str]:
    """Modules of ours that a file imports; with ``running`` without those that only type checkers read."""
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if running and id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("megatron_llama."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            if (node.module or "").startswith("megatron_llama"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def strays(room: str, tree: ast.Module) -> list[str]:
    """Imports that go up, or across a floor."""
    others = {module.split(".")[1] for module in imported(tree, running=False)} - {room}
    return [o for o in sorted(others) if FLOOR[o] <= FLOOR[room] and (room, o) not in ALLOWED]


def test_every_room_stands_on_a_floor() -> None:
    rooms = {room_of(path) for path in SOURCES if path.parent != PACKAGE or path.stem != "__init__"}
    assert rooms <= set(FLOOR), "give the new room a floor, here and in the design"


@pytest.mark.parametrize("path", [path for path in SOURCES if name_of(path) != "__init__.py"], ids=name_of)
def test_imports_go_down(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not strays(room_of(path), tree), f"{name_of(path)} imports from its own floor or above"


def test_an_import_that_goes_up_would_be_seen() -> None:
    for line in (
        "from megatron_llama.train import x",
        "import megatron_llama.optim.norm",
        "from megatron_llama import launch",
    ):
        assert strays("model", ast.parse(f"def later():\n    {line}\n"))
    assert strays("data", ast.parse("from megatron_llama.optim import norm"))
    assert not strays("data", ast.parse("from megatron_llama.parallel import x"))


def test_no_circles() -> None:
    """Between files, inside rooms too; a circle works until somebody imports its files in another order."""
    modules = {f"megatron_llama.{name_of(path).removesuffix('.py').replace('/', '.')}": path for path in SOURCES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    edges: dict[str, set[str]] = {}
    for name, path in modules.items():
        wanted = set(imported(ast.parse(path.read_text(encoding="utf-8")), running=True))
        edges[name] = {w if w in modules else w.rpartition(".")[0] for w in wanted} - {name}
        assert edges[name] <= modules.keys(), f"{name} imports what is not there: {edges[name] - modules.keys()}"
    done: set[str] = set()

    def follow(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "a circle: " + " → ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in sorted(edges[name]):
                follow(other, (*path, name))
            done.add(name)

    for name in modules:
        follow(name, ())


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_and_functions_can_be_read_at_once(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES_OF_A_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MOST_LINES_OF_A_FUNCTION, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_the_library_does_not_print(path: Path) -> None:
    # What a run says goes through its logger, its progress line or stderr, so that it can be led elsewhere.
    prints = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not prints, f"print in line {prints}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_file_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not tree.body or ast.get_docstring(tree), "a file begins with what it is for"


def test_floors_are_those_of_the_design() -> None:
    assert all(not set(upper) & set(lower) for upper, lower in pairwise(FLOORS))


# Where a device's name may stand: the devices, the list of choices, the planner's table of hardware; and where other
# programs' files are read, whose keys have such names.
MAY_NAME_DEVICES = (
    "megatron_llama/devices/",
    "megatron_llama/config/settings.py",
    "megatron_llama/plan/hardware.py",
    "megatron_llama/config/nemo/",
)
PROGRAM = [ROOT / "train.py", *SOURCES, *sorted((ROOT / "scripts").glob("*.py")), *sorted(ROOT.glob("data_prep/*.py"))]
IN_CODE = re.compile(r"cuda|neuron|habana|(?<![a-z])hpu|nccl|hccl", re.IGNORECASE)
# In prose the makers' names are free (CUDA, Trainium, Gaudi, NCCL); names as the program spells them are not.
IN_PROSE = re.compile(r"\bcuda\b|neuron|habana|\bhpu\b|\bnccl\b|\bhccl\b")


def device_names(source: str) -> Iterator[str]:
    """Where code or what is written about it speaks of a device in the program's own words."""
    source = source.replace("neuronx-nemo-megatron", "")  # a program's name
    tree = ast.parse(source)
    documentation = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if id(node) in documentation:
            continue
        # Names, attributes, parameters, keywords, imports, definitions and strings are all fields that are text.
        texts = [value for _, value in ast.iter_fields(node) if isinstance(value, str)]
        yield from (text for text in texts if IN_CODE.search(text))
    prose = [node.value for node in ast.walk(tree) if id(node) in documentation and isinstance(node, ast.Constant)]
    prose += [t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    yield from (text for text in prose if isinstance(text, str) and IN_PROSE.search(text))


@pytest.mark.parametrize("path", PROGRAM, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nobody_else_names_a_device(path: Path) -> None:
    if not path.relative_to(ROOT).as_posix().startswith(MAY_NAME_DEVICES):
        found = list(device_names(path.read_text(encoding="utf-8")))
        assert not found, f"ask the Device instead: {found}"


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.cuda.Event()",
        "if kind == 'cuda': pass",
        "import torch_neuronx",
        "from torch import cuda",
        "from torch.cuda import nvtx",
        "a.hpu()",
        "def on_neuron(): pass",
        "def f(cuda=None): pass",
        "f(use_cuda=True)",
        "x = f'{a}:hpu'",
        "dist.init_process_group('nccl')",
        "x = 1  # as on device=neuron",
        'def f():\n    """Calls torch.cuda."""',
    ],
)
def test_a_device_name_would_be_seen(line: str) -> None:
    assert list(device_names(f"{line}\n"))


def test_prose_may_speak_of_makers() -> None:
    assert not list(device_names('"""Runs on CUDA, Trainium and Gaudi, over NCCL."""\nthroughput = 1  # of CUDA\n'))
