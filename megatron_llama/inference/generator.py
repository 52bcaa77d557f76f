"""A model with its cache: prompts of any lengths in, one id per row and step out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from megatron_llama.checkpoint.state import weights
from megatron_llama.devices import get_device
from megatron_llama.inference.load import Source
from megatron_llama.inference.sampling import Sampling, choose
from megatron_llama.model.kv_cache import KVCache
from megatron_llama.model.llama import Llama
from megatron_llama.model.mcore_config import mcore_config
from megatron_llama.parallel import process_groups
from megatron_llama.parallel.shards import shards_of
from megatron_llama.plan import Plan
from megatron_llama.topology import Topology, build_topology

OnToken = Callable[[int, int | None], None]
"""Called with (row, id) for each new id, and with (row, None) when the row has ended."""


@dataclass
class Answer:
    """What was written after a prompt."""

    ids: list[int] = field(default_factory=list)
    """Without the id that ended it."""
    ended: str = ""
    """stop (the model ended it), length (as many ids as were asked for) or context (the model's last position)."""


@dataclass
class Speed:
    """How long it took."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    new_tokens: int = 0
    seconds: float = 0.0
    """For all new ids but each row's first, which comes out of the prompt's pass."""
    timed_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """New ids of all rows per second, the prompts' pass not counted."""
        return self.timed_tokens / self.seconds if self.seconds else 0.0


class Generator:
    """A loaded model. All ranks must call its methods, with the same arguments."""

    def __init__(self, llama: Llama, plan: Plan, device: torch.device, stop: frozenset[int]) -> None:
        self.llama, self.plan, self.device, self.stop = llama, plan, device, stop
        self.speed = Speed()

    @property
    def context(self) -> int:
        """Positions that the model has."""
        return self.plan.model.max_position_embeddings

    def cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache."""
        like = self.llama.embed_tokens.weight
        return KVCache(self.plan.model, self.plan.config.trainer.tp, rows, min(capacity, self.context), like)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Logits [s, b, vocabulary], fp32, on the CPU, the same on all ranks, of the ids [b, s] that ``cache.at`` has
        placed; of the wanted ones only, [1, b, vocabulary], where it named any."""
        whole = gather_from_tensor_model_parallel_region(self.llama(tokens.to(self.device), cache=cache))
        return whole[..., : self.plan.model.vocab_size].float().cpu()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        max_new_tokens: int,
        on_token: OnToken | None = None,
    ) -> list[Answer]:
        """Continue each prompt, of at least one id and fewer than ``context``, until it ends or is long enough."""
        start = time.perf_counter()
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        assert int(lengths.min()) > 0 and int(lengths.max()) < self.context, "a prompt is empty or too long"
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        cache = self.cache(len(prompts), int(lengths.max()) + max_new_tokens)
        generators = sampling.generators(len(prompts))
        answers = [Answer() for _ in prompts]
        logits = self.logits(tokens, cache.at(torch.zeros_like(lengths), tokens.shape[1], lengths - 1))
        self.speed.prompt_tokens += int(lengths.sum())
        self.speed.prompt_seconds += time.perf_counter() - start
        start, first = time.perf_counter(), True
        while True:
            chosen = self._agreed(choose(logits[0], sampling, generators))
            new = self._take(chosen, lengths, answers, max_new_tokens, on_token)
            self.speed.new_tokens += new
            self.speed.timed_tokens += 0 if first else new
            if all(answer.ended for answer in answers):
                break
            # A row that has ended is run along where it stands, for nothing: the others decide the time.
            logits = self.logits(chosen[:, None], cache.at(lengths, 1))
            lengths += torch.tensor([not answer.ended for answer in answers])
            first = False
        self.speed.seconds += time.perf_counter() - start
        return answers

    def _take(
        self, chosen: torch.Tensor, lengths: torch.Tensor, answers: list[Answer], most: int, on_token: OnToken | None
    ) -> int:
        """Give each open answer its new id, and end those that are complete; returns how many ids were taken."""
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
            if answer.ended and on_token is not None:
                on_token(row, None)
        return taken

    def _agreed(self, chosen: torch.Tensor) -> torch.Tensor:
        """Rank 0's choice: ranks that differed in a last bit would wait for each other for ever."""
        if self.plan.world_size > 1:
            chosen = chosen.to(self.device)
            dist.broadcast(chosen, src=0)
        return chosen.cpu()


@contextmanager
def generator(source: Source, plan: Plan, stop: frozenset[int]) -> Iterator[Generator]:
    """Join the other ranks and load this rank's part. RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    say which that is. Raises CorruptFile where the stored bytes are not those that were written."""
    device = get_device(plan.config.device.name)
    torch_device = device.enter(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    topology = build_topology(plan, int(os.environ["RANK"]))
    with process_groups(plan, topology, device, torch_device):
        yield Generator(load(source, plan, topology, torch_device), plan, torch_device, stop)


@torch.no_grad()
def load(source: Source, plan: Plan, topology: Topology, device: torch.device) -> Llama:
    """This rank's part of the whole model. Each rank reads its own slices; nothing is held twice, as ``fully_shard``
    would."""
    with torch.device("meta"):
        llama = Llama(plan.model, mcore_config(plan), plan.stage_layers[0], padded_vocab_size=plan.padded_vocab_size)
    llama.to_empty(device=device).requires_grad_(False).eval()
    shards = shards_of(llama, plan, topology)
    for shard in shards:
        shard.local.zero_()  # rows that pad the vocabulary are nowhere on disk
    source.stored.load_into(weights(shards))
    return llama
