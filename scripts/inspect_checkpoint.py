"""Print the format, contents and missing parts of a checkpoint: python scripts/inspect_checkpoint.py PATH

Reads checkpoints of this project, Megatron-LM, Megatron-Bridge, NeMo 2, torchtitan, accelerate and transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    """Run the command; return 0 for a readable checkpoint, 1 for a damaged one, 2 if PATH is no checkpoint."""
    from megatron_llama.system.programs import name_commands
    from megatron_llama.system.rerun_command import ArgumentParser

    parser = ArgumentParser(description=name_commands(__doc__.splitlines()[0]))
    parser.add_argument("path", type=Path, metavar="PATH", help="checkpoint, or a folder with several (its newest)")
    parser.add_argument("--run", type=Path, help="run that continues the checkpoint: compare its first loss with --log")
    parser.add_argument("--log", type=Path, help="the source's log: TensorBoard folder, JSON lines, trainer_state.json")
    arguments = parser.parse_args()
    if (arguments.run is None) != (arguments.log is None):
        parser.error("--run and --log need each other")
    # Imported here: --help needs no torch.
    from megatron_llama.checkpoint.foreign.describe import describe
    from megatron_llama.checkpoint.tensor_source import CorruptFile
    from megatron_llama.config import ConfigError
    from megatron_llama.system.wrapping import escape_controls, wrap_lines
    from megatron_llama.tools.compare.logs import first_common_loss

    losses = None
    try:
        description = describe(arguments.path)
        if arguments.run is not None:
            losses = first_common_loss(arguments.run, arguments.log)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except CorruptFile as error:
        sys.stderr.write("\n".join(wrap_lines(escape_controls(f"damaged: {error}"))) + "\n")
        return 1
    rows = description.rows + [("missing", part) for part in description.missing or ["nothing"]]
    if losses is not None:
        step, ours, theirs = losses
        rows.append(("first batch", f"step {step}: loss {ours:.5f} here, {theirs:.5f} in the source's log"))
    elif arguments.run is not None:
        rows.append(("first batch", "the run and the source's log have no step in common"))
    width = max(len(label) for label, _ in rows) + 2
    for label, value in rows:
        sys.stdout.write("\n".join(wrap_lines(escape_controls(value), label.ljust(width), " " * width)) + "\n")
    return 0


if __name__ == "__main__":
    from megatron_llama.system.errors import run_main

    run_main(main)
