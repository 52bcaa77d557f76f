"""The loop, what it measures, and what it checks while it runs."""

from megatron_llama.train.rank import run_rank

__all__ = ["run_rank"]
