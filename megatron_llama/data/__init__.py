"""What is trained on. The position in the data is a number, not a state: sample i is the same in every layout.

What is asked for here is imported when it is asked for: checks.py must not cost a starter torch's seconds.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_llama.data.batches import Batches, Data, build_data

__all__ = ["Batches", "Data", "build_data"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    from megatron_llama.data import batches

    return getattr(batches, name)
