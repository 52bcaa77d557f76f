"""Finds settings for a machine: ``scripts/tune.py``."""
