"""``scripts/tune.py``: find the fastest layout, the longest sequence or the fewest devices of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED
from megatron_llama.tools.common import run_tool


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/tune.py`` with ``argv``; return the exit status."""
    return run_tool("tune", argv, _run, {"--output": Path, "--no-trials": bool})


def _run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    from megatron_llama.tools.tune.objectives import NothingWorks, tune

    try:
        tune([*overrides, *["tune.trials=0"] * arguments.no_trials], arguments.output)
    except NothingWorks as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; run the same command to resume.\n")
        return EXIT_INTERRUPTED
    return 0
