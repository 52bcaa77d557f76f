"""Compile the Triton kernels of Llama 7B's blocks for several generations of GPUs; print registers and spills.

    python -m benchmarks.verify.kernels > table.md

Needs no GPU: the runtime of tests/cuda runs compiled steps with a CUDA build of torch. Inductor's kernels of sm_90 are
compiled again for the other architectures, with the same warps and block sizes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.results import conditions
from megatron_llama.system.tables import markdown_table
from tests.cuda.build import missing, site_packages
from tests.cuda.harness import open_runtime, train_words

ARCHITECTURES = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "sm_120": 120}
PRECISIONS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("trainer.precision=bf16",),
    "bf16, selective recomputation": ("trainer.precision=bf16", "trainer.recompute=selective"),
    "float8, tensorwise": ("trainer.precision=bf16", "trainer.float8=tensorwise"),
    "bf16, stochastic rounding": ("trainer.precision=bf16_sr",),
}
SHAPE = (
    *("model=llama7b", "model.num_hidden_layers=1", "model.vocab_size=8192"),
    *("data.seq_length=4096", "trainer.micro_batch_size=1", "trainer.global_batch_size=1"),
    *("trainer.steps=1", "trainer.compile=true"),
)
CACHE = "TRITON_CACHE_DIR"
CUOBJDUMP = "triton/backends/nvidia/bin/cuobjdump"


def resources(cubin: bytes) -> tuple[int, int, int]:
    """Return registers per thread, bytes on the stack per thread and bytes of shared memory of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(site_packages() / CUOBJDUMP), "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, shared = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "SHARED"))  # type: ignore[index]
    return registers, stack, shared


def compile_for(kernel: Path, capability: int) -> tuple[int, int, int] | None:
    """Compile a kernel of Triton's cache for another architecture; return its ``resources``, or None after an error."""
    import triton
    from triton.backends.compiler import GPUTarget

    stored = json.loads(kernel.with_suffix(".json").read_text(encoding="utf-8"))
    options = {name: stored[name] for name in ("num_warps", "num_stages", "num_ctas")}
    try:
        compiled = triton.compile(str(kernel), target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as error:
        print(f"{kernel.stem}, sm_{capability}: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return resources(compiled.asm["cubin"])


def main() -> int:
    """Train compiled steps, compile their kernels for all architectures, and print a Markdown table."""
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    rows = []
    with tempfile.TemporaryDirectory() as work, open_runtime(Path(work, "libraries")) as runtime:
        os.environ[CACHE] = str(Path(work, "compiled"))
        for number, (name, words) in enumerate(PRECISIONS.items()):
            run, cache = Path(work, str(number)), Path(work, f"cache{number}")
            settings = {CACHE: str(cache), "TORCHINDUCTOR_CACHE_DIR": f"{cache}.inductor"}
            runtime.start(train_words(run, (*SHAPE, *words)), run, 1, settings).check()
            kernels = sorted(cache.rglob("*.ttir"))
            for architecture, capability in ARCHITECTURES.items():
                sizes = [size for kernel in kernels if (size := compile_for(kernel, capability)) is not None]
                registers, stacks, shared = zip(*sizes, strict=True)
                counts = (f"{len(sizes)} of {len(kernels)}", max(registers), sum(map(bool, stacks)), max(stacks))
                rows.append((name, architecture, *map(str, counts), f"{max(shared):,}"))
    heads = ("step", "architecture", "compiled", "most registers", "with a stack", "its bytes", "shared memory, bytes")
    print(f"{conditions()}\n\n" + "\n".join(markdown_table(heads, rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
