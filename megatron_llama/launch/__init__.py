"""Launch of ranks: on this machine, under torchrun, srun or mpirun, or on other machines over ssh.

The command line (../cli.py) calls one of three modules:

* start.py runs the plan on this machine.
* other_launchers.py runs a process that another launcher has started.
* ssh.py starts this program on other machines.

The other modules:

* environment.py reads the launcher's variables.
* world.py finds the device and the number of ranks.
* rendezvous.py collects the reports of all processes in the job's store (job_store.py).
* run_dir.py locks the run folder.
* rank.py is the process of a rank; failure_cause.py tells causes from consequences.
* supervise.py waits for child processes.
* watchdog.py ends ranks that hang.

Nothing imports torch before a run starts, so --help and dry runs stay fast.
"""
