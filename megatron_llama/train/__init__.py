"""The training loop, its metrics and its checks. Imports nothing: metrics_file.py must load without torch."""
