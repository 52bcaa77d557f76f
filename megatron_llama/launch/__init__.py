"""Who starts the ranks: this process, torchrun, srun, or this process on other machines over ssh.

cli.py reads the command line and decides, world.py reads what torchrun and srun say, join.py takes that place after
meeting.py has brought all processes together, run_dir.py claims the run folder, start.py starts ranks on this machine
and watches over them, rank.py is what each of them runs, hosts.py does it on other machines.
Nothing here imports torch before a run really starts, so that help and dry runs answer at once.
"""

from megatron_llama.launch.cli import main

__all__ = ["main"]
