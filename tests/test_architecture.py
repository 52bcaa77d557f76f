"""The structure that README.md and docs/design/tour.md describe: imports go down only, without cycles, and every file
and function can be read at once."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

# Packages from top to bottom: each imports only from lower rows, and packages of a row do not import each other. The
# order is read from the table in docs/design/tour.md.
TABLE = re.compile(r"^\| ((?:`[\w.]+`(?:, )?)+) \|", re.MULTILINE)
TOUR = (ROOT / "docs/design/tour.md").read_text(encoding="utf-8")
PACKAGES = [re.findall(r"`([\w.]+)`", row) for row in TABLE.findall(TOUR)]
ROW = {package: number for number, packages in enumerate(PACKAGES) for package in packages}
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 700, 60

SOURCES = sorted([*(ROOT / "megatron_llama").rglob("*.py"), *(ROOT / "data_prep").rglob("*.py")])

# Programs outside the package: their imports are free, and their files and functions are as short.
PROGRAMS = [path for folder in ("scripts", "benchmarks", "docs") for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(path): path for path in SOURCES}


def package_of(module: str) -> str:
    """Return the package of a module by its full name: ``megatron_llama.plan.rules.layout`` is in ``plan``."""
    if module.startswith("data_prep"):
        return "data_prep.lib" if module.startswith("data_prep.lib") else "data_prep"
    parts = module.split(".")[1:] or ["megatron_llama"]
    return parts[0]


parse: Callable[[str], ast.Module] = cache(ast.parse)


def parse_source(path: Path) -> ast.Module:
    return parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return the nodes of a file: most tests of this file read all files."""
    return tuple(ast.walk(tree))


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules of ours that a file imports, wherever the import stands: at the top, in a function, for type checkers."""
    for node in nodes_of(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.partition(".")[0] in ("megatron_llama", "data_prep"):
                yield name if name in MODULES else name.rpartition(".")[0]


def upward_imports(package: str, tree: ast.Module) -> list[str]:
    """Imports that go up, or across a row. The package itself is below all: it reports packages that are missing."""
    modules = set(imported(tree)) - {"megatron_llama"}
    return sorted({m for m in modules if package_of(m) != package and ROW[package_of(m)] <= ROW[package]})


# Tools that build on another tool; all of them may use forecast/, and the files that lie in tools/ itself.
AMONG_TOOLS = {
    "tune": {"plan"},
    "pipeline": {"rehearse"},
    "rehearse": {"traffic"},
    "sweep": {"report"},
    "report": {"compare", "pipeline"},
}


def tool_of(module: str) -> str | None:
    """The folder of a tool's module; None for the trainer, and for a file of tools/ itself."""
    parts = module.split(".")
    path = MODULES.get(module)
    in_folder = path is not None and path.parent.name != "tools"
    return parts[2] if parts[:2] == ["megatron_llama", "tools"] and in_folder else None


def cross_tool_imports(tool: str, tree: ast.Module) -> list[str]:
    """Imports of other tools that no order allows."""
    allowed = {None, tool, "forecast", *AMONG_TOOLS.get(tool, ())}
    return sorted({module for module in imported(tree) if tool_of(module) not in allowed})


def nonempty(problems: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The files that have problems."""
    return {name: each for name, each in problems.items() if each}


def test_imports_go_down_without_cycles() -> None:
    """Includes imports within a package and imports for type checkers."""
    assert sum(len(packages) for packages in PACKAGES) == len(ROW), "a package is in the table once"
    packages = {package_of(module) for module in MODULES if module != "megatron_llama"}
    assert packages == set(ROW), "add the new package to the table in docs/design/tour.md, or remove the old one"
    packages = {path: package_of(module_of(path)) for path in SOURCES if module_of(path) != "megatron_llama"}
    upward = {name_of(path): upward_imports(package, parse_source(path)) for path, package in packages.items()}
    assert not nonempty(upward), "imports from a file's own row or above"
    edges = {name: set(imported(parse_source(path))) - {name} for name, path in MODULES.items()}
    for name, targets in edges.items():
        assert targets <= MODULES.keys(), f"{name} imports missing modules: {targets - MODULES.keys()}"
    assert not find_cycle(edges), "a cycle: " + " → ".join(find_cycle(edges))


TRAINER = [path for name, path in MODULES.items() if not name.startswith(("megatron_llama.tools", "data_prep"))]


def names_of_tools(tree: ast.Module) -> list[str]:
    """Imports of tools by a file, and strings with the name of one."""
    strings = (node.value for node in nodes_of(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [name for name in (*imported(tree), *strings) if name.startswith("megatron_llama.tools")]


def test_the_trainer_imports_no_tool_and_tools_one_another_in_one_order() -> None:
    """Not by name either, except in optional_tools.py, which has three names."""
    names = {name_of(path): names_of_tools(parse_source(path)) for path in TRAINER}
    assert len(names.pop("megatron_llama/optional_tools.py")) == 3
    assert not nonempty(names), "ask optional_tools.py"
    tools = {name: tool for name in MODULES if (tool := tool_of(name))}
    assert not nonempty({name: cross_tool_imports(tool, parse_source(MODULES[name])) for name, tool in tools.items()})


def test_arch_corpus_and_plan_import_no_torch() -> None:
    """Not even inside functions: a login node has answers in a second."""
    for path in SOURCES:
        if package_of(module_of(path)) in ("arch", "corpus", "plan", "config", "optional_tools", "topology"):
            names = [
                alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
                for node in nodes_of(parse_source(path))
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names
            ]
            assert not [name for name in names if name.partition(".")[0] == "torch"], name_of(path)


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    """Return the files of one import cycle, or []."""
    done: set[str] = set()

    def follow(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in sorted(edges[name]):
                if cycle := follow(other, [*path, name]):
                    return cycle
            done.add(name)
        return []

    return next((cycle for name in sorted(edges) if (cycle := follow(name, []))), [])


def test_files_and_functions_can_be_read_at_once() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in [*SOURCES, *PROGRAMS]}
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES_OF_A_FILE}
    assert not nonempty({name_of(path): long_functions(parse_source(path)) for path in [*SOURCES, *PROGRAMS]})


# A ratchet: lower a limit when its part shrinks. A feature stays inside, or deletes as much as it adds.
LIMITS_OF_LINES = {"the core": 41_769, "tools": 18_697, "data_prep": 6_297, "benchmarks": 4_500, "tests": 47_654}
LIMIT_OF_WORDS = 75_000


def test_parts_stay_within_their_limits() -> None:
    lines: Counter[str] = Counter()
    for folder in ("megatron_llama", "data_prep", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            tool = path.is_relative_to(ROOT / "megatron_llama/tools")
            part = "tools" if tool else "the core" if folder == "megatron_llama" else folder
            lines[part] += len(path.read_text(encoding="utf-8").splitlines())
    assert not {part: count for part, count in lines.items() if count > LIMITS_OF_LINES[part]}
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    assert sum(len(page.split()) for page in pages) <= LIMIT_OF_WORDS


SMALL_FILE_LINES, MOST_SMALL_FILES, MOST_FILES_OF_A_FOLDER = 100, 0.15, 15


def test_few_files_are_small_and_folders_are_not_crowded() -> None:
    """A subject is in one file, so a search ends after one hop."""
    files = [path for path in SOURCES if path.name != "__init__.py" and name_of(path).startswith("megatron_llama")]
    small = [path for path in files if len(path.read_text(encoding="utf-8").splitlines()) < SMALL_FILE_LINES]
    assert len(small) <= MOST_SMALL_FILES * len(files), sorted(map(name_of, small))
    folders = Counter(path.parent for path in files)
    assert not {name_of(folder): n for folder, n in folders.items() if n > MOST_FILES_OF_A_FOLDER}


def kind_tests(tree: ast.Module) -> list[str]:
    """Questions for the class of an optimizer, and comparisons with its name."""
    lines: list[str] = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            lines += [ast.unparse(node)] if re.search(r"Adam|SGD|Optimizer\b|Muon", ast.unparse(node.args[1])) else []
        elif isinstance(node, ast.Compare) and re.search(r"optim\.name\b|\w*(adam|sgd)\w*'", ast.unparse(node)):
            lines.append(ast.unparse(node))
    return lines


def test_no_code_of_the_trainer_asks_for_the_kind_of_an_optimizer() -> None:
    """Rows of config/optimizers.py and properties of optim/base.py answer instead."""
    assert not nonempty({name_of(path): kind_tests(parse_source(path)) for path in TRAINER})


def long_functions(tree: ast.Module) -> list[str]:
    functions = [node for node in nodes_of(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [each.name for each in functions if (each.end_lineno or 0) - each.lineno >= MOST_LINES_OF_A_FUNCTION]


# Methods and slots of a model's modules, which only their own class assigns. Constructors take parts instead.
SLOTS = "forward _forward_impl core_attention attend rotate activation normalize softmax kernels matmul".split()
MAY_ASSIGN_SLOTS = ("megatron_llama/tools/inference/kv_cache.py",)  # for the duration of a generation


def replaced_slots(tree: ast.Module) -> list[str]:
    """Return the assignments to slots of other objects, also by ``setattr``. ``ctx`` is autograd's."""
    lines: list[str] = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            attributes = [each for target in targets for each in ast.walk(target) if isinstance(each, ast.Attribute)]
            pairs = [(each.value, each.attr) for each in attributes if isinstance(each.ctx, ast.Store)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            pairs = [(node.args[0], getattr(node.args[1], "value", ""))]
        else:
            continue
        lines += [ast.unparse(node) for owner, name in pairs if name in SLOTS and ast.unparse(owner) not in OWNERS]
    return lines


OWNERS = "self", "ctx"


def test_no_code_replaces_a_method_of_a_built_module() -> None:
    lines = {name_of(path): replaced_slots(parse_source(path)) for path in SOURCES}
    assert nonempty(lines).keys() == set(MAY_ASSIGN_SLOTS), nonempty(lines)


def test_the_library_does_not_print_and_every_file_says_what_it_is() -> None:
    # A run's messages use its logger, its progress line or stderr, so that users can redirect them.
    library = [path for path in SOURCES if package_of(module_of(path)) != "data_prep"]
    assert not nonempty({name_of(path): prints(parse_source(path)) for path in library})
    trees = {name_of(path): parse_source(path) for path in [*SOURCES, *PROGRAMS]}
    assert not [name for name, tree in trees.items() if tree.body and not ast.get_docstring(tree)]


def prints(tree: ast.Module) -> list[int]:
    """Lines with a call of ``print``."""
    calls = [node for node in nodes_of(tree) if isinstance(node, ast.Call)]
    return [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]


# Where a device's name may stand: the devices, the list of choices, the planner's table of hardware; and where other
# programs' files are read, whose keys have such names.
MAY_NAME_DEVICES = (
    "megatron_llama/devices/",
    "megatron_llama/checkpoint/foreign/source_settings.py",
    "megatron_llama/config/settings.py",
    "megatron_llama/tools/import_config/",
)
# More files that may name the CPU: the planner's table of hardware has a row for it. Other code asks the Device, or
# writes ``devices.HOST`` for the host's memory. A method such as ``.cpu()`` only moves a tensor there, so it may.
MAY_NAME_THE_CPU = (
    *MAY_NAME_DEVICES,
    "megatron_llama/tools/forecast/hardware.py",
    "megatron_llama/tools/forecast/this_machine.py",
    "scripts/",
)
# Tools that replace or rate the host's device compare with its name; the trainer does not.
MAY_COMPARE_WITH_THE_HOST = ("megatron_llama/devices/", "megatron_llama/tools/")
PROGRAM = [ROOT / "train.py", *SOURCES, *sorted((ROOT / "scripts").glob("*.py"))]
IN_CODE = re.compile(r"cuda|neuron|habana|(?<![a-z])hpu|nccl|hccl", re.IGNORECASE)
# In prose the makers' names are free (CUDA, Trainium, Gaudi, NCCL); names as the program spells them are not.
IN_PROSE = re.compile(r"\bcuda\b|neuron|habana|\bhpu\b|\bnccl\b|\bhccl\b")


def device_names(source: str) -> Iterator[str]:
    """Return the lines of code, comments or docstrings that name a device."""
    source = source.replace("neuronx-nemo-megatron", "")  # a program's name
    tree = parse(source)
    documentation = {
        id(node.value) for node in nodes_of(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in nodes_of(tree):
        if id(node) in documentation:
            continue
        # Names, attributes, parameters, keywords, imports, definitions and strings are all fields that are text.
        texts = [value for _, value in ast.iter_fields(node) if isinstance(value, str)]
        yield from (text for text in texts if IN_CODE.search(text))
    prose = [node.value for node in nodes_of(tree) if id(node) in documentation and isinstance(node, ast.Constant)]
    prose += [t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    yield from (text for text in prose if isinstance(text, str) and IN_PROSE.search(text))


def test_nobody_else_names_a_device() -> None:
    others = [path for path in PROGRAM if not name_of(path).startswith(MAY_NAME_DEVICES)]
    names = {name_of(path): list(device_names(path.read_text(encoding="utf-8"))) for path in others}
    assert not nonempty(names), "ask the Device instead"


def names_of_the_cpu(source: str) -> Iterator[str]:
    """Strings that are the CPU's name."""
    for node in nodes_of(parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"cpu(:\d+)?", node.value):
            yield f"line {node.lineno}: {node.value!r}"


def comparisons_with_the_host(source: str) -> Iterator[str]:
    """Comparisons with ``devices.HOST``, which are questions for the Device."""
    for node in nodes_of(parse(source)):
        if isinstance(node, ast.Compare):
            if any("HOST" in (getattr(each, "attr", ""), getattr(each, "id", "")) for each in ast.walk(node)):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_nobody_else_compares_with_the_cpu() -> None:
    sources = {name_of(path): path.read_text(encoding="utf-8") for path in PROGRAM}
    named = {name: list(names_of_the_cpu(text)) for name, text in sources.items()}
    compared = {name: list(comparisons_with_the_host(text)) for name, text in sources.items()}
    assert not nonempty({name: each for name, each in named.items() if not name.startswith(MAY_NAME_THE_CPU)})
    assert not nonempty({n: each for n, each in compared.items() if not n.startswith(MAY_COMPARE_WITH_THE_HOST)})


# Searched as text: parsing all tests takes seconds.
IMPORT_OF_A_TEST = re.compile(r"^ *(?:from|import) tests\b.*?(?:\([^)]*)?\b(?:test_|conftest)", re.MULTILINE)
KINDS = ("isinstance(x, optim.Adam)", "isinstance(x, (int, OneBitAdam))", "config.optim.name == 'x'", "n == 'sgd'")
HOSTS = (
    "if x.device.type == 'cpu': pass",
    "kernel = {'cpu': 'tiles'}[name]",
    "z = torch.empty(1, device='cpu:0')",
    "pinned = 'auto' if devices.HOST != name else ''",
    "if name in (HOST, 'auto'): pass",
)
REPLACED = ("block.forward = f", "a.b, layer._forward_impl = 1, f", "setattr(attention, 'attend', f)")
NAMED = (
    "x = torch.cuda.Event()",
    "if kind == 'cuda': pass",
    "import torch_neuronx",
    "from torch.cuda import nvtx",
    "def f(cuda=None): pass",
    "f(use_cuda=True)",
    "x = f'{a}:hpu'",
    "dist.init_process_group('nccl')",
    "x = 1  # as on device=neuron",
    'def f():\n    """Calls torch.cuda."""',
)
IMPORTED = ("from tests.a.test_b import c", "  import tests.conftest", "from tests.a import (\n    b,\n    test_c,\n)")
VIOLATIONS: list[tuple[Callable[[str], Iterable[Any]], str]] = [
    (lambda text: upward_imports("model", parse(text)), "def later():\n    from megatron_llama.train import loop"),
    (lambda text: upward_imports("model", parse(text)), "if TYPE_CHECKING: import megatron_llama.optim.adam"),
    (lambda text: upward_imports("model", parse(text)), "from megatron_llama import launch"),
    (lambda text: upward_imports("data", parse(text)), "from megatron_llama.optim import adam"),
    (lambda text: upward_imports("data_prep.lib", parse(text)), "from data_prep.sft import main"),
    (lambda text: cross_tool_imports("rehearse", parse(text)), "import megatron_llama.tools.plan.forecast_run"),
    (lambda text: find_cycle({"a": {"b"}, "b": {"c"}, "c": {text}}), "b"),
    (lambda text: long_functions(parse(text)), "def f():\n" + "    x = 1\n" * MOST_LINES_OF_A_FUNCTION),
    (lambda text: prints(parse(text)), "print(1)"),
    *((lambda text: kind_tests(parse(text)), line) for line in KINDS),
    *((lambda text: replaced_slots(parse(text)), line) for line in REPLACED),
    *((lambda text: [*names_of_the_cpu(text), *comparisons_with_the_host(text)], line) for line in HOSTS),
    *((device_names, f"{line}\n") for line in NAMED),
    *((IMPORT_OF_A_TEST.findall, line) for line in IMPORTED),
]


@pytest.mark.parametrize(("check", "text"), VIOLATIONS, ids=lambda value: value[:60] if isinstance(value, str) else "")
def test_a_violation_is_reported(check: Callable[[str], Iterable[Any]], text: str) -> None:
    assert list(check(text))


def test_tests_share_helpers_and_not_each_other() -> None:
    """Helpers are imported from helper files, so that changing a test cannot break another one."""
    paths = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    imports = {name_of(path): IMPORT_OF_A_TEST.findall(path.read_text(encoding="utf-8")) for path in paths}
    assert not nonempty(imports), "move what they need to a helper file"
