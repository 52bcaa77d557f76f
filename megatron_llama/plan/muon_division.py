"""Division of the blocks' matrices among the ranks of a pipeline stage, for optimizers that need whole matrices (Muon).

Members are the ranks of a stage, numbered along tp, cp and dp: tp varies fastest. Each matrix has one owner, whichever
member has the least work so far (Graham 1969, longest processing time first). Matrices are processed in rounds. In a
round each member owns at most one matrix, in two exchanges:

    gather    the members of the owner's replica send their parts; a part that several of them hold is sent once
    scatter   the owner sends the result's parts to the members of all replicas

This module has the numbers only; optim/muon.py moves tensors, tools/forecast/traffic.py counts bytes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_llama.arch.hf_tp_mapping import Rectangle, TensorParallel, keep_rows, rectangles, rows_of_shard
from megatron_llama.arch.parameters import FUSED, Matrix, fused_matrix, head_dim, kv_copies, matrices
from megatron_llama.config.settings import ModelConfig
from megatron_llama.plan.plan import Plan
from megatron_llama.topology import virtual_stages_of

NEWTON_SCHULZ_STEPS = 5
"""Steps of the published iteration."""


class MatrixWork:
    """The matrices of a pipeline stage, their owners and the parts that members hold."""

    def __init__(self, plan: Plan, pp_rank: int) -> None:
        self._plan = plan
        self.tp, self.shard_size = plan.config.trainer.tp, plan.shard_size
        self.members = self.tp * plan.data_ranks
        stages = virtual_stages_of(pp_rank, plan.config.trainer.pp, plan.config.trainer.vpp)
        layers = [layer for stage in stages for layer in plan.stage_layers[stage]]
        self._matrices = matrices(plan.model)
        self._sizes: dict[tuple[str, int], int] = {}
        self._parts: dict[tuple[str, int, int], list[Rectangle]] = {}
        split = bool(plan.config.optim.split_heads)
        costs = {
            _name(layer, matrix): newton_schulz_flops(matrix.shape, heads_of(plan.model, module, split=split))
            for layer in layers
            for module, matrix in self._matrices.items()
        }
        self.flops = _divide(costs, self.members)
        """FLOPs of each member's matrices, by name."""

    @property
    def rounds(self) -> Iterator[dict[int, str]]:
        """Yield each round: names of the matrices by owner."""
        owned = [list(names) for names in self.flops]
        for number in range(max(map(len, owned))):
            yield {member: names[number] for member, names in enumerate(owned) if number < len(names)}

    def replica(self, member: int) -> int:
        """Return the number of a member's replica of the sharded weights."""
        return member // self.tp // self.shard_size

    def same_replica(self, member: int) -> range:
        """Return the members of a member's replica."""
        size = self.tp * self.shard_size
        return range(self.replica(member) * size, (self.replica(member) + 1) * size)

    def shape(self, name: str) -> tuple[int, int]:
        """Return the (rows, columns) of matrix ``name``."""
        return self._matrices[name.split(".")[-2]].shape

    def parts(self, name: str, member: int) -> list[Rectangle]:
        """Return the rectangles of matrix ``name`` on a member, with local offsets in its shard of the parameter."""
        data, tp_rank = divmod(member, self.tp)
        module, shard_rank = name.split(".")[-2], data % self.shard_size
        key = (module, tp_rank, shard_rank)
        if key not in self._parts:
            matrix = self._matrices[module]
            parameter = _name(0, matrix).removeprefix("model.").replace(module, fused_matrix(module))
            place = TensorParallel(tp_rank, self.tp)
            whole = rectangles(parameter, self._plan.model, place, self._plan.padded_vocab_size)
            held = keep_rows(whole, *rows_of_shard(sum(part.size[0] for part in whole), shard_rank, self.shard_size))
            self._parts[key] = [part for part in held if part.name == _name(0, matrix)]
        return [replace(part, name=name) for part in self._parts[key]]

    def sent_parts(self, name: str, member: int) -> list[Rectangle]:
        """Return the rectangles that a member sends to the owner of matrix ``name``."""
        return [part for part in self.parts(name, member) if part.replica == 0]

    def sent_values(self, member: int) -> Iterator[tuple[int, int]]:
        """Yield the numbers of values that a member sends in each round: to owners, as an owner. Own parts count.

        A replica of one member sends nothing to owners.
        """
        for owners in self.rounds:
            gathered = [name for owner, name in owners.items() if self.replica(owner) == self.replica(member)]
            alone = len(self.same_replica(member)) == 1
            to_owners = 0 if alone else sum(self._sent(name.split(".")[-2], member) for name in gathered)
            scattered = 0
            if member in owners:
                module = owners[member].split(".")[-2]
                copies = kv_copies(self._plan.model, self.tp) if module in ("k_proj", "v_proj") else 1
                scattered = math.prod(self.shape(owners[member])) * copies * (self._plan.data_ranks // self.shard_size)
            yield to_owners, scattered

    def _sent(self, module: str, member: int) -> int:
        """Return the number of values of a matrix that a member sends to its owner."""
        name = _name(0, self._matrices[module])
        if (module, member) not in self._sizes:
            self._sizes[module, member] = sum(math.prod(part.size) for part in self.sent_parts(name, member))
        return self._sizes[module, member]


def newton_schulz_flops(shape: tuple[int, int], heads: int = 1) -> int:
    """Return the FLOPs of the Newton-Schulz iteration on each of ``heads`` equal blocks of a matrix's rows.

    A step of a block [m, n], m <= n, has two GEMMs of [m, m] with [m, n] and one of [m, m] with [m, m].
    """
    small, large = sorted((shape[0] // heads, shape[1]))
    return heads * NEWTON_SCHULZ_STEPS * (4 * small * small * large + 2 * small**3)


def heads_of(model: ModelConfig, module: str, *, split: bool) -> int:
    """Return the number of separately orthogonalized blocks of a matrix: heads of q, k and v if ``split``, else 1."""
    if not split or module not in FUSED["qkv_proj"]:
        return 1
    return matrices(model)[module].shape[0] // head_dim(model)


def _name(layer: int, matrix: Matrix) -> str:
    return f"model.layers.{layer}.{matrix.name}.weight"


def _divide(costs: dict[str, int], members: int) -> list[dict[str, int]]:
    """Divide names among members by cost: the most expensive first, to the member with the least cost so far."""
    divided: list[dict[str, int]] = [{} for _ in range(members)]
    loads = [(0, member) for member in range(members)]
    for name in sorted(costs, key=lambda each: -costs[each]):  # stable: equal costs keep their order
        load, member = heapq.heappop(loads)
        divided[member][name] = costs[name]
        heapq.heappush(loads, (load + costs[name], member))
    return divided
