"""The contestants' programs, one each; a peer's runs in the peer's own environment."""
