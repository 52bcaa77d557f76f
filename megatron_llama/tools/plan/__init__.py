"""Plans runs before they run: ``scripts/plan.py``."""
