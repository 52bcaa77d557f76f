"""Build the CUDA runtime on host memory: ``python -m tests.cuda.build FOLDER``.

Needs g++, nm and a CUDA build of torch, whose dependencies include CUDA's headers. Each library gets the functions of
``runtime/``, and a stub for each further function that torch's libraries import. A stub logs its name and returns 0.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("runtime")
CUDA_MAJOR = "13"
BUILD_SECONDS = 240


@dataclass(frozen=True)
class Library:
    """A shared library: file name, sources, names of functions that it answers for, version of its symbols."""

    file: str
    sources: tuple[str, ...]
    functions: str | None = None
    version: str | None = None


CUDART = f"libcudart.so.{CUDA_MAJOR}"
LIBRARIES = (
    Library(CUDART, ("record", "streams", "memory", "device", "launch"), r"(__)?cuda[A-Z]\w*", CUDART),
    Library(f"libcublas.so.{CUDA_MAJOR}", ("cublas",), r"cublas(?!Lt)\w+", f"libcublas.so.{CUDA_MAJOR}"),
    Library(f"libcublasLt.so.{CUDA_MAJOR}", ("cublaslt",), r"cublasLt\w+", f"libcublasLt.so.{CUDA_MAJOR}"),
    Library("libnccl.so.2", ("channel", "reduction", "nccl"), r"p?nccl[A-Z]\w*"),
    Library("libcuda.so.1", ("driver", "fork"), r"cu[A-Z](?!ile[A-Z])\w+"),
    Library(f"libnvrtc.so.{CUDA_MAJOR}", ("nvrtc",), version=f"libnvrtc.so.{CUDA_MAJOR}"),
    Library("libnvidia-ml.so.1", ("nvml",)),
)
NOT_PRELOADED = ("libnvidia-ml.so.1",)  # torch loads it by name


def missing() -> str | None:
    """Return the reason why the runtime cannot be built or used here, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if torch.version.cuda.split(".")[0] != CUDA_MAJOR:
        return f"the runtime is for CUDA {CUDA_MAJOR}; torch was built for CUDA {torch.version.cuda}"
    if os.path.exists("/dev/nvidiactl"):
        return "this machine has an NVIDIA driver"
    for program in ("g++", "nm"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if absent := [str(folder) for folder in include_folders() if not folder.is_dir()]:
        return f"CUDA's headers are not installed: {', '.join(absent)}"
    return None


def site_packages() -> Path:
    return Path(sysconfig.get_paths()["purelib"])


def include_folders() -> list[Path]:
    """Return the folders of CUDA's and NCCL's headers; Triton's package has the remaining ones."""
    base = site_packages()
    parts = (f"nvidia/cu{CUDA_MAJOR}/include", "nvidia/nccl/include", "triton/backends/nvidia/include")
    return [base / part for part in parts]


def imported_functions() -> list[tuple[str, str | None]]:
    """Return (name, version) of each function that torch's and NVIDIA's libraries import."""
    base = site_packages()
    libraries = [*base.glob("torch/lib/*.so*"), *base.glob("nvidia/*/lib/*.so*")]
    words = ["nm", "-D", "--undefined-only", *map(str, libraries)]
    text = subprocess.run(words, capture_output=True, text=True, check=True, timeout=BUILD_SECONDS).stdout
    return sorted(
        {(name, version or None) for name, version in re.findall(r"^ +[Uw] (\w+)(?:@(\S+))?$", text, re.M)}, key=str
    )


def build(folder: Path) -> None:
    """Write the libraries to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    imported = imported_functions()
    names = [name for library in LIBRARIES for name in library.sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda name: _compile(SOURCES / f"{name}.cpp", folder), names))
    for library in LIBRARIES:  # the first has functions that the others use
        _link(library, folder, imported)


def _compile(source: Path, folder: Path) -> None:
    flags = ["-std=c++17", "-O1", "-fPIC", "-w", *(f"-I{path}" for path in include_folders())]
    _run(["g++", *flags, "-c", str(source), "-o", str(folder / f"{source.stem}.o")])


def _link(library: Library, folder: Path, imported: Iterable[tuple[str, str | None]]) -> None:
    objects = [str(folder / f"{name}.o") for name in library.sources]
    words = ["g++", "-shared", f"-Wl,-soname,{library.file}", *objects]
    if library.functions is not None:
        stubs = folder / f"{library.file}.stubs.cpp"
        stubs.write_text(_stubs(library, objects, imported))
        words += ["-fPIC", "-w", str(stubs)]
    if library.version is not None:
        script = folder / f"{library.file}.map"
        script.write_text(f"{library.version} {{ global: *; }};\n")
        words.append(f"-Wl,--version-script={script}")
    if library.file != CUDART:
        words += [str(folder / CUDART), f"-Wl,-rpath,{folder}"]
    _run([*words, "-o", str(folder / library.file), "-ldl", "-lpthread"])


def _stubs(library: Library, objects: list[str], imported: Iterable[tuple[str, str | None]]) -> str:
    """Return C++ code of the functions that ``library`` has to offer and does not define."""
    text = subprocess.run(["nm", "--defined-only", *objects], capture_output=True, text=True, check=True).stdout
    defined = set(re.findall(r" T (\w+)$", text, re.M))
    assert library.functions is not None
    names = {
        name
        for name, version in imported
        if re.fullmatch(library.functions, name) and name not in defined and version in (None, library.version)
    }
    lines = [f'int {name}() {{ host_cuda_mark_stub("{name}"); return 0; }}' for name in sorted(names)]
    return "\n".join(['extern "C" {', "void host_cuda_mark_stub(const char*);", *lines, "}", ""])


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=BUILD_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stderr[-8000:]}")


if __name__ == "__main__":
    if reason := missing():
        sys.exit(reason)
    build(Path(sys.argv[1]).resolve())
