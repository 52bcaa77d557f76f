"""Faults of one node, for tests: Python imports this at its start where PYTHONPATH names this folder. $FAULTY_NODE is
the node's name; $FAULTY_CLOCK are seconds that its clock is ahead, $FAULTY_TORCH is the version that it claims."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import time

if socket.gethostname() == os.environ.get("FAULTY_NODE"):
    if "FAULTY_CLOCK" in os.environ:
        true_time = time.time
        time.time = lambda: true_time() + float(os.environ["FAULTY_CLOCK"])
    if "FAULTY_TORCH" in os.environ:
        true_version = importlib.metadata.version
        importlib.metadata.version = lambda package: (
            os.environ["FAULTY_TORCH"] if package == "torch" else true_version(package)
        )
