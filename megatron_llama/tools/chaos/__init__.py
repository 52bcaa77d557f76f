"""The fault campaign of scripts/chaos.py: runs that are killed, stopped, robbed of their disk, lied to about the time.

cli.py reads the command line, campaign.py deals out the faults and judges what became of them, attempts.py starts runs
and looks at their processes and files, faults.py does harm to a run that trains, damage.py to files that are at rest,
and interposer.py makes the C library of a run report a full disk, a read-only one, or another time.
"""
