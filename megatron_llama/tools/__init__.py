"""Programs beside a run: compare curves, import NeMo configs, measure traffic, compile ahead of time."""
