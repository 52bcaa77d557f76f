"""Parallelism: dp, cp and pp (megatron-core's layers communicate for tp), and the steps that build a model."""

from megatron_llama.parallel.groups import open_device, process_groups
from megatron_llama.parallel.parallelize import ParallelModel, build_model
from megatron_llama.parallel.shards import Shard

__all__ = ["ParallelModel", "Shard", "build_model", "open_device", "process_groups"]
