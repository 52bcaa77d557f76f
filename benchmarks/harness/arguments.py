"""Command-line arguments of the training benchmarks, and the tasks built from them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from benchmarks.harness.environments import BENCH_DIR, OURS, PEERS, NotInstalled, Peer, interpreter
from benchmarks.harness.task import Layout, TrainingTask
from megatron_llama.arch.parameters import head_dim, kv_heads, parameters
from megatron_llama.cli import CONF_DIR
from megatron_llama.config import Config, ConfigError, Problem, load_config
from megatron_llama.config.settings import DEVICES, RECOMPUTE
from megatron_llama.devices import get_device
from megatron_llama.devices.processor import instruction_set
from megatron_llama.plan.derive import default_lr
from megatron_llama.system.exit_status import EXIT_FAILED
from megatron_llama.tools.inference.sampling import flag_of

ONE = "one"
PRECISIONS, MODES, ZERO, STATE_BITS = "fp32,bf16", "eager,compiled", "0,1,2,3", "32,8"


def parse_layout(name: str) -> Layout:
    """Parse ``one``, or axes with sizes such as ``tp2`` or ``tp2pp2``. Raises ConfigError."""
    axes = {axis: int(size) for axis, size in re.findall(r"(tp|pp|cp|dp)(\d+)", name)}
    if 0 in axes.values() or name != (ONE if not axes else "".join(f"{axis}{size}" for axis, size in axes.items())):
        rule = f"a layout is {ONE}, or axes with sizes"
        raise ConfigError([Problem("--layouts", name, rule, "write for example one,tp2,dp2,pp2,tp2pp2")])
    return Layout(**axes)


def load_preset(preset: str, layers: int | None) -> Config:
    """Load a model preset, with ``layers`` layers if given. Raises ConfigError for an unknown preset."""
    changed = [] if layers is None else [f"model.num_hidden_layers={layers}"]
    return load_config([f"model={preset}", *changed], CONF_DIR)


def programs(args: argparse.Namespace) -> list[Peer]:
    """Return the programs of ``--peers`` and ``--before``."""
    before = [] if args.before is None else [replace(PEERS[OURS], name="before", checkout=args.before.absolute())]
    return [*(PEERS[name] for name in args.peers), *before]


def build_tasks(args: argparse.Namespace, preset: str, precision: str) -> Iterator[tuple[Peer, TrainingTask]]:
    """Yield the programs that train ``preset`` in ``precision``, in the order of their turns. Peers use one process."""
    config = load_preset(preset, args.layers)
    shape = {**asdict(config.model), "num_key_value_heads": kv_heads(config.model), "head_dim": head_dim(config.model)}
    optim, caches = config.optim, BENCH_DIR / "cache" / instruction_set()
    for peer in programs(args):
        modes = [mode for mode in args.modes if mode in peer.modes]
        variants = [(ONE, 1, 32, "none")]
        if not peer.packages:
            variants = [*product(args.layouts, args.zero, args.state_bits, args.recompute)]
        for mode, (layout, zero, state_bits, recompute) in product(modes, variants):
            ranks = parse_layout(layout)
            end = f"-{recompute}" if recompute != "none" else ""
            yield (
                peer,
                TrainingTask(
                    preset=preset,
                    model=shape,
                    parameters=parameters(config.model),
                    seq_length=min(args.seq_length, config.model.max_position_embeddings),
                    batch_size=args.batch,
                    # A pipeline needs several micro batches; other layouts use one per rank.
                    micro_batch_size=1 if ranks.pp > 1 else max(1, args.batch // ranks.dp),
                    precision=precision,
                    mode=mode,
                    layout=ranks,
                    device=args.device,
                    threads=args.threads,
                    optimizer={
                        "lr": default_lr(config) if optim.lr is None else optim.lr,
                        "betas": list(optim.betas),
                        "eps": optim.eps,
                        "weight_decay": optim.weight_decay,
                        "clip": optim.clip,
                    },
                    seed=config.trainer.seed,
                    cache=str(caches / f"{peer.name}-{mode}-{preset}-{precision}-{layout}{end}"),
                    recompute=recompute,
                    zero=zero,
                    state_bits=state_bits,
                ),
            )


def split_words(text: str) -> list[str]:
    """Split ``one,two`` at commas."""
    return [word for word in text.split(",") if word]


def split_numbers(text: str) -> list[int]:
    """Split ``1,3`` into integers."""
    return [int(word) for word in split_words(text)]


def add_program_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that ``build_entries`` and ``install_peers`` read."""
    add = parser.add_argument
    add("--models", type=split_words, default=["llama_15m", "llama_56m", "llama_110m"], help="presets of conf/model")
    text = "dtypes of the matmuls: fp32,bf16; weights are always fp32"
    add("--precision", type=split_words, default=split_words(PRECISIONS), help=text)
    add("--peers", type=split_words, default=list(PEERS), help=f"programs, from {', '.join(PEERS)} (default all)")
    add("--before", type=Path, metavar="CHECKOUT", help="also compare another checkout of this project")
    add("--installed", action="store_true", help="use peers of this environment, and install nothing")
    add("--modes", type=split_words, default=split_words(MODES), help="eager,compiled")
    add("--layouts", type=split_words, default=[ONE], help="this project's layouts: one,tp2,dp2,pp2 (default one)")
    text = "this project's trainer.recompute: none,elementwise,full ... (default none)"
    add("--recompute", type=split_words, default=["none"], help=text)
    add("--zero", type=split_numbers, default=[1], help="this project's trainer.zero, for example 1,3 (default 1)")
    add("--state-bits", type=split_numbers, default=[32], help="bits of this project's Adam states: 32,8 (default 32)")
    add("--batch", type=int, default=4, help="sequences per step (default %(default)s)")
    text = "tokens per sequence, capped at the model's maximum (default %(default)s)"
    add("--seq-length", type=int, default=512, help=text)
    add("--layers", type=int, help="layers of each model, to run a large model's shape on one GPU (default: all)")
    add("--device", default="cpu", choices=[name for name in DEVICES if name != "auto"])
    cores = get_device("cpu").count()
    add("--threads", type=int, default=cores, help="threads per program, over all its ranks (default: all cores)")


def build_entries(args: argparse.Namespace) -> dict[tuple[str, str], list[tuple[Peer, TrainingTask]]]:
    """Return the programs for each (model, precision), in the order of their turns.

    Raises ConfigError with all problems of the arguments.
    """
    problems: list[Problem] = []
    choices = {"models": "", "layouts": "", "precision": PRECISIONS, "modes": MODES, "peers": ",".join(PEERS)}
    choices |= {"recompute": ",".join(RECOMPUTE), "zero": ZERO, "state_bits": STATE_BITS}
    for name, listed in choices.items():
        flag, given = flag_of(name), getattr(args, name)
        if not given:
            problems.append(Problem(flag, None, "is empty", f"give a value, or omit {flag}"))
        for word in given if listed else ():
            if str(word) not in split_words(listed):
                problems.append(Problem(flag, word, f"is not one of {listed}", f"write for example {flag} {listed}"))
    for name in ("batch", "seq_length", "layers", "threads", "rounds", "steps"):
        flag, number = flag_of(name), getattr(args, name)
        if number is not None and number < 1:
            problems.append(Problem(flag, number, "must be at least 1", f"write {flag} 1 or more"))
    if args.before is not None and not (args.before / "benchmarks/peers/train_ours.py").is_file():
        problems.append(Problem("--before", args.before, "is no checkout of this project", "write --before CHECKOUT"))
    if args.layers is None or args.layers > 0:
        problems += [problem for name in args.models for problem in _problems(load_preset, name, args.layers)]
    problems += [problem for name in args.layouts for problem in _problems(parse_layout, name)]
    if problems:
        raise ConfigError([problem for n, problem in enumerate(problems) if problem not in problems[:n]])
    return {cell: list(build_tasks(args, *cell)) for cell in product(args.models, args.precision)}


def _problems(read: Callable[..., object], *arguments: object) -> Sequence[Problem]:
    try:
        read(*arguments)
    except ConfigError as error:
        return error.problems
    return ()


def install_peers(args: argparse.Namespace, excluded: dict[str, str]) -> Iterator[tuple[str, Path]]:
    """Install the requested peers; yield (name, interpreter). ``excluded`` collects the others with the reason."""
    for peer in programs(args):
        name = peer.name
        if peer.needs_accelerator and not get_device(args.device).is_accelerator:
            excluded[name] = f"does not run on device {args.device}"
            continue
        if args.installed:
            if peer.packages and find_spec(name) is None:
                excluded[name] = "not installed in this environment"
                continue
            yield name, Path(sys.executable)
            continue
        sys.stderr.write(f"preparing the environment of {name} ...\n")
        try:
            yield name, interpreter(peer)
        except NotInstalled as error:
            excluded[name] = str(error)


def report_excluded(excluded: dict[str, str]) -> int:
    """Print the excluded programs to stderr; return the exit status."""
    for name, reason in excluded.items():
        sys.stderr.write(f"excluded: {name}: {reason}\n")
    return EXIT_FAILED if excluded else 0
