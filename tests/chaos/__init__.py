"""The fault campaign of `python -m tests.chaos`: kills, stopped ranks, broken disks and files, jumps of the clock.

- __main__.py: command line
- campaign.py: draws faults and checks the outcomes
- attempts.py: starts runs and observes their processes and files
- faults.py: injects faults into running and finished runs
- interposer.py: makes the C library of a run report a full or read-only disk, or another time
"""
