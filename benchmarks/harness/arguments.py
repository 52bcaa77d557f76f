"""The arguments that the training benchmarks share, and the tasks that follow from them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from benchmarks.harness.environments import BENCH_DIR, OURS, PEERS, NotInstalled, Peer, interpreter
from benchmarks.harness.task import Layout, Task
from megatron_llama.arch.shapes import head_dim, kv_heads, parameters
from megatron_llama.cli import CONF_DIR
from megatron_llama.config import Config, ConfigError, Problem, load_config
from megatron_llama.config.settings import DEVICES, RECOMPUTE
from megatron_llama.devices import get_device
from megatron_llama.devices.processor import instruction_set
from megatron_llama.system.exit_status import EXIT_FAILED

ONE = "one"
PRECISIONS, MODES, ZERO, STATE_BITS = "fp32,bf16", "eager,compiled", "0,1,2,3", "32,8"


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


def words(text: str) -> list[str]:
    """The words of ``one,two``."""
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    """The numbers of ``1,3``."""
    return [int(word) for word in words(text)]


def describe_contestants(parser: argparse.ArgumentParser) -> None:
    """Adds what ``entries_of`` and ``installed`` read."""
    add = parser.add_argument
    add("--models", type=words, default=["llama_15m", "llama_56m", "llama_110m"], help="presets of conf/model")
    add("--precision", type=words, default=words(PRECISIONS), help="fp32,bf16: products; weights are fp32 in both")
    add("--peers", type=words, default=list(PEERS), help=f"of {','.join(PEERS)}")
    add("--modes", type=words, default=words(MODES), help="eager,compiled")
    add("--layouts", type=words, default=[ONE], help="of this project: one,tp2,dp2,pp2 (default one)")
    add("--recompute", type=words, default=["none"], help="of this project: none,elementwise,full ... (default none)")
    add("--zero", type=numbers, default=[1], help="of this project: trainer.zero, such as 1,3 (default 1)")
    add("--state-bits", type=numbers, default=[32], help="of this project: of Adam's states, 32,8 (default 32)")
    add("--batch", type=int, default=4, help="sequences of a step (default %(default)s)")
    add("--seq-length", type=int, default=512, help="tokens of a sequence, at most the model's (default %(default)s)")
    add("--layers", type=int, help="blocks of each model, instead of its own number: a large model's shape on one GPU")
    add("--device", default="cpu", choices=[name for name in DEVICES if name != "auto"])
    cores = get_device("cpu").count()
    add("--threads", type=int, default=cores, help="of each contestant, all ranks together (default: the cores)")


def entries_of(args: argparse.Namespace) -> dict[tuple[str, str], list[tuple[Peer, Task]]]:
    """The contestants of each cell, a model in a precision, in the order of their turns. Raises ConfigError with
    everything that is wrong with the arguments."""
    problems: list[Problem] = []
    for flag, given, listed in (
        ("--models", args.models, ""),
        ("--layouts", args.layouts, ""),
        ("--precision", args.precision, PRECISIONS),
        ("--modes", args.modes, MODES),
        ("--peers", args.peers, ",".join(PEERS)),
        ("--recompute", args.recompute, ",".join(RECOMPUTE)),
        ("--zero", args.zero, ZERO),
        ("--state-bits", args.state_bits, STATE_BITS),
    ):
        if not given:
            problems.append(Problem(flag, None, "names nothing", f"name something, or leave {flag} out"))
        for word in given if listed else ():
            if str(word) not in words(listed):
                problems.append(Problem(flag, word, f"is not one of {listed}", f"write such as {flag} {listed}"))
    for name in ("batch", "seq_length", "layers", "threads", "rounds", "steps"):
        flag, number = f"--{name.replace('_', '-')}", getattr(args, name, None)  # not all have all of them
        if number is not None and number < 1:
            problems.append(Problem(flag, number, "must be at least 1", f"write {flag} 1, or more"))
    if args.layers is None or args.layers > 0:
        problems += [problem for name in args.models for problem in _problems(config_of, name, args.layers)]
    problems += [problem for name in args.layouts for problem in _problems(layout_of, name)]
    if problems:
        raise ConfigError([problem for n, problem in enumerate(problems) if problem not in problems[:n]])
    wanted = Wanted(
        peers=args.peers,
        modes=args.modes,
        layouts=args.layouts,
        recompute=args.recompute,
        zero=args.zero,
        state_bits=args.state_bits,
        device=args.device,
        threads=args.threads,
        batch_size=args.batch,
        seq_length=args.seq_length,
        layers=args.layers,
    )
    return {cell: list(tasks_of(wanted, *cell)) for cell in product(args.models, args.precision)}


def _problems(read: Callable[..., object], *arguments: object) -> Sequence[Problem]:
    try:
        read(*arguments)
    except ConfigError as error:
        return error.problems
    return ()


def installed(args: argparse.Namespace, left_out: dict[str, str]) -> Iterator[tuple[str, Path]]:
    """The interpreters of the peers that can take part; ``left_out`` takes the others with the reason."""
    for name in args.peers:
        peer = PEERS[name]
        if peer.needs_accelerator and not get_device(args.device).is_accelerator:
            left_out[name] = f"does not run on device {args.device}"
            continue
        sys.stderr.write(f"environment of {name} ...\n")
        try:
            yield name, interpreter(peer)
        except NotInstalled as error:
            left_out[name] = str(error)


def tell_left_out(left_out: dict[str, str]) -> int:
    """Names who did not take part; returns the exit status."""
    for name, reason in left_out.items():
        sys.stderr.write(f"left out: {name}: {reason}\n")
    return EXIT_FAILED if left_out else 0
