"""Optimizers, learning-rate schedules, and the gradient norm across all axes."""

from megatron_llama.optim.optimizer import Optimizer, build_optimizer

__all__ = ["Optimizer", "build_optimizer"]
