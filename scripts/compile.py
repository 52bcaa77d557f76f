"""Compile the graphs of a run ahead of time: python scripts/compile.py model=llama7b trainer.tp=8 (see --help)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from megatron_llama.system.errors import leave
    from megatron_llama.system.output import protect_output
    from megatron_llama.system.signals import exit_on_signal

    exit_on_signal()
    protect_output()
    from megatron_llama.tools.compile.cli import main

    leave(main(sys.argv[1:]))
