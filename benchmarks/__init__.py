"""Benchmarks against other programs, studies of methods, and verifications that take too long for the tests.

`python -m benchmarks --help` lists the benchmarks. verify/ has a program per claim.
"""
