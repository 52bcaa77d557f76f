"""Bytes that each rank sends in a step, predicted and measured: ``scripts/traffic.py``."""
