"""The tasks of a cell of the comparison: one model in one precision, and who trains it in which mode and layout."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

from megatron_llama.arch.shapes import head_dim, kv_heads, parameters
from megatron_llama.cli import CONF_DIR
from megatron_llama.config import Config, ConfigError, Problem, load_config
from megatron_llama.devices.processor import instruction_set, processor
from megatron_llama.tools.bench.contest import Layout, Task
from megatron_llama.tools.bench.environments import BENCH_DIR, OURS, PEERS, Peer

ONE = "one"


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for in every cell."""

    peers: Sequence[str]
    modes: Sequence[str]
    layouts: Sequence[str]
    """Of this project; the peers train in one process."""
    recompute: Sequence[str]
    """Of this project, settings of trainer.recompute."""
    zero: Sequence[int]
    """Of this project, settings of trainer.zero."""
    device: str
    threads: int
    batch_size: int
    """Sequences of a step."""
    seq_length: int
    """Tokens; fewer where the model supports fewer."""
    layers: int | None
    """Of each model, instead of its own number."""
    state_bits: Sequence[int] = (32,)
    """Of this project's Adam: 8 for optim.state_bits=8, or 32."""


def layout_of(name: str) -> Layout:
    """The layout that ``name`` means: ``one``, or axes with sizes, such as ``tp2`` or ``tp2pp2``. Raises
    ConfigError."""
    axes = {axis: int(size) for axis, size in re.findall(r"(tp|pp|dp)(\d+)", name)}
    if 0 in axes.values() or name != (ONE if not axes else "".join(f"{axis}{size}" for axis, size in axes.items())):
        rule = f"a layout is {ONE}, or axes with their sizes"
        raise ConfigError([Problem("--layouts", name, rule, "write such as one,tp2,dp2,pp2,tp2pp2")])
    return Layout(**axes)


def config_of(preset: str, layers: int | None) -> Config:
    """The settings of a preset. Raises ConfigError if there is none of that name."""
    changed = [] if layers is None else [f"model.num_hidden_layers={layers}"]
    return load_config([f"model={preset}", *changed], CONF_DIR)


def tasks_of(wanted: Wanted, preset: str, precision: str) -> Iterator[tuple[Peer, Task]]:
    """The contestants of a cell in the order of their turns."""
    config = config_of(preset, wanted.layers)
    shape = {**asdict(config.model), "num_key_value_heads": kv_heads(config.model), "head_dim": head_dim(config.model)}
    optim = config.optim
    for name in wanted.peers:
        peer = PEERS[name]
        modes = [mode for mode in wanted.modes if mode in peer.modes]
        variants = [(ONE, 1, 32, "none")]
        if name == OURS:
            variants = [*product(wanted.layouts, wanted.zero, wanted.state_bits, wanted.recompute)]
        for mode, (layout, zero, state_bits, recompute) in product(modes, variants):
            shares = layout_of(layout)
            cache = f"{name}-{mode}-{preset}-{precision}-{layout}" + (f"-{recompute}" if recompute != "none" else "")
            yield (
                peer,
                Task(
                    preset=preset,
                    model=shape,
                    parameters=parameters(config.model),
                    seq_length=min(wanted.seq_length, config.model.max_position_embeddings),
                    batch_size=wanted.batch_size,
                    # A pipeline needs several to fill it; otherwise a rank takes all its sequences at a time.
                    micro_batch_size=1 if shares.pp > 1 else max(1, wanted.batch_size // shares.dp),
                    precision=precision,
                    mode=mode,
                    layout=shares,
                    device=wanted.device,
                    threads=wanted.threads,
                    optimizer={
                        "lr": optim.lr,
                        "betas": list(optim.betas),
                        "eps": optim.eps,
                        "weight_decay": optim.weight_decay,
                        "clip": optim.clip,
                    },
                    seed=config.trainer.seed,
                    cache=str(BENCH_DIR / "cache" / instruction_set() / cache),
                    started=0.0,
                    recompute=recompute,
                    zero=zero,
                    state_bits=state_bits,
                ),
            )


def describe_machine(device: str) -> str:
    """Cores, processor, and whether it has units for bf16 products; on an accelerator its name too."""
    cpu = processor()
    units = [unit for unit in ("amx_bf16", "avx512_bf16") if unit in cpu.get("flags", "").split()]
    text = f"{os.cpu_count()} cores of {cpu.get('model name', 'an unknown processor')}, "
    text += f"bf16 units ({', '.join(units)})" if units else "no bf16 units"
    if device != "cpu":
        import torch

        text += f"; {torch.accelerator.device_count()} x {torch.get_device_module(device).get_device_name(0)}"
    return text
