"""Trains a Llama: ``python train.py model=llama7b trainer.tp=8``; ``python train.py --help`` says more."""

import sys

from megatron_llama.system.output import protect_output
from megatron_llama.system.signals import exit_on_signal

if __name__ == "__main__":  # first: a signal may come, and the terminal go, while the rest is imported
    exit_on_signal()
    protect_output()

from megatron_llama.cli import main  # noqa: E402

if __name__ == "__main__":
    if {"-m", "--multirun"} & set(sys.argv[1:]) and not {"-h", "--help"} & set(sys.argv[1:]):
        from megatron_llama.tools.sweep.cli import main as sweep

        sys.exit(sweep(sys.argv[1:]))
    sys.exit(main(sys.argv[1:]))
