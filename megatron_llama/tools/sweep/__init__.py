"""``python train.py -m``: a run for each of several values, one after another or one Slurm job each."""
