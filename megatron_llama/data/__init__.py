"""What is trained on. The position in the data is a number, not a state: sample i is the same in every layout."""

from megatron_llama.data.batches import Batches, Data, build_data

__all__ = ["Batches", "Data", "build_data"]
