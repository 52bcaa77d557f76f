"""Verifications that need minutes, a real model, root or a cluster: `python -m benchmarks.verify.NAME --help`."""
