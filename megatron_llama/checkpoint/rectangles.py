"""A tensor of which this rank holds some rectangles, as torch.distributed.checkpoint's planners accept it.

They call three methods: what to write, which chunks are wanted, and the memory of one of them. They accept only a
torch.Tensor, so this is one, without data of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron_llama.model.names import Shape


class Rectangles(torch.Tensor):
    """``parts`` are (offset in the global tensor, local tensor), all of one dtype and on one device."""

    parts: list[tuple[Shape, torch.Tensor]]

    @staticmethod
    def __new__(cls, shape: Shape, parts: list[tuple[Shape, torch.Tensor]]) -> Rectangles:
        first = parts[0][1]
        assert all(part.dtype == first.dtype and part.dim() == len(shape) for _, part in parts)
        made = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=first.dtype, device=first.device)
        made.parts = parts
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} on Rectangles, which hold no values")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Rectangles({tuple(self.shape)}, {[(offset, tuple(part.shape)) for offset, part in self.parts]})"

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offset), position),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offset), part.shape),
                    properties=TensorProperties(dtype=part.dtype),
                    size=self.shape,
                ),
            )
            for position, (offset, part) in enumerate(self.parts)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), part.shape) for offset, part in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        # By offset: the index is a hint that a planner may leave out. Parts of no size at one offset don't matter.
        return next(part for offset, part in self.parts if torch.Size(offset) == index.offset)
