"""megatron-core's sample order, in which runs of Megatron-LM continue here (record "order": "megatron").

megatron-core shuffles all epochs of a run together, so the order depends on the run's length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron_llama.config import Problem
from megatron_llama.config.data_settings import split_weights
from megatron_llama.corpus.indexed_format import read_index
from megatron_llama.parallel.groups import raise_on_all_ranks
from megatron_llama.plan import Plan


@dataclass
class _Ids:
    """The attributes of a tokenizer that GPTDataset reads."""

    vocab_size: int
    eod: int = -1  # used to mask or split documents, which is disabled
    pad: int = -1  # no id of a dataset is padding
    unique_identifiers: dict[str, Any] = field(default_factory=lambda: {"class": "ids"})  # in the index cache's key
    special_tokens_dict: dict[str, int] = field(default_factory=dict)


class _Builder(BlendedMegatronDatasetBuilder):
    """megatron-core's builder without its barriers, in which ranks would wait for a failed rank until the timeout.

    ``build_megatron`` orders the ranks and raises errors on all of them.
    """

    @staticmethod
    def build_generic_dataset(cls: Any, is_built_on_rank: Any, synchronize_ranks: bool, *args: Any) -> Any:
        return cls(*args)

    def _build_megatron_datasets_parallel(
        self, prefixes: list[str], split: list[Any], sizes: list[list[int]]
    ) -> list[list[Any]]:
        parts = [self._build_megatron_dataset_splits(p, split, n) for p, n in zip(prefixes, sizes, strict=True)]
        return [list(of_one_split) for of_one_split in zip(*parts, strict=True)]


def build_megatron(plan: Plan, train_samples: int, validation_samples: int) -> tuple[Any, Any]:
    """Build training and validation samples of the blend for a run of ``train_samples``. All ranks must call it.

    Rank 0 builds the index files, the other ranks read them. A split of 0 samples is None.

    Raises:
        ConfigError: on all ranks, if the index files cannot be built.
    """
    data = plan.config.data
    weights, prefixes = split_weights(data.prefixes)
    if not weights and len(prefixes) > 1:
        weights = [float(read_index(prefix).tokens()) for prefix in prefixes]
    config = GPTDatasetConfig(
        random_seed=plan.config.trainer.seed,
        sequence_length=data.length,
        blend=(prefixes, weights or None),
        split=data.split,
        path_to_cache=data.cache_dir,
        tokenizer=_Ids(plan.model.vocab_size),  # type: ignore[arg-type]
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [train_samples, validation_samples, 0]
    # Skip unused splits: megatron-core loops forever on a split without tokens.
    config.split_matrix = [part if samples else None for part, samples in zip(config.split_matrix, sizes, strict=True)]
    splits: list[Any] = [None, None, None]
    for builds in (dist.get_rank() == 0, dist.get_rank() != 0):  # other ranks read rank 0's index files
        problems = []
        if builds:
            try:
                with _without_pickles():
                    splits = _Builder(GPTDataset, sizes, lambda: True, config).build()
            except Exception as error:  # megatron-core's asserts, or a read-only cache folder
                rule = f"cannot be read in the checkpoint's order: {type(error).__name__}: {error}"
                instead = f"restore the datasets of the checkpoint, and delete damaged index files in {data.cache_dir}"
                problems.append(Problem("data.prefixes", data.prefixes, rule, instead))
        raise_on_all_ranks(problems)
    return splits[0], splits[1]


@contextmanager
def _without_pickles() -> Iterator[None]:
    """Make numpy reject pickles, which can run any program.

    megatron-core loads its index files with allow_pickle=True. They may be next to the dataset of another user.
    """
    load = numpy.load

    def load_array(*args: Any, **options: Any) -> Any:
        return load(*args, **{**options, "allow_pickle": False})

    with patch.object(numpy, "load", load_array):
        yield
