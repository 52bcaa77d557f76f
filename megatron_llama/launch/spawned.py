"""The program that ``start.py`` runs for each rank on devices that do not survive a fork. Not for other use."""

import os
import pickle
import sys

if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "rb") as task:
        # The starter's own path: what it could import, the rank can.
        sys.path[:] = pickle.load(task)
        from megatron_llama.launch.rank_process import run_assignment

        assignment, work = pickle.load(task)
    run_assignment(assignment, work)
