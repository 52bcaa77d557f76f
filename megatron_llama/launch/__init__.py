"""Launch of ranks: on this machine, under torchrun, srun or mpirun, or on other machines over ssh.

The command line (../cli.py) calls one of three modules:

* start.py runs the plan on this machine.
* join.py runs a process that another launcher has started.
* ssh.py starts this program on other machines.

environment reads the launcher's variables. world finds the device and the number of ranks. rendezvous collects the
reports of all processes (reports) in the job's store (job_store). run_dir locks the run folder. rank is the process of
a rank, supervise waits for child processes, and watchdog ends ranks that hang. Nothing imports torch before a run
starts, so --help and dry runs stay fast.
"""
