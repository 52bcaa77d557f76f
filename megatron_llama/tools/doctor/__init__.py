"""Examination of a run's machines: ``python scripts/doctor.py`` with the settings of train.py.

cli.py is the command. The first process of each node observes it: machine_checks.py (hardware, limits, versions,
clocks), network.py (interfaces, rendezvous, ports between pairs) and disks.py. examination.py connects the nodes,
judges and prints. Each check is a pair of functions: one returns plain JSON, the other judges the JSON of
all nodes. Then rank_and_link_speed.py measures matmuls, collectives and links. Torch is imported only where ranks
measure.
"""
