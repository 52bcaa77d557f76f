"""A stand-in for Transformer Engine: two functions of its attention."""
