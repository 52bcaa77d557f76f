"""Who starts the ranks: this process, torchrun or srun.

cli.py reads the command line and decides, world.py reads what torchrun and srun say, run_dir.py claims the run folder,
start.py starts ranks on this machine and watches over them, rank.py is what each of them runs.
Nothing here imports torch before a run really starts, so that help and dry runs answer at once.
"""

from megatron_llama.launch.cli import main

__all__ = ["main"]
