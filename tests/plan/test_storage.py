"""How ranks store parameters and gradients, by layout, precision and optimizer."""

from __future__ import annotations

import pytest

from megatron_llama.plan.plan import COPIES, PLAIN, SHARDS
from tests.oracle import make_plan

ONE_MICRO_BATCH = "trainer.micro_batch_size=8"


@pytest.mark.parametrize(
    ("ranks", "settings", "kind"),
    [
        (1, ["trainer.precision=fp32"], PLAIN),
        (1, ["trainer.precision=fp32", "trainer.zero=3"], PLAIN),
        (1, ["trainer.precision=bf16_sr"], PLAIN),
        (1, ["trainer.precision=bf16"], COPIES),
        (2, ["trainer.precision=bf16", "trainer.tp=2"], COPIES),
        (1, ["trainer.precision=bf16", "trainer.zero=3"], SHARDS),
        (2, ["trainer.precision=fp32"], SHARDS),
        (1, ["trainer.precision=fp32", "finetune.method=lora", "finetune.frozen_dtype=bf16"], COPIES),
    ],
)
def test_kinds(ranks: int, settings: list[str], kind: str) -> None:
    assert make_plan(ranks, *settings).storage.kind == kind


def test_bf16_gradients_and_the_freed_embedding_need_copies_and_one_micro_batch() -> None:
    one = make_plan(1, "trainer.precision=bf16", ONE_MICRO_BATCH).storage
    assert one.one_micro_batch and one.keeps_bf16_grads and one.frees_embedding
    others = ("trainer.micro_batch_size=4", "trainer.zero=3", "trainer.precision=fp32", "trainer.precision=bf16_sr")
    for other in others:
        storage = make_plan(1, "trainer.precision=bf16", ONE_MICRO_BATCH, other).storage
        assert not storage.keeps_bf16_grads and not storage.frees_embedding, other
    for other in ("device.name=cuda", "trainer.offload=[optimizer]"):
        storage = make_plan(1, "trainer.precision=bf16", ONE_MICRO_BATCH, other).storage
        assert storage.frees_embedding and not storage.keeps_bf16_grads, other


@pytest.mark.parametrize("tied", [False, True])
def test_stages_that_free_the_embedding(tied: bool) -> None:
    settings = ("trainer.precision=bf16", ONE_MICRO_BATCH, f"model.tie_word_embeddings={str(tied).lower()}")
    storage = make_plan(1, *settings).storage
    assert storage.frees_embedding_of(is_first=True, is_last=False)
    assert storage.frees_embedding_of(is_first=True, is_last=True) != tied
    assert not storage.frees_embedding_of(is_first=False, is_last=True)
