"""The training task of all programs (model shape, tokens, optimizer), and the facts that a program reports.

The peers' programs import this file in their environments, so it requires only torch.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        return math.prod(asdict(self).values())


@dataclass(frozen=True)
class TrainingTask:
    """Work of one program. Programs of a comparison differ only in mode, layout and this project's settings."""

    preset: str
    """Name of the model in conf/model."""
    model: dict[str, Any]
    """Fields of ModelConfig, derived ones included."""
    parameters: int
    """Expected number of weights; tied embeddings count once."""
    seq_length: int
    """Tokens per sequence."""
    batch_size: int
    """Sequences per step."""
    micro_batch_size: int
    """Sequences per micro batch of this project; peers use the whole batch."""
    precision: str
    """fp32, or bf16: matmuls in bf16, weights and optimizer states in fp32."""
    mode: str
    """eager or compiled."""
    layout: Layout
    device: str
    """torch's device type."""
    threads: int
    """Threads over all ranks."""
    optimizer: dict[str, Any]
    """AdamW's lr, betas, eps and weight_decay, and ``clip``, the maximum gradient norm."""
    seed: int
    cache: str = ""
    """Folder of the compile cache; empty in published records."""
    started: float = 0.0
    """Time of the program's start, seconds since the epoch."""
    address: str = ""
    """Socket of the benchmark process."""
    recompute: str = "none"
    """This project's trainer.recompute; peers recompute nothing."""
    zero: int = 1
    """This project's trainer.zero; with 3, a single rank also casts its weights block by block."""
    state_bits: int = 32
    """Bits of this project's Adam states: 8 (optim.state_bits=8) or 32."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainingTask:
        fields = json.loads(text)
        return cls(**{**fields, "layout": Layout(**fields["layout"])})

    def text(self, step: int) -> torch.Tensor:
        """Return the token ids of ``step`` [b, s + 1], int64, equal for all programs.

        They are uniformly random, so the first loss is near log(vocabulary size).
        """
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        shape = (self.batch_size, self.seq_length + 1)
        return torch.randint(0, self.model["vocab_size"], shape, generator=generator)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels of a step on the device, each [b, s], int64."""
        text = self.text(step).to(self.device)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Autocast dtype; None for fp32, which does not use autocast."""
        return torch.bfloat16 if self.precision == "bf16" else None


@dataclass(frozen=True)
class Facts:
    """Properties that a program reports, for the check of equal work and for the table."""

    parameters: int
    """Elements of the trained tensors over all ranks, shared ones counted once."""
    weight_dtype: str
    """Dtype of the weights that the optimizer updates, such as float32."""
    compute_dtype: str
    """Dtype of the matmuls in a block, from a forward pass or the plan."""
    tokens_per_step: int
    tokens_checksum: int
    """``checksum`` of the first step's token ids."""
    optimizer: str
    """Class and implementation."""
    clip: float | None
    """Maximum gradient norm."""
    attention: str
    versions: dict[str, str]


def checksum(tokens: torch.Tensor) -> int:
    """Return the CRC-32 of token ids."""
    return zlib.crc32(tokens.cpu().contiguous().numpy().tobytes())


def weight_dtype(model: torch.nn.Module) -> str:
    """Return the dtypes of the trained parameters, separated by spaces."""
    return " ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}))


def matmul_dtype(model: torch.nn.Module, layer: str, forward: Any) -> str:
    """Return the output dtype of the module named ``layer`` when ``forward`` runs the model."""
    dtypes: list[str] = []

    def note(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        dtypes.append(str(output.dtype).removeprefix("torch."))

    with model.get_submodule(layer).register_forward_hook(note), torch.no_grad():
        forward()
    return dtypes[0]


def collect_facts(
    task: TrainingTask,
    model: torch.nn.Module,
    *,
    compute_dtype: Callable[[], str],
    optimizer: str,
    attention: str,
    versions: dict[str, str],
) -> Facts:
    """Return the facts of a peer that trains in one process.

    Args:
        compute_dtype: called after the weights' dtype is read, as its forward pass may leave the cast weights of
            ``fully_shard`` in the model.
        versions: versions of the peer's packages, without torch.
    """
    tokens, _ = task.batch(1)
    return Facts(
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        weight_dtype=weight_dtype(model),
        compute_dtype=compute_dtype(),
        tokens_per_step=tokens.numel(),
        tokens_checksum=checksum(tokens),
        optimizer=optimizer,
        clip=task.optimizer["clip"],
        attention=attention,
        versions={**versions, "torch": torch.__version__},
    )


def fused_adamw(task: TrainingTask, model: torch.nn.Module) -> torch.optim.AdamW:
    """Build torch's fused AdamW with the task's settings for all parameters of the model."""
    options = task.optimizer
    return torch.optim.AdamW(
        model.parameters(),
        lr=options["lr"],
        betas=tuple(options["betas"]),
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        fused=True,
    )
