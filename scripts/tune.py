"""Find the best layout of a run: python scripts/tune.py model=llama7b cluster.nodes=4 (see --help)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from megatron_llama.system.errors import run_main
    from megatron_llama.tools.tune.cli import main

    run_main(lambda: main(sys.argv[1:]), raises_sigterm=True)
