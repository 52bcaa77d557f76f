"""The order of runs that began before each epoch had an order of its own: megatron-core's, which shuffles all epochs of
a run together, so that it depends on the run's length. Their checkpoints say so, and they go on with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
    """The part of a tokenizer that GPTDataset asks for. It works on ids alone; this is all it needs to know of them."""

    vocab_size: int
    eod: int = -1  # only used to mask or split documents, which we don't ask for
    pad: int = -1  # no id of a dataset is padding
    unique_identifiers: dict[str, Any] = field(default_factory=lambda: {"class": "ids"})  # in the index cache's key
    special_tokens_dict: dict[str, int] = field(default_factory=dict)


class _Builder(BlendedMegatronDatasetBuilder):
    """megatron-core's builder without its barriers, where ranks would wait for one that has failed until their timeout.

    ``build_megatron`` says who builds when, and every rank hears of a failure.
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
    """Training and validation samples of the blend, as a run of ``train_samples`` has them; None for a split that is
    not wanted. All ranks must call it.

    Rank 0 builds the index files, the others read them. Raises ConfigError, on all ranks, where they can't be made.
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
    wanted = [train_samples, validation_samples, 0]
    # Not wanted, so not built. And megatron-core would go round for ever in a split without a token.
    config.split_matrix = [part if samples else None for part, samples in zip(config.split_matrix, wanted, strict=True)]
    splits: list[Any] = [None, None, None]
    for is_my_turn in (dist.get_rank() == 0, dist.get_rank() != 0):  # the others find rank 0's index files in the cache
        problems = []
        if is_my_turn:
            try:
                splits = _Builder(GPTDataset, wanted, lambda: True, config).build()
            except Exception as error:  # megatron-core's asserts; a cache folder that can't be written
                rule = f"can't be read in the order of the checkpoint: {type(error).__name__}: {error}"
                problems.append(Problem("data.prefixes", data.prefixes, rule, "see that they are as they were"))
        raise_on_all_ranks(problems)
    return splits[0], splits[1]
