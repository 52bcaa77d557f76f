"""Folders of the repository that tests use."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
SCRIPTS = ROOT / "scripts"
TRAIN_PY = ROOT / "train.py"
