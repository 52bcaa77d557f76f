"""The pipeline, drawn: who computes and sends what when. ``scripts/pipeline.py``."""
