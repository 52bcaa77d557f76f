"""Any rank of any world at its true size, on one CPU core: ``scripts/rehearse.py``."""
