"""Profiles some steps of a run that is not there for anything else: ``scripts/profile.py``."""
