"""``scripts/tune.py``: find the fastest layout, the longest sequence or the fewest devices of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED
from megatron_llama.tools.common import run_tool

USAGE = """\
usage: python scripts/tune.py [--output FILE.yaml] [objective=...]
                              [group=choice ...] [section.setting=value ...]
                              [cluster.setting=value ...]
                              [tune.setting=value ...]

Find tp, cp, pp, vpp, dp, zero, shard_group, micro_batch_size, recompute for a
run of `python train.py` with the same settings. The search forecasts memory
and time of all valid settings, runs the fastest ones for some steps, and
prints the best. Settings on the command line stay fixed. Model, global batch
and numerics never change. Models of pretraining recipes need
trainer.global_batch_size.

  --output FILE.yaml     write all settings, for train.py experiment=FILE.yaml
  tune.name=NAME         write conf/experiment/NAME.yaml
  objective=throughput   most tokens/s (default)
  objective=max_seq_len  longest data.seq_length that fits; also prints a table
                         by ZeRO stage and number of devices
  objective=min_devices  fewest devices that fit; tune.days=30 with
                         cluster.tokens=1e12 adds a deadline
  tune.trials=0          plan only (same as --no-trials)
  tune.jobs=true         run trials as SLURM jobs (sbatch run.slurm)
  cluster.device=h100 cluster.nodes=16
                         machines to tune for (default: this machine; large
                         models without a local accelerator: h100)
  All settings of tune and cluster: docs/reference/config.md

Examples:
  python scripts/tune.py model=llama_15m data=mock
  python scripts/tune.py model=llama70b trainer.precision=bf16 \\
      trainer.global_batch_size=512 data.seq_length=4096 \\
      cluster.device=h100 cluster.nodes=16
  python scripts/tune.py objective=max_seq_len model=llama7b \\
      trainer.global_batch_size=1024 cluster.device=h100

Run the same command to resume an interrupted search.
Exit status: 0 success, 1 nothing fits or all trials failed, 2 invalid
arguments or settings.
"""


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/tune.py`` with ``argv``; return the exit status."""
    return run_tool(USAGE, argv, _run, {"--output": Path, "--no-trials": bool})


def _run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    from megatron_llama.config import ConfigError, Problem
    from megatron_llama.tools.tune.objectives import NothingWorks, tune

    output = arguments.output
    if output is not None and output.suffix not in (".yaml", ".yml"):
        rule = "must be the path of a .yaml file"
        raise ConfigError([Problem("--output", str(output), rule, "write --output my_run.yaml")])
    try:
        tune([*overrides, *["tune.trials=0"] * arguments.no_trials], output)
    except NothingWorks as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; run the same command to resume.\n")
        return EXIT_INTERRUPTED
    return 0
