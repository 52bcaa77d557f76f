"""Where the time of a training step goes: python scripts/profile.py model=llama_2m trainer.tp=2 (see --help)."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

if __name__ == "profile":
    # The standard library has a module of this name, which cProfile imports, and torch that. Python looks for it in the
    # folder of the script first, whichever script of this folder runs: it gets what it asked for.
    _spec = importlib.util.spec_from_file_location("profile", Path(sysconfig.get_path("stdlib")) / "profile.py")
    assert _spec is not None and _spec.loader is not None
    sys.modules["profile"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["profile"])

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron_llama.system.output import protect_output
    from megatron_llama.system.signals import exit_on_signal

    exit_on_signal()
    protect_output()
    from megatron_llama.tools.profile.cli import main

    sys.exit(main(sys.argv[1:]))
