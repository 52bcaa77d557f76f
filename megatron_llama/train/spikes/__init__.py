"""Loss-spike guard (trainer.spike_guard): skips updates, or rewinds the run and skips data."""
