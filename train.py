"""Train a Llama model: ``python train.py model=llama7b trainer.tp=8``. See ``python train.py --help``."""

import sys

from megatron_llama.system.output import protect_output
from megatron_llama.system.signals import exit_on_signal

if __name__ == "__main__":  # before slow imports, during which a signal may arrive or the terminal close
    exit_on_signal()
    protect_output()

from megatron_llama.cli import main  # noqa: E402
from megatron_llama.system.errors import leave, run_main  # noqa: E402

if __name__ == "__main__":
    if {"-m", "--multirun"} & set(sys.argv[1:]) and not {"-h", "--help"} & set(sys.argv[1:]):
        from megatron_llama.tools.sweep.cli import main as sweep

        run_main(lambda: sweep(sys.argv[1:]))
    leave(main(sys.argv[1:]))
