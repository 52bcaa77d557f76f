"""Which attempt of its start a rank belongs to.

torchrun starts ranks again in the store where they met before. What the earlier ones have left there must not count.
"""

ATTEMPT = "MEGATRON_LLAMA_ATTEMPT"
"""The variable with a word that the ranks of one attempt share, and no others have."""
