"""Training benchmarks: several programs train the same task on one machine, alternately, in one run.

task.py has the work and what a program reports about itself. worker.py serves a program, also in a peer's environment,
and imports nothing but torch. environments.py installs the peers. runner.py starts the programs, excludes unequal ones
and runs them alternately. standings.py has the arithmetic of the page, arguments.py the command line.
"""
