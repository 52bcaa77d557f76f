"""Profile training steps: python scripts/profile.py model=llama_2m trainer.tp=2 (see --help)."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

if __name__ == "profile":
    # This file shadows the standard library module of this name for all scripts of this folder. torch imports cProfile,
    # which imports profile, so load the standard library module.
    _spec = importlib.util.spec_from_file_location("profile", Path(sysconfig.get_path("stdlib")) / "profile.py")
    assert _spec is not None and _spec.loader is not None
    sys.modules["profile"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["profile"])

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron_llama.system.errors import leave
    from megatron_llama.system.output import protect_output
    from megatron_llama.system.signals import exit_on_signal

    exit_on_signal()
    protect_output()
    from megatron_llama.tools.profile.cli import main

    leave(main(sys.argv[1:]))
