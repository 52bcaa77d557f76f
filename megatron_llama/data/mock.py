"""Mock tokens for benchmarks, compilation and dry runs: sample i is a function of seed and i."""

from __future__ import annotations

import torch


class MockDataset:
    """Arithmetic sequences of token ids with random start and stride, which a model can learn.

    With ``examples`` above 1, each sequence is packed: it has this number of documents of equal length.
    """

    once = False

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int, seed: int, examples: int = 1) -> None:
        self.num_samples, self.seq_length, self.vocab_size, self.seed = num_samples, seq_length, vocab_size, seed
        self.examples = examples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        start, stride = torch.randint(0, self.vocab_size, (2,), generator=generator).tolist()
        text = (start + torch.arange(self.seq_length + 1) * (1 + stride % 7)) % self.vocab_size
        sample = {"tokens": text[:-1], "labels": text[1:], "loss_mask": torch.ones(self.seq_length)}
        if self.examples > 1:
            sample["documents"] = torch.arange(self.seq_length) * self.examples // self.seq_length
        return sample
