"""Convert a config of another program: python scripts/import_config.py their.yaml [-o ours.yaml] (see --help)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from megatron_llama.system.errors import run_main
    from megatron_llama.tools.import_config.cli import main

    run_main(lambda: main(sys.argv[1:]))
