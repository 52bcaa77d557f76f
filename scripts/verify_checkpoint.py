"""Verify all bytes of a checkpoint against its hashes: python scripts/verify_checkpoint.py CHECKPOINT"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    """Run the command; return 0 if all hashes match, 1 for a corrupt file, 2 if the argument is not a checkpoint."""
    from megatron_llama.system.object_store import location
    from megatron_llama.system.programs import name_commands
    from megatron_llama.system.rerun_command import ArgumentParser

    parser = ArgumentParser(description=name_commands(__doc__))
    parser.add_argument("checkpoint", type=location, help="checkpoint, or run (its newest checkpoint): folder or URL")
    arguments = parser.parse_args()
    # Imported here: --help needs no torch.
    from megatron_llama.checkpoint.folder import find_checkpoint
    from megatron_llama.checkpoint.manifest import read_manifest
    from megatron_llama.checkpoint.tensor_source import CorruptFile
    from megatron_llama.config import ConfigError

    try:
        checkpoint = find_checkpoint(arguments.checkpoint)
        manifest = read_manifest(checkpoint)
        manifest.check_sizes()
        for file in manifest.files:
            manifest.stored.verify_file(file)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except CorruptFile as error:
        sys.stderr.write(f"damaged: {error}\n")
        return 1
    size = sum(manifest.files.values())
    sys.stdout.write(f"{checkpoint}: step {manifest.state.step}, {size / 1e6:,.1f} MB, every hash is right\n")
    return 0


if __name__ == "__main__":
    from megatron_llama.system.errors import run_main

    run_main(main)
