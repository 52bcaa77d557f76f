"""Stand-in for the PyTorch bridge of Gaudi."""
