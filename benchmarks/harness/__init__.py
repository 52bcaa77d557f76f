"""Training benchmarks: several programs train the same task on one machine, alternately, in one run.

- task.py: the work of a program, and the facts that a program reports
- worker.py: the loop in a program's process; imports only torch, for the peers' environments
- environments.py: installation of the peers
- runner.py: starts the programs, and runs them alternately
- comparison.py: excludes programs with different work; statistics and tables of the page
- arguments.py: command line
"""
