"""Ahead-of-time compilation into the cache of a run: ``scripts/compile.py``."""
