"""Examination of a run's machines: ``python scripts/doctor.py`` with the settings of train.py.

cli.py is the command. The first process of each node observes it: machine.py (hardware, limits, versions, clocks),
network.py (interfaces, the meeting of the nodes, ports between pairs) and disks.py. examination.py lets the nodes meet,
judges and prints. Each check is a pair of functions: one returns plain JSON, the other judges the JSON of all nodes.
Then ranks.py measures matmuls, collectives and links. Torch is imported only where ranks measure.
"""
