"""Size of the files of a run, by its policy of checkpoints."""

from __future__ import annotations

import pytest

from megatron_llama.config import load_config
from megatron_llama.plan import resolve
from megatron_llama.plan.memory import disk_use
from tests.paths import CONF


@pytest.mark.parametrize(
    ("words", "first", "saved", "sure", "most"),
    [
        ((), 0, 0, 1, 3),  # by time: two are kept, and one is in progress
        ((), 10, 2, 1, 1),
        ((), 100, 1, 0, 0),  # finished
        (("checkpoint=none",), 0, 0, 0, 0),
        (("trainer.steps=0",), 0, 0, 1, 1),
        (("checkpoint.every_steps=20",), 0, 0, 5, 5),
        (("checkpoint.every_steps=30",), 0, 0, 4, 4),
        (("checkpoint.every_steps=30",), 60, 2, 2, 2),
        (("checkpoint.every_steps=10", "checkpoint.keep=2"), 0, 0, 3, 3),
        (("checkpoint.every_steps=10", "checkpoint.keep=2", "checkpoint.keep_every=20"), 0, 0, 6, 6),
        (("checkpoint.every_steps=10", "checkpoint.keep=1", "checkpoint.keep_best=true"), 0, 0, 2, 3),
        (("checkpoint.every_minutes=5",), 0, 0, 1, None),
    ],
)
def test_checkpoints_at_the_same_time(
    words: tuple[str, ...], first: int, saved: int, sure: int, most: int | None
) -> None:
    more = ("trainer.val_every_steps=10",) if "checkpoint.keep_best=true" in words else ()
    plan = resolve(load_config(["model=llama_2m", "data=mock", *words, *more], CONF), 1)
    use = disk_use(plan, first, saved)
    assert (use.sure, use.most) == (sure, most)
    assert use.checkpoint == 3 * 4 * plan.parameters, "fp32 weights and two moments"


def test_lora_saves_only_its_parameters_and_export_adds_the_whole_model() -> None:
    words = ["model=llama_2m", "data=mock", "finetune=lora", "checkpoint.export_hf=true", "trainer.precision=bf16"]
    plan = resolve(load_config(words, CONF), 1)
    use = disk_use(plan, 0, 0)
    assert use.checkpoint == 3 * 4 * plan.whole.trained < plan.parameters and use.export == 2 * plan.whole.held
    assert use.sure_bytes == use.checkpoint + use.export + use.logs
