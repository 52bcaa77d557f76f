"""Command line of ``scripts/profile.py``: profile a few training steps and print the result."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_llama import cli
from megatron_llama.config import ConfigError, load_config
from megatron_llama.plan import Plan
from megatron_llama.tools.common import NO_FILES, ONLY_STEPS, run_tool

WINDOW = (3, 5)
FOLDER = "profiling"  # subfolder of the run folder, so that files of the run are not changed
# Placed last on the command line to take precedence.
_ONCE = ("trainer.epochs=null", "trainer.max_restarts=0", "logging.tensorboard=false", "logging.sample_prompts=[]")


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/profile.py`` with ``argv``; return the exit status."""
    return run_tool("profile", argv, _run, {})


def _run(_: object, argv: Sequence[str]) -> int:
    data = ("data=", "data.prefixes=", "data.mock=", "experiment=")
    selects_data = any(word.lstrip("+").startswith(data) for word in argv)
    words = [*argv, *([] if selects_data else [*NO_FILES, "data.name=profile"])]
    try:
        profile = load_config(words, cli.CONF_DIR).trainer.profile
    except ConfigError as error:
        if error.config is None:
            raise
        profile = None  # cli.main reports this with all other problems
    if profile is None:
        profile = list(WINDOW)
        words.append(f"trainer.profile=[{WINDOW[0]},{WINDOW[1]}]")
    words += [f"trainer.steps={profile[-1]}", *ONLY_STEPS, *_ONCE]
    return cli.main(words, entry=profile_rank, subfolder=FOLDER)


def profile_rank(plan: Plan) -> None:
    """Train on each rank; rank 0 prints the profile."""
    from megatron_llama.tools.profile.profiler import FOLDER as PROFILE
    from megatron_llama.tools.profile.report import TEXT_FILE
    from megatron_llama.train.run_rank import run_rank

    run_rank(plan)
    if os.environ["RANK"] == "0":
        sys.stdout.write("\n" + (plan.run_dir / PROFILE / TEXT_FILE).read_text(encoding="utf-8"))
        sys.stdout.flush()
