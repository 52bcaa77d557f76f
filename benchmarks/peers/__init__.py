"""One program per trainer. A peer's program runs in the peer's environment, without this project's dependencies."""
