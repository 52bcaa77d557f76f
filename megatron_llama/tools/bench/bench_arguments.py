"""The arguments that the benchmarks of training share: who takes part in what."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_llama.config.settings import DEVICES
from megatron_llama.devices import get_device
from megatron_llama.system.exit_status import EXIT_FAILED
from megatron_llama.tools.bench.cells import ONE, Wanted
from megatron_llama.tools.bench.environments import PEERS, NotInstalled, interpreter


def words(text: str) -> list[str]:
    """The words of ``one,two``."""
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    """The numbers of ``1,3``."""
    return [int(word) for word in words(text)]


def describe_contestants(parser: argparse.ArgumentParser) -> None:
    """Adds what ``installed`` and ``wanted_of`` read."""
    add = parser.add_argument
    add("--models", type=words, default=["llama_15m", "llama_56m", "llama_110m"], help="presets of conf/model")
    add("--precision", type=words, default=["fp32", "bf16"], help="fp32,bf16: products; weights are fp32 in both")
    add("--peers", type=words, default=list(PEERS), help=f"of {','.join(PEERS)}")
    add("--modes", type=words, default=["eager", "compiled"], help="eager,compiled")
    add("--layouts", type=words, default=[ONE], help="of this project: one,tp2,dp2,pp2 (default one)")
    add("--recompute", type=words, default=["none"], help="of this project: none,elementwise,full ... (default none)")
    add("--zero", type=numbers, default=[1], help="of this project: trainer.zero, such as 1,3 (default 1)")
    add("--batch", type=int, default=4, help="sequences of a step (default %(default)s)")
    add("--seq-length", type=int, default=512, help="tokens of a sequence, at most the model's (default %(default)s)")
    add("--layers", type=int, help="blocks of each model, instead of its own number: a large model's shape on one GPU")
    add("--device", default="cpu", choices=[name for name in DEVICES if name != "auto"])
    add("--threads", type=int, help="of each contestant, all ranks together (default: the cores)")


def installed(args: argparse.Namespace, left_out: dict[str, str]) -> Iterator[tuple[str, Path]]:
    """The interpreters of the peers that can take part; ``left_out`` takes the others with the reason."""
    for name in args.peers:
        peer = PEERS.get(name)
        if peer is None:
            left_out[name] = f"is not one of {', '.join(PEERS)}"
        elif peer.needs_accelerator and not get_device(args.device).is_accelerator:
            left_out[name] = f"does not run on device {args.device}"
        else:
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


def wanted_of(args: argparse.Namespace, peers: Sequence[str]) -> Wanted:
    """What the arguments ask for, of the peers that can take part."""
    return Wanted(
        peers=peers,
        modes=args.modes,
        layouts=args.layouts,
        recompute=args.recompute,
        zero=args.zero,
        device=args.device,
        threads=args.threads or get_device("cpu").count(),
        batch_size=args.batch,
        seq_length=args.seq_length,
        layers=args.layers,
    )
