"""What is wrong with the machines of a run, and what to do: ``python scripts/doctor.py`` with the settings of train.py.

cli.py is the command. The first process of each node observes it (versions.py, hardware_check.py, interfaces.py,
disks.py, process_limits.py), the nodes meet (meeting.py), try each other's ports (pairs.py), clocks (clocks.py) and
disks, and the first one judges. Then the ranks measure products, collectives and links (rank_measurements.py,
speeds.py). Each check is one file with an ``observe``, which returns plain JSON, and a ``judge`` over what all nodes
have observed. examination_report.py prints. Torch is imported only where ranks measure.
"""
