"""Log probabilities of answers with the initial weights, the reference of preference training.

They are computed once, before step 1, and stored in ``data.cache_dir`` by the content of the initial weights and of the
data, so that runs with the same base and data share them. A resumed run reads them. With LoRA the initial adapters
change nothing, so the reference is the base model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist

from megatron_llama.config import ConfigError, Problem
from megatron_llama.corpus.content_hash import content_facts, file_hash
from megatron_llama.corpus.splits import open_splits
from megatron_llama.data.batches import Batches, Data
from megatron_llama.data.finetuning_set import SFTDataset
from megatron_llama.data.prefetch import Prefetcher
from megatron_llama.model.inputs import MicroBatch
from megatron_llama.model.preference import Pairs
from megatron_llama.parallel import ParallelModel
from megatron_llama.parallel.groups import broadcast_from_rank_0
from megatron_llama.plan import Plan
from megatron_llama.system import phase
from megatron_llama.system.files import atomic_open
from megatron_llama.system.progress import ProgressBar

_MISSING = np.iinfo(np.int64).min


def add_reference(plan: Plan, model: ParallelModel, data: Data) -> None:
    """Give each set with preferences its reference, from the cache or from ``model`` before step 1. A collective.

    Raises:
        ConfigError: The cache has no reference for a run after step 0, or cannot be written. On all ranks.
    """
    if not plan.config.finetune.metrics:
        return
    sets: list[tuple[str | None, Batches]] = [(None, data.train), *data.validation.items()]
    for name, batches in sets:
        samples = cast(SFTDataset, batches.samples)
        if plan.config.finetune.objective == "orpo":  # it has no reference
            samples.reference = np.zeros((len(samples.examples), 2), dtype=np.int64)
            continue
        path = broadcast_from_rank_0(lambda name=name: _path(plan, name))  # type: ignore[misc]
        samples.reference = broadcast_from_rank_0(lambda path=path: _read(path))  # type: ignore[misc]
        if samples.reference is not None and len(samples.reference) == len(samples.examples):
            continue
        if plan.start.step > 0:
            rule = f"has no intact {path}, the reference of this run's answers, init_from and precision"
            instead = "restore the file or the run's settings, or start a new run (run.dir=FOLDER)"
            raise ConfigError([Problem("data.cache_dir", plan.config.data.cache_dir, rule, instead)])
        samples.reference = None
        phase.enter("computing the reference", phase.PATIENT)
        values = _compute(model, batches, samples)
        broadcast_from_rank_0(lambda path=path, values=values: _write(plan, path, values))  # type: ignore[misc]
        samples.reference = values


def _compute(model: ParallelModel, batches: Batches, samples: SFTDataset) -> np.ndarray:
    """Return ``SFTDataset.reference``. A collective."""
    values = torch.full((len(samples.examples), 2), _MISSING, device=model.device)
    size, is_logger = batches.plan.config.trainer.global_batch_size, batches.topology.is_logger
    batches = Batches(samples, batches.plan, batches.topology, batches.device, pin_memory=batches.pin_memory)
    bar = ProgressBar("reference log probabilities", "sequences", len(samples)) if is_logger else nullcontext()
    with bar as progress, Prefetcher(batches, len(samples)) as ahead:  # an epoch has each example once
        for first in range(0, len(samples), size):
            phase.advance(f"sequence {first} of {len(samples)}")
            for batch, logps in _answer_logps(model, ahead.at(first)):
                is_example = batch.numbers >= 0
                values[batch.numbers[is_example]] = logps[is_example]
            if progress is not None:
                progress.show(min(first + size, len(samples)))
    dist.all_reduce(values, op=dist.ReduceOp.MAX)  # other ranks have other pairs, or another stage
    result: np.ndarray = values.cpu().numpy()
    assert (result > _MISSING).all()
    return result


def _answer_logps(model: ParallelModel, microbatches: Sequence[MicroBatch]) -> Iterator[tuple[Pairs, torch.Tensor]]:
    """Yield the examples of each micro batch, and log probabilities [b, examples, 2]; nothing before the last stage."""
    logps = model.answer_logps(microbatches)
    mismatched = [batch.mismatched for batch in microbatches if batch.mismatched is not None]
    others = model.answer_logps(mismatched) if mismatched else logps
    for batch, ours, other in zip(microbatches, logps, others, strict=False):
        assert batch.pairs is not None
        yield batch.pairs, torch.stack((ours, other), 2) if mismatched else ours.unflatten(1, (-1, 2))


def _path(plan: Plan, name: str | None) -> Path:
    """Return the file of a set's reference: of the training set, or the validation set ``name``."""
    data = plan.config.data
    prefixes = [(part.prefix, part.first, part.last) for part in open_splits(data, int(name is not None), name)]
    hashes = content_facts([prefix for prefix, *_ in prefixes])
    parts = [(hashes[prefix], first, last) for prefix, first, last in prefixes]
    precision = (asdict(plan.precision), plan.frozen_dtype, plan.quantized, plan.config.trainer.float8)
    listed = [*_base(plan), asdict(plan.model), precision, parts, *["exact"] * plan.config.trainer.exact]
    if plan.config.finetune.objective == "kto":  # mismatched answers are cut to this length
        listed.append(data.length)
    facts = json.dumps(listed, default=str, sort_keys=True)
    assert data.cache_dir is not None, "resolve derives it"
    return Path(data.cache_dir) / f"reference-{hashlib.sha256(facts.encode()).hexdigest()[:32]}.npy"


def _base(plan: Plan) -> Iterator[object]:
    """Yield what identifies the initial weights: the files of init_from, or the seed."""
    if plan.config.init_from is None:
        yield plan.config.trainer.seed
        return
    folder = Path(plan.config.init_from)
    for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
        if path.is_file() and not path.name.startswith("."):
            yield path.name, file_hash(path)


def _read(path: Path) -> np.ndarray | None:
    """Return the values of a file; None if it is missing or damaged."""
    try:
        with path.open("rb") as file:
            values: np.ndarray = np.lib.format.read_array(file)
    except (OSError, ValueError, EOFError):
        return None
    return values if values.dtype == np.int64 and values.ndim == 2 and values.shape[1] == 2 else None


def _write(plan: Plan, path: Path, values: np.ndarray) -> None:
    """Write a file. Raises ConfigError."""
    try:
        with atomic_open(path) as file:
            np.save(file, values)
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        instead = "write data.cache_dir=FOLDER with a writable folder"
        raise ConfigError([Problem("data.cache_dir", plan.config.data.cache_dir, rule, instead)]) from None
