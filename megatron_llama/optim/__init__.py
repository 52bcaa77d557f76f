"""Optimizers, learning-rate schedules and the gradient norm over all ranks."""

from megatron_llama.optim.optimizer import Optimizer, build_optimizer

__all__ = ["Optimizer", "build_optimizer"]
