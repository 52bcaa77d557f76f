"""Exact mode (``trainer.exact``): losses, gradient norms, weights and states are bit-identical in every layout.

``ExactSums.attach`` replaces the forward of a chunk's linear layers, norms, attention, embedding and head. Their
gradients go to integer sums (``Total``) instead of autograd; ``ExactSums.reduce`` adds the ranks' sums and sets the
shards' gradients. docs/guides/methods/exact.md states cost and limits.
"""

from megatron_llama.parallel.exact.gradients import ExactSums

__all__ = ["ExactSums"]
