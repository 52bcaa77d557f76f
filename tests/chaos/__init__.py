"""The fault campaign of `python -m tests.chaos`: kills, stopped ranks, broken disks and files, jumps of the clock.

__main__.py reads the command line, campaign.py draws the faults and judges the outcomes, attempts.py starts runs and
observes their processes and files, faults.py injects faults into running and finished runs, and interposer.py makes the
C library of a run report a full disk, a read-only one, or another time.
"""
