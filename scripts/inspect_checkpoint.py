"""Print the format, contents and missing parts of a checkpoint: python scripts/inspect_checkpoint.py PATH

Reads checkpoints of this project, Megatron-LM, Megatron-Bridge, NeMo 2, torchtitan, accelerate and transformers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    """Run the command; return 0 for a readable checkpoint, 1 for a damaged one, 2 if PATH is no checkpoint."""
    from megatron_llama.system.programs import name_commands

    parser = argparse.ArgumentParser(description=name_commands(__doc__.splitlines()[0]))
    parser.add_argument("path", type=Path, metavar="PATH", help="checkpoint, or a folder with several (its newest)")
    arguments = parser.parse_args()
    # Imported here: --help needs no torch.
    from megatron_llama.checkpoint.foreign.describe import describe
    from megatron_llama.checkpoint.stored_tensors import CorruptFile
    from megatron_llama.config import ConfigError
    from megatron_llama.system.wrapping import wrap_lines

    try:
        description = describe(arguments.path)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except CorruptFile as error:
        sys.stderr.write("\n".join(wrap_lines(f"damaged: {error}")) + "\n")
        return 1
    rows = [("folder", str(description.folder)), ("format", description.label), *description.rows]
    rows += [("missing", part) for part in description.missing] or [("missing", "nothing")]
    width = max(len(label) for label, _ in rows) + 2
    for label, value in rows:
        sys.stdout.write("\n".join(wrap_lines(value, label.ljust(width), " " * width)) + "\n")
    return 0


if __name__ == "__main__":
    from megatron_llama.system.errors import run_main

    run_main(main)
