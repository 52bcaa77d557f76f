"""Profiler of training steps: ``scripts/profile.py`` and ``trainer.profile``."""
