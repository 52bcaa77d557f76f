"""``scripts/tune.py``: find the fastest layout, the longest sequence or the fewest devices of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED
from megatron_llama.tools.common import run_tool

if TYPE_CHECKING:
    from megatron_llama.config import Problem

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
NO_TRIALS, OUTPUT = "--no-trials", "--output"


def read_output(argv: Sequence[str]) -> tuple[Path | None, list[str], list[Problem]]:
    """Return the file of --output, the other arguments, and problems."""
    from megatron_llama.config import Problem

    path, rest = None, []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != OUTPUT:
            rest.append(word)
            continue
        path = value if equals else next(words, "")
    if path is not None and not path.endswith((".yaml", ".yml")):
        rule = "must be the path of a .yaml file"
        return None, rest, [Problem(OUTPUT, path or None, rule, f"write {OUTPUT} my_run.yaml")]
    return (Path(path) if path else None), rest, []


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/tune.py`` with ``argv``; return the exit status."""
    return run_tool(USAGE, argv, lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    from megatron_llama.config import ConfigError
    from megatron_llama.tools.tune.objectives import NothingWorks, tune

    output, rest, problems = read_output(argv)
    overrides = [text for text in rest if text != NO_TRIALS] + ["tune.trials=0"] * (NO_TRIALS in rest)
    try:
        if problems:
            raise ConfigError(problems)
        tune(overrides, output)
    except NothingWorks as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; run the same command to resume.\n")
        return EXIT_INTERRUPTED
    return 0
