"""Text on disk to indexed datasets that Megatron reads. The scripts here run as `python data_prep/<name>.py`."""
