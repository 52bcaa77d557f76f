"""Comparison of training curves of different runs, machines and programs: ``scripts/compare.py``."""
