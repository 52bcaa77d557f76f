"""Sweeps (``python train.py -m``): a run for each value, sequentially or as Slurm jobs."""
