"""Batched generation with a KV cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch.nn.utils.rnn import pad_sequence

from megatron_llama.checkpoint.state import weights
from megatron_llama.config.rope import longest_sequence
from megatron_llama.devices import get_device
from megatron_llama.model.llama import Llama
from megatron_llama.parallel import process_groups
from megatron_llama.parallel.assembly import plain_parts
from megatron_llama.parallel.context_division import Division
from megatron_llama.parallel.context_parallel import divided_parts
from megatron_llama.parallel.parallelize import mcore_config
from megatron_llama.parallel.shards import shards_of
from megatron_llama.plan import Plan
from megatron_llama.tools.inference.kv_cache import DividedCache, KVCache
from megatron_llama.tools.inference.sampling import Sampling, filter_probabilities, penalize
from megatron_llama.tools.inference.saved_model import SavedModel
from megatron_llama.train.sample_text import draw

OnToken = Callable[[int, int | None], None]
"""Callback with (row, id) for each new id, and with (row, None) at the end of a row."""
IsComplete = Callable[[list[int]], bool]
"""Callback with the generated ids of a row; True ends the row. It returns the same on all ranks."""


@dataclass
class Answer:
    """Continuation of a prompt."""

    ids: list[int] = field(default_factory=list)
    """Generated ids, without the end token."""
    ended: str = ""
    """Reason of the end: ``stop`` (end token or ``is_complete``), ``length`` (max_new_tokens) or ``context`` (last
    position)."""


@dataclass
class Speed:
    """Token counts and times of all calls."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    new_tokens: int = 0
    seconds: float = 0.0
    """Seconds of the decoding steps. The forward pass of the prompts yields each row's first id."""
    timed_tokens: int = 0
    """New ids of the decoding steps."""

    @property
    def tokens_per_second(self) -> float:
        """New ids of all rows per second of decoding."""
        return self.timed_tokens / self.seconds if self.seconds else 0.0


class Generator:
    """Loaded model. All ranks must call its methods with the same arguments."""

    def __init__(
        self,
        llama: Llama,
        plan: Plan,
        device: torch.device,
        stop: frozenset[int],
        missing: Sequence[int] = (),
        division: Division | None = None,
    ) -> None:
        self.llama, self.plan, self.device, self.stop = llama, plan, device, stop
        self.division = division
        """Division of prompts over context-parallel ranks; None with one rank."""
        self.missing = torch.tensor(missing, dtype=torch.int64)
        """Ids that the tokenizer lacks. They are never generated."""
        self.speed = Speed()

    @property
    def context(self) -> int:
        """Number of positions of the model."""
        return longest_sequence(self.plan.model)

    def cache(self, rows: int, capacity: int, at_once: int = 1) -> KVCache:
        """Return an empty cache for ``capacity`` positions; after the prompts, at most ``at_once`` tokens per step."""
        like, tp, capacity = self.llama.embed_tokens.weight, self.plan.config.trainer.tp, min(capacity, self.context)
        if self.division is not None:
            return DividedCache(self.plan.model, tp, rows, capacity, like, self.division)
        return KVCache(self.plan.model, tp, rows, capacity, like, at_once)

    def logits(self, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Return the logits of ids at the positions of the cache; the same on all ranks.

        Args:
            tokens: ids, [b, s].
            cache: cache whose ``at`` has set the positions.

        Returns:
            fp32 logits on the CPU, [s, b, vocabulary]; [1, b, vocabulary] if the cache selects one token per row.
        """
        return self._device_logits(tokens, cache).cpu()

    def log_likelihoods(
        self, tokens: torch.Tensor, candidates: torch.Tensor, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log likelihoods of candidates for the next id, and whether each is the likeliest id.

        Args:
            tokens: ids, [b, s].
            candidates: ids, [s, b, n]; [1, b, n] if the cache selects one token per row.
            cache: cache whose ``at`` has set the positions.

        Returns:
            fp64 log likelihoods in nats and bools, on the CPU, with the shape of ``candidates``; the same on all ranks.
        """
        logits, candidates = self._device_logits(tokens, cache), candidates.to(self.device)
        likelihoods = logits.gather(-1, candidates) - logits.logsumexp(-1, keepdim=True)
        return likelihoods.cpu().double(), (logits.argmax(-1, keepdim=True) == candidates).cpu()

    @torch.no_grad()
    def _device_logits(self, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Return ``logits`` on the device."""
        tokens = cache.local(tokens.to(self.device))
        with cache.attached(self.llama):
            local = self.llama(tokens, inputs=cache.inputs(self.llama, tokens), token_index=cache.token_index)
        whole = gather_from_tensor_model_parallel_region(cache.select(local))
        return whole[..., : self.plan.model.vocab_size].float()

    @torch.no_grad()
    def loss(self, tokens: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> float:
        """Return the sum of losses times ``weights`` [b, s], fp32; the same on all ranks. See ``Llama.forward``."""
        batch, inputs = [x.to(self.device) for x in (tokens, labels, weights)], None
        if self.division is not None:
            batch = [self.division.local(x) for x in batch]
            builder: Any = self.llama.build_inputs
            inputs = builder.padded(batch[0], tokens.shape[1])
        total = self.llama(*batch, inputs=inputs)[0].double()
        if self.division is not None:
            dist.all_reduce(total, group=self.division.group)
        return float(total)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        max_new_tokens: int,
        on_token: OnToken | None = None,
        is_complete: IsComplete | None = None,
    ) -> list[Answer]:
        """Continue each prompt until its end token, ``max_new_tokens`` or the last position.

        Args:
            prompts: ids, at least one and fewer than ``context`` per prompt.
            on_token: called with each new id.
            is_complete: called with the ids of an answer; ends the answer if it returns True.
        """
        start = time.perf_counter()
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        assert int(lengths.min()) > 0 and int(lengths.max()) < self.context, "a prompt is empty or too long"
        tokens = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
        cache = self.cache(len(prompts), int(lengths.max()) + max_new_tokens)
        generators = sampling.generators(len(prompts))
        used = used_ids(prompts, self.plan.model.vocab_size) if sampling.repetition_penalty != 1 else None
        answers = [Answer() for _ in prompts]
        logits = self.logits(tokens, cache.at(torch.zeros_like(lengths), tokens.shape[1], lengths - 1))
        self.speed.prompt_tokens += int(lengths.sum())
        self.speed.prompt_seconds += time.perf_counter() - start
        start, first = time.perf_counter(), True
        while True:
            chosen = choose(logits[0].index_fill(-1, self.missing, -torch.inf), sampling, generators, used)
            if self.plan.world_size > 1:
                # Ranks whose logits differ in the last bit could choose different ids and hang.
                chosen = chosen.to(self.device)
                dist.broadcast(chosen, src=0)
                chosen = chosen.cpu()
            new = self._take(chosen, lengths, answers, max_new_tokens, on_token, is_complete)
            self.speed.new_tokens += new
            self.speed.timed_tokens += 0 if first else new
            if all(answer.ended for answer in answers):
                break
            # A row that has ended stays in the batch, at the same position; its logits are ignored.
            logits = self.logits(chosen[:, None], cache.at(lengths, 1))
            lengths += torch.tensor([not answer.ended for answer in answers])
            first = False
        self.speed.seconds += time.perf_counter() - start
        return answers

    def _take(
        self,
        chosen: torch.Tensor,
        lengths: torch.Tensor,
        answers: list[Answer],
        most: int,
        on_token: OnToken | None,
        is_complete: IsComplete | None,
    ) -> int:
        """Append the new ids to unfinished answers, end complete answers, and return the number of new ids."""
        taken = 0
        for row, (number, length, answer) in enumerate(zip(chosen.tolist(), lengths.tolist(), answers, strict=True)):
            if answer.ended:
                continue
            taken += 1
            if number in self.stop:
                answer.ended = "stop"
            else:
                answer.ids.append(number)
                if on_token is not None:
                    on_token(row, number)
                if len(answer.ids) == most:
                    answer.ended = "length"
                elif length + 1 == self.context:
                    answer.ended = "context"
                elif is_complete is not None and is_complete(answer.ids):
                    answer.ended = "stop"
            if answer.ended and on_token is not None:
                on_token(row, None)
        return taken


@contextmanager
def open_generator(
    saved: SavedModel, plan: Plan, stop: frozenset[int], missing: Sequence[int] = ()
) -> Iterator[Generator]:
    """Join the process group and load this rank's shard of the model. ``missing``: ids that the tokenizer lacks.

    Reads torchrun's variables (RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Raises CorruptFile if a checksum of the weights is wrong.
    """
    device = get_device(plan.config.device.name)
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    topology = plan.topology(int(os.environ["RANK"]))
    with process_groups(plan, topology, device, torch_device) as groups:
        kernels = device.kernels(compiled=False)
        # Without fully_shard, which would store the weights twice.
        with torch.device("meta"):
            llama = Llama(
                plan.model,
                mcore_config(plan),
                plan.stage_layers[0],
                padded_vocab_size=plan.padded_vocab_size,
                parts=divided_parts(plain_parts(kernels), topology, kernels, groups, plan.config.trainer.cp_comm),
            )
        llama.to_empty(device=torch_device).requires_grad_(False).eval()
        shards = shards_of(llama, plan, topology)
        for shard in shards:
            shard.local.zero_()  # padding rows of the vocabulary are not stored
        saved.stored.load_into(weights(shards))
        division = Division(topology, groups["cp"]) if topology.sizes["cp"] > 1 else None
        yield Generator(llama, plan, torch_device, stop, missing, division)


def used_ids(prompts: Sequence[Sequence[int]], vocabulary: int) -> torch.Tensor:
    """Return the mask of each prompt's ids, bool [b, vocabulary]."""
    used = torch.zeros(len(prompts), vocabulary, dtype=torch.bool)
    for row, prompt in zip(used, prompts, strict=True):
        row[list(prompt)] = True
    return used


def choose(
    logits: torch.Tensor, sampling: Sampling, generators: list[torch.Generator], used: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the next id of each row [b], and add it to ``used``.

    Args:
        logits: [b, vocabulary], fp32, on the CPU.
        generators: one per row.
        used: ids of the prompts and answers, bool [b, vocabulary]; None without a repetition penalty.
    """
    if used is not None:
        logits = penalize(logits, sampling.repetition_penalty, used)
    if sampling.greedy:
        chosen = logits.argmax(-1)  # the lowest of equal ones
    else:
        probabilities = torch.softmax(logits.double() / sampling.temperature, -1)
        chosen = draw(filter_probabilities(probabilities, sampling), generators)
    if used is not None:
        used.scatter_(-1, chosen[:, None], True)
    return chosen
