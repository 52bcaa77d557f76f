"""Report of runs as one HTML page: curves, plan, restarts, samples, settings and data."""
