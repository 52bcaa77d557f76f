"""``scripts/tune.py``: finds the settings of a run that are fastest, longest or cheapest on a machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER

USAGE = """\
python scripts/tune.py [objective=...] [group=choice ...] [section.setting=value ...] [cluster.setting=value ...]
                       [tune.setting=value ...]

Finds tp, pp, vpp, dp, zero, shard_group, micro_batch_size and recompute for a run of `python train.py` with the same
settings. Proposes all that obey the rules, drops what does not fit by the forecast of memory, orders the rest by the
forecast of time, tries the most promising for some steps, and writes conf/experiment/<name>.yaml for train.py. What you
give stays as it is: with trainer.tp=8 only the others are tuned. Model, global batch and numerics are never changed.

  objective=throughput      the most tokens a second (default)
  objective=max_seq_len     the longest data.seq_length that fits: a table of ZeRO stages by device counts, and the best
  objective=min_devices     the fewest devices that fit; tune.days=30 and cluster.tokens=1e12 add a deadline
  tune.trials=0             only plan, as for machines that are not here (--no-trials is the same)
  tune.jobs=true            try as SLURM jobs, by sbatch run.slurm on cluster.nodes machines
  cluster.device=h100 cluster.nodes=16
                            machines that are not here; without them, this machine
  docs/reference/config.md has all settings of tune and cluster.

Examples
  python scripts/tune.py model=llama_15m data=mock
  python scripts/tune.py model=llama70b trainer.precision=bf16 trainer.global_batch_size=512 data.seq_length=4096 \\
      cluster.device=h100 cluster.nodes=16
  python scripts/tune.py objective=max_seq_len model=llama7b trainer.precision=bf16 cluster.device=h100 \\
      device.memory_gib=80

Started again after an interruption it goes on where it was.
Exit status: 0; 1 nothing fits, or nothing that was tried works; 2 a mistake in what was asked.
"""
NO_TRIALS = "--no-trials"


def main(argv: Sequence[str]) -> int:
    """Runs ``scripts/tune.py`` with ``argv``; returns the exit status."""
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(USAGE)
        return 0
    # Imported here: --help needs none of it.
    from megatron_llama.config import ConfigError, format_problems
    from megatron_llama.tools.tune.objectives import NothingWorks, tune

    words = [word for word in argv if word != NO_TRIALS] + ["tune.trials=0"] * (NO_TRIALS in argv)
    try:
        tune(words)
    except ConfigError as error:
        sys.stderr.write(format_problems(error) + "\n")
        return EXIT_USER
    except NothingWorks as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write("Stopped; the same command goes on from here.\n")
        return EXIT_INTERRUPTED
    return 0
