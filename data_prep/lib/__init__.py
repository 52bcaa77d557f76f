"""The parts that the data preparation scripts share. Nothing here imports torch."""
