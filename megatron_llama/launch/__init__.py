"""Starts ranks: in this process, under torchrun, srun or mpirun, or on other machines over ssh.

The command line (cli.py, one folder up) chooses one of three files. start.py runs the plan on this machine, join.py is
a process that another program has started, and ssh.py starts this program on other machines. environment.py reads the
variables of a launcher, and world.py finds the device and the number of ranks. rendezvous.py brings the processes
together in the store of job_store.py by their reports.py. run_dir.py claims the run's folder and start.py starts the
ranks. rank.py is the process of each rank, supervise.py waits for their end, and watchdog.py ends ranks that hang.
Nothing here imports torch before a run really starts, so that --help and dry runs answer at once.
"""
