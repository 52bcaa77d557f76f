"""One program per trainer. A peer's program runs in the peer's own environment, which has torch and no more."""
