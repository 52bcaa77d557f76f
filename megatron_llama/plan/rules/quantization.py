"""Rules on what is kept in few bits by blocks of a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_llama.arch.shapes import Matrix, matrices
from megatron_llama.config.fields import get
from megatron_llama.config.precision import QUANTIZATION_BLOCK, QUANTIZED_BITS, STATE_BLOCK
from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import Config
from megatron_llama.plan.rules.layout import layout_tp
from megatron_llama.plan.rules.rule import nearest_legal, reads


@reads("finetune.frozen_dtype", "trainer.tp", "model")
def quantized_blocks_are_whole(config: Config, world_size: int) -> Iterator[Problem]:
    """A block of a frozen matrix lies in one row, on one tensor-parallel rank."""
    kind, every = config.finetune.frozen_dtype, [*matrices(config.model).values()]
    if config.finetune.method == "lora" and kind in QUANTIZED_BITS:
        name, instead = "finetune.frozen_dtype", "finetune.frozen_dtype=bf16"
        yield from _whole_blocks(config, world_size, name, instead, QUANTIZATION_BLOCK, every)


@reads("optim.state_bits", "optim.name", "finetune", "trainer.tp", "model")
def state_blocks_are_whole(config: Config, world_size: int) -> Iterator[Problem]:
    """A block of an 8-bit optimizer state lies in one row, on one tensor-parallel rank."""
    optim, table = config.optim, matrices(config.model)
    if optim.state_bits != 8:
        return
    if reason := optim.row.refuses.get("optim.state_bits"):
        rule = f"optim.name={optim.name} {reason}"
        yield Problem("optim.state_bits", 8, rule, "write optim.state_bits=null, or optim.name=adamw")
        return
    modules = config.finetune.lora_target_modules if config.finetune.method == "lora" else table
    trained = [matrix for module, matrix in table.items() if module in modules]
    yield from _whole_blocks(config, world_size, "optim.state_bits", "optim.state_bits=null", STATE_BLOCK, trained)


def _whole_blocks(
    config: Config, world_size: int, name: str, instead: str, block: int, kept: Sequence[Matrix]
) -> Iterator[Problem]:
    """Each row of the matrices that are ``kept`` so, and each part of it that tensor parallelism cuts, is a number of
    blocks: where a block has other values in another layout, so has the run."""
    tp, value = config.trainer.tp, get(config, name)
    works = f"{name}={value} works on blocks of {block} values of a row"

    def module(matrix: Matrix) -> str:
        return matrix.name.partition(".")[2]

    odd = [matrix for matrix in kept if matrix.shape[1] % block]
    if odd:
        rule = f"works on blocks of {block} values of a row, and {module(odd[0])} has rows of {odd[0].shape[1]}"
        yield Problem(name, value, rule, f"write {instead}")
        return

    def cut(size: int) -> list[Matrix]:
        """The row-parallel matrices whose blocks this size of tp would cut."""
        return [m for m in kept if m.cut == 1 and m.shape[1] % size == 0 and m.shape[1] // size % block]

    if found := cut(tp):
        width = found[0].shape[1]
        rule = f"{works}; {module(found[0])} has rows of {width}, which is {width // tp} on a rank"
        whole = [size for size in layout_tp(config, world_size) if not cut(size)]
        advice = nearest_legal("trainer.tp", tp, whole)
        yield Problem("trainer.tp", tp, rule, f"{advice}, or {instead}" if advice else f"write {instead}")
