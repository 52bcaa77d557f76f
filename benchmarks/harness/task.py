"""What every contestant trains: the model's shape, the tokens, the optimizer; and what it reports about itself.

The peers' programs import this file in their own environments, so it needs nothing but torch.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_llama.topology import Grid


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        return Grid.of(self).world_size


@dataclass(frozen=True)
class Task:
    """One contestant's work, the same for all of a cell but for ``mode``, ``layout`` and this project's settings."""

    preset: str
    """Name of the model in conf/model."""
    model: dict[str, Any]
    """The fields of ModelConfig, derived ones included."""
    parameters: int
    """Weights that the model must have; a tied head counts once."""
    seq_length: int
    """Tokens."""
    batch_size: int
    """Sequences of a step."""
    micro_batch_size: int
    """Sequences that a rank of this project takes at a time; the peers take the batch whole."""
    precision: str
    """fp32, or bf16: products in bf16, weights and optimizer states in fp32."""
    mode: str
    """eager or compiled."""
    layout: Layout
    device: str
    """torch's device type."""
    threads: int
    """Of all ranks together."""
    optimizer: dict[str, Any]
    """AdamW: lr, betas, eps, weight_decay, and clip, the largest gradient norm."""
    seed: int
    cache: str = ""
    """Folder of the compiler's cache; published records lack it."""
    started: float = 0.0
    """When the program was started, seconds since the epoch."""
    address: str = ""
    """Socket of the process that gives the turns."""
    recompute: str = "none"
    """What this project makes again in the backward pass (trainer.recompute); the peers keep everything."""
    zero: int = 1
    """This project's trainer.zero; at 3 one rank, too, casts its weights block by block."""
    state_bits: int = 32
    """Of this project's Adam's states: 8 for optim.state_bits=8, or 32."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Task:
        """The task that ``dataclasses.asdict`` made ``fields`` of."""
        return cls(**{**fields, "layout": Layout(**fields["layout"])})

    def text(self, step: int) -> torch.Tensor:
        """The token ids of step ``step`` [batch, seq + 1], int64, the same for every contestant.

        Uniformly random: what they are changes no time, and the loss begins near the logarithm of the vocabulary.
        """
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        shape = (self.batch_size, self.seq_length + 1)
        return torch.randint(0, self.model["vocab_size"], shape, generator=generator)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of a step on the device, each [batch, seq], int64."""
        text = self.text(step).to(self.device)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What autocast computes products in; None for fp32, where there is no autocast."""
        return torch.bfloat16 if self.precision == "bf16" else None


@dataclass(frozen=True)
class Facts:
    """What a contestant says about itself, for the check that the comparison is fair and for the table."""

    parameters: int
    """Elements of its trained tensors, each counted once, over all ranks."""
    weight_dtype: str
    """Of the weights that the optimizer updates, such as float32."""
    compute_dtype: str
    """Of the products inside a block, as seen in a forward pass, or as the plan says."""
    tokens_per_step: int
    tokens_checksum: int
    """Of the first step's token ids, as ``checksum`` makes it."""
    optimizer: str
    """Class, and how it is implemented."""
    clip: float | None
    """Largest gradient norm."""
    attention: str
    versions: dict[str, str]


def checksum(tokens: torch.Tensor) -> int:
    """A number that equal token ids share."""
    return zlib.crc32(tokens.cpu().contiguous().numpy().tobytes())


def count_parameters(model: torch.nn.Module) -> int:
    """Elements of the trained parameters; shared ones count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def weight_dtype(model: torch.nn.Module) -> str:
    """The dtypes of the trained parameters, as text."""
    return " ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}))


def product_dtype(model: torch.nn.Module, layer: str, forward: Any) -> str:
    """The dtype of the output of the module named ``layer``, as ``forward`` runs it on a few tokens."""
    seen: list[str] = []
    hook = model.get_submodule(layer).register_forward_hook(
        lambda module, inputs, output: seen.append(str(output.dtype).removeprefix("torch."))
    )
    try:
        with torch.no_grad():
            forward()
    finally:
        hook.remove()
    return seen[0]


def facts_of(
    task: Task,
    model: torch.nn.Module,
    *,
    compute_dtype: Callable[[], str],
    optimizer: str,
    attention: str,
    versions: dict[str, str],
) -> Facts:
    """What a peer in one process says about itself; ``versions`` of its packages, without torch's.

    ``compute_dtype`` is called last: its forward pass may leave ``fully_shard``'s cast weights in the model.
    """
    tokens, _ = task.batch(1)
    return Facts(
        parameters=count_parameters(model),
        weight_dtype=weight_dtype(model),
        compute_dtype=compute_dtype(),
        tokens_per_step=tokens.numel(),
        tokens_checksum=checksum(tokens),
        optimizer=optimizer,
        clip=task.optimizer["clip"],
        attention=attention,
        versions={**versions, "torch": torch.__version__},
    )


def fused_adamw(task: Task, model: torch.nn.Module) -> torch.optim.AdamW:
    """torch's fused AdamW with the task's settings, for all of the model's parameters."""
    options = task.optimizer
    return torch.optim.AdamW(
        model.parameters(),
        lr=options["lr"],
        betas=tuple(options["betas"]),
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        fused=True,
    )
