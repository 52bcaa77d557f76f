"""Data preparation: raw text to Megatron's indexed datasets. Run the scripts as `python data_prep/<name>.py`."""
