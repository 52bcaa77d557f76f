"""Starts ranks: in this process, under torchrun, srun or mpirun, or on other machines over ssh.

cli.py parses the command line and chooses: local.py runs the plan on this machine, join.py is a process that another
program has started, ssh.py starts this program on other machines. environment.py reads what a starter has set,
world.py finds the device and the number of ranks, prepare_data.py prepares datasets, rendezvous.py brings the processes
together in the store of job_store.py by their reports.py, run_dir.py claims the run's folder, start.py starts the
ranks, supervise.py waits for their end, watchdog.py ends those that hang (board.py asks the other machines about
theirs), and rank_process.py is what each of them runs. Nothing here imports torch before a run really starts, so that
--help and dry runs answer at once.
"""

from megatron_llama.launch.cli import main

__all__ = ["main"]
