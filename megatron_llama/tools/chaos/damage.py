"""Harm to files at rest: a bit is turned over, bytes are cut off, put in, or set to zero, in any file of a run."""

from __future__ import annotations

import random
from pathlib import Path

from megatron_llama.tools.chaos.attempts import SAVED_EVERY, STEPS

NEWEST = STEPS - SAVED_EVERY
"""The checkpoint that a run with a damaged file begins with; one more is left."""
# Kinds of files, by patterns below a folder that holds a run in run/ and its dataset in data/.
KINDS = {
    "shard": f"run/checkpoints/step_{NEWEST:08d}/*.safetensors",
    "checkpoint.json": f"run/checkpoints/step_{NEWEST:08d}/checkpoint.json",
    "latest": "run/checkpoints/latest",
    "metrics.jsonl": "run/metrics.jsonl",
    "config.yaml": "run/config.yaml",
    "plan.txt": "run/plan.txt",
    "TensorBoard": "run/tensorboard/*",
    ".idx": "data/*.idx",
    ".bin": "data/*.bin",
}


def harm(path: Path, chance: random.Random) -> str:
    """Damages a file; says how."""
    content = bytearray(path.read_bytes())
    size = len(content)
    position, how = chance.randrange(size + 1), chance.choice(("flip", "flip", "cut", "insert", "zeros", "empty"))
    if how == "flip" and position < size:
        bit = chance.randrange(8)
        content[position] ^= 1 << bit
        what = f"bit {bit} of byte {position:,} turned over"
    elif how == "insert":
        new = chance.randbytes(chance.randint(1, 16))
        content[position:position] = new
        what = f"{len(new)} bytes put in at {position:,}"
    elif how == "zeros":
        count = min(chance.choice((1, 512, 4096)), size - position)
        content[position : position + count] = bytes(count)
        what = f"{count} bytes from {position:,} set to zero"
    else:
        position = 0 if how == "empty" else position
        del content[position:]
        what = f"cut off at byte {position:,} of {size:,}"
    path.write_bytes(content)
    return f"{path.name}: {what}"
