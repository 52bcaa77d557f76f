"""Fills the compile cache ahead of a run: ``scripts/compile.py``."""
