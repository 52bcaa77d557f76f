"""Benchmarks of training beside peers, on one machine in one run; the command lines are in scripts/bench_*.py.

environments.py installs each peer in a virtual environment of its own; contest.py is what all contestants of a cell
share; peers/ has one program per contestant, served by worker.py; turns.py starts them and gives them the machine in
turn; fairness.py refuses unequal ones; standings.py is the arithmetic of the page.
"""
