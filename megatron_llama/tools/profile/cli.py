"""``scripts/profile.py``: trains a few steps to see where their time goes, and prints the profile."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_llama import cli
from megatron_llama.system.exit_status import EXIT_USER
from megatron_llama.tools.common import NO_FILES

if TYPE_CHECKING:
    from megatron_llama.plan import Plan

WINDOW = (3, 5)
FOLDER = "profiling"
"""Inside the run's folder, whose own files stay as they are."""
USAGE = f"""\
python scripts/profile.py [group=choice ...] [section.setting=value ...]

Trains a few steps as `python train.py` with the same settings would, and prints where their time goes: for each module
parameters, FLOPs, times of forward and backward pass, share and FLOP/s; the largest modules at each depth; what each
rank waited for, by axis. A Chrome trace of each rank, the memory over a step and the numbers as JSON lie in the run's
folder. Starts its own ranks, or is a rank under torchrun and srun, as train.py does.

  trainer.profile=[A,B]  the steps; default [{WINDOW[0]},{WINDOW[1]}], which leaves out the first ones: they warm up
  data=...               default: made-up data
  run.dir=FOLDER         everything goes to FOLDER/{FOLDER}; default: a new folder in runs/
  --help                 this text

Examples
  python scripts/profile.py model=llama_2m trainer.tp=2 trainer.pp=2
  torchrun --nproc_per_node 8 scripts/profile.py model=llama3_8b trainer.tp=8 trainer.precision=bf16

Nothing is saved or validated. docs/guides/tools/profiling.md says what the numbers mean. Exit status: 0; 2 a config
that can't work;
else a failure.
"""
# Placed last on the command line, so that it wins: nothing but the steps.
_ONLY_STEPS = (
    *("trainer.epochs=null", "trainer.max_restarts=0", "trainer.val_every_steps=null"),
    *("optim.warmup_steps=0", "optim.warmup_ratio=null", "optim.constant_steps=0"),
    *("checkpoint.resume=never", "checkpoint.every_steps=null", "checkpoint.save_last=false"),
    *("checkpoint.keep_best=false", "checkpoint.export_hf=false"),
    *("logging.tensorboard=false", "logging.sample_prompts=[]"),
)


def main(argv: Sequence[str]) -> int:
    """Runs ``scripts/profile.py`` with ``argv``; returns the exit status."""
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(USAGE)
        return 0
    from megatron_llama.config import ConfigError, format_problems, load_config

    words = [*argv, *([] if _names_data(argv) else [*NO_FILES, "data.name=profile"])]
    try:
        profile = load_config(words, cli.CONF_DIR).trainer.profile
    except ConfigError as error:
        if error.config is None:
            sys.stderr.write(format_problems(error) + "\n")
            return EXIT_USER
        profile = None  # main reports what is wrong, with all other problems
    if profile is None:
        profile = list(WINDOW)
        words.append(f"trainer.profile=[{WINDOW[0]},{WINDOW[1]}]")
    words += [f"trainer.steps={profile[-1]}", *_ONLY_STEPS]
    return cli.main(words, entry=profile_one_rank, subfolder=FOLDER)


def profile_one_rank(plan: Plan) -> None:
    """What each rank does: trains, and the first one prints what was found."""
    from megatron_llama.tools.profile.files import TEXT_FILE
    from megatron_llama.tools.profile.profiler import FOLDER as PROFILE
    from megatron_llama.train.run_rank import run_rank

    run_rank(plan)
    if os.environ["RANK"] == "0":
        sys.stdout.write("\n" + (plan.run_dir / PROFILE / TEXT_FILE).read_text(encoding="utf-8"))
        sys.stdout.flush()


def _names_data(argv: Sequence[str]) -> bool:
    """Whether the command line says what to train on."""
    return any(word.lstrip("+").startswith(("data=", "data.prefixes=", "data.mock=", "experiment=")) for word in argv)
