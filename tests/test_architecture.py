"""The structure that README.md and docs/tour.md describe: imports go down only, without circles, and every file and
function can be read at once."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

# The order of the rooms, from the top down: each imports only from rows below its own; a row's rooms do
# not import one another. The table in docs/tour.md is the one place that states it.
TABLE = re.compile(r"^\| ((?:`[\w.]+`(?:, )?)+) \|", re.MULTILINE)
ROOMS = [re.findall(r"`([\w.]+)`", row) for row in TABLE.findall((ROOT / "docs/tour.md").read_text(encoding="utf-8"))]
ROW = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 600, 60

SOURCES = sorted([*(ROOT / "megatron_llama").rglob("*.py"), *(ROOT / "data_prep").rglob("*.py")])

# Programs outside the package: their imports are free, and their files and functions are as short.
PROGRAMS = [path for folder in ("scripts", "benchmarks", "docs") for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(path): path for path in SOURCES}


def room_of(module: str) -> str:
    """The room of a module by its full name: ``megatron_llama.plan.rules.layout`` is in ``plan``."""
    if module.startswith("data_prep"):
        return "data_prep.lib" if module.startswith("data_prep.lib") else "data_prep"
    parts = module.split(".")[1:] or ["megatron_llama"]
    return parts[0]


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules of ours that a file imports, wherever the import stands: at the top, in a function, for type checkers."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.partition(".")[0] in ("megatron_llama", "data_prep"):
                yield name if name in MODULES else name.rpartition(".")[0]


def strays(room: str, tree: ast.Module) -> list[str]:
    """Imports that go up, or across a row."""
    return sorted({m for m in imported(tree) if room_of(m) != room and ROW[room_of(m)] <= ROW[room]})


# Tools that build on another tool; all of them may use forecast/, and the files that lie in tools/ itself.
AMONG_TOOLS = {"tune": {"plan"}, "pipeline": {"rehearse"}, "rehearse": {"traffic"}, "sweep": {"compare"}}


def tool_of(module: str) -> str | None:
    """The folder of a tool's module; None for the trainer, and for a file of tools/ itself."""
    parts = module.split(".")
    path = MODULES.get(module)
    in_folder = path is not None and path.parent.name != "tools"
    return parts[2] if parts[:2] == ["megatron_llama", "tools"] and in_folder else None


def strays_among_tools(tool: str, tree: ast.Module) -> list[str]:
    """Imports of other tools that no order allows."""
    allowed = {None, tool, "forecast", *AMONG_TOOLS.get(tool, ())}
    return sorted({module for module in imported(tree) if tool_of(module) not in allowed})


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_every_room_has_a_row() -> None:
    assert sum(len(rooms) for rooms in ROOMS) == len(ROW), "a room stands in the table once"
    rooms = {room_of(module) for module in MODULES if module != "megatron_llama"}
    assert rooms == set(ROW), "give the new room a row in docs/tour.md, or take the old one out"


@pytest.mark.parametrize("path", [path for path in SOURCES if module_of(path) != "megatron_llama"], ids=name_of)
def test_imports_go_down(path: Path) -> None:
    found = strays(room_of(module_of(path)), parsed(path))
    assert not found, f"{name_of(path)} imports from its own row or above: {found}"


def test_an_import_that_goes_up_would_be_seen() -> None:
    for line in (
        "from megatron_llama.train import loop",
        "import megatron_llama.optim.norm",
        "from megatron_llama import launch",
        "from data_prep import sft",
    ):
        assert strays("model", ast.parse(f"def later():\n    {line}\n"))
        assert strays("model", ast.parse(f"if TYPE_CHECKING:\n    {line}\n"))
    assert strays("data", ast.parse("from megatron_llama.optim import norm"))
    assert not strays("data", ast.parse("from megatron_llama.parallel import Shard"))
    assert strays("data_prep.lib", ast.parse("from data_prep.sft import main"))


TRAINER = [path for name, path in MODULES.items() if not name.startswith(("megatron_llama.tools", "data_prep"))]


def names_of_tools(path: Path) -> list[str]:
    """Imports of tools by a file, and strings with the name of one."""
    tree = parsed(path)
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [
        *(name for name in imported(tree) if name.startswith("megatron_llama.tools")),
        *(text for text in strings if text.startswith("megatron_llama.tools")),
    ]


@pytest.mark.parametrize("path", TRAINER, ids=name_of)
def test_the_trainer_imports_no_tool(path: Path) -> None:
    """Not by name either, except in hooks.py."""
    found = names_of_tools(path)
    assert len(found) == 2 * (path.name == "hooks.py"), f"ask hooks.py for {found}"


@pytest.mark.parametrize("path", [path for name, path in MODULES.items() if tool_of(name)], ids=name_of)
def test_tools_import_one_another_in_one_order(path: Path) -> None:
    tool = tool_of(module_of(path))
    assert tool is not None
    assert not strays_among_tools(tool, parsed(path))


def test_a_stray_among_tools_would_be_seen() -> None:
    line = ast.parse("from megatron_llama.tools.plan.forecast_run import forecast_plan")
    assert strays_among_tools("forecast", line) and strays_among_tools("rehearse", line)
    assert not strays_among_tools("tune", line)
    assert not strays_among_tools("doctor", ast.parse("from megatron_llama.tools.forecast.hardware import devices"))


def test_arch_corpus_and_plan_import_no_torch() -> None:
    """Not even inside functions: a login node has answers in a second."""
    for path in SOURCES:
        if room_of(module_of(path)) in ("arch", "corpus", "plan", "config", "hooks") and "data_prep" not in name_of(
            path
        ):
            names = [
                alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
                for node in ast.walk(parsed(path))
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names
            ]
            assert not [name for name in names if name.partition(".")[0] == "torch"], name_of(path)


def test_no_circles() -> None:
    """Between files, inside rooms too, imports for type checkers included."""
    edges = {name: set(imported(parsed(path))) - {name} for name, path in MODULES.items()}
    for name, wanted in edges.items():
        assert wanted <= MODULES.keys(), f"{name} imports what is not there: {wanted - MODULES.keys()}"
    assert not circle(edges), "a circle: " + " → ".join(circle(edges))


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The files of one circle, or nothing."""
    done: set[str] = set()

    def follow(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in sorted(edges[name]):
                if found := follow(other, [*path, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := follow(name, []))), [])


def test_a_circle_would_be_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


@pytest.mark.parametrize("path", [*SOURCES, *PROGRAMS], ids=name_of)
def test_files_and_functions_can_be_read_at_once(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES_OF_A_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MOST_LINES_OF_A_FUNCTION, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", [path for path in SOURCES if room_of(module_of(path)) != "data_prep"], ids=name_of)
def test_the_library_does_not_print(path: Path) -> None:
    # What a run says goes through its logger, its progress line or stderr, so that it can be led elsewhere.
    prints = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not prints, f"print in line {prints}"


@pytest.mark.parametrize("path", [*SOURCES, *PROGRAMS], ids=name_of)
def test_every_file_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not tree.body or ast.get_docstring(tree), "a file begins with what it is for"


# Where a device's name may stand: the devices, the list of choices, the planner's table of hardware; and where other
# programs' files are read, whose keys have such names.
MAY_NAME_DEVICES = (
    "megatron_llama/devices/",
    "megatron_llama/config/settings.py",
    "megatron_llama/tools/import_nemo/",
)
# More files that may name the CPU: benchmarks run programs on a device that the user names, and the planner's table of
# hardware has a row for it. Other code asks the Device, or writes ``devices.HOST`` for the host's memory. A method such
# as ``.cpu()`` moves a tensor there: it is no question about a device, so it is allowed.
MAY_NAME_THE_CPU = (
    *MAY_NAME_DEVICES,
    "megatron_llama/optim/",
    "megatron_llama/tools/bench/",
    "megatron_llama/plan/forecast/hardware.py",
    "megatron_llama/plan/forecast/this_machine.py",
    "scripts/",
)
# Tools that replace or rate the host's device compare with its name; the trainer does not.
MAY_COMPARE_WITH_THE_HOST = ("megatron_llama/devices/", "megatron_llama/tools/")
PROGRAM = [ROOT / "train.py", *SOURCES, *sorted((ROOT / "scripts").glob("*.py"))]
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


def names_of_the_cpu(source: str) -> Iterator[str]:
    """Strings that are the CPU's name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"cpu(:\d+)?", node.value):
            yield f"line {node.lineno}: {node.value!r}"


def comparisons_with_the_host(source: str) -> Iterator[str]:
    """Comparisons with ``devices.HOST``, which are questions for the Device."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            names = [
                each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in ast.walk(node)
            ]
            if "HOST" in names:
                yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", PROGRAM, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nobody_else_compares_with_the_cpu(path: Path) -> None:
    name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    if not name.startswith(MAY_NAME_THE_CPU):
        found = list(names_of_the_cpu(source))
        assert not found, f"ask the Device, or write devices.HOST for the host's memory: {found}"
    if not name.startswith(MAY_COMPARE_WITH_THE_HOST):
        found = list(comparisons_with_the_host(source))
        assert not found, f"ask the Device instead: {found}"


@pytest.mark.parametrize(
    "line",
    [
        "if x.device.type == 'cpu': pass",
        "y = x.to('cpu')",
        "kernel = {'cpu': 'tiles'}[name]",
        "z = torch.empty(1, device='cpu:0')",
        "if x.device.type == HOST: pass",
        "pinned = 'auto' if devices.HOST != name else ''",
        "if name in (devices.HOST, 'auto'): pass",
    ],
)
def test_a_comparison_with_the_cpu_would_be_seen(line: str) -> None:
    assert [*names_of_the_cpu(line), *comparisons_with_the_host(line)]


def test_host_memory_is_free() -> None:
    line = "a = torch.empty(1, device=devices.HOST); b = a.cpu(); torch.cpu.synchronize()"
    assert not [*names_of_the_cpu(line), *comparisons_with_the_host(line)]


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


def test_tests_share_helpers_and_not_each_other() -> None:
    """A helper is imported from a file that is named for it: whoever changes a test must not break another one."""
    shared = re.compile(r"tests\.(?:\w+\.)*(?:test_\w+|conftest)")
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            taken = [f"{package}{alias.name}" for alias in node.names if shared.match(f"{package}{alias.name}")]
            assert not taken, f"{name_of(path)}, line {node.lineno}: move what it needs of {taken} to a helper file"
