"""A run that is made longer, and stops anywhere, has the losses of the run that never stopped, across epochs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.corpus.blend import Blend
from megatron_llama.plan.schedules import RunPosition
from tests.checkpoint.runner import assert_same, make_plan, run
from tests.data.files import numbered, write_indexed
from tests.data.megatron import megatron_record
from tests.ranks import RankFailed

CONSTANT = ["optim.lr=0.01", "optim=constant", "optim.warmup_steps=2"]  # which does not depend on the steps


def data_of(folder: Path, blend: bool) -> list[str]:
    """Settings of one dataset of 56 training sequences (7 steps), or of a blend in whose 88 samples the smaller set, of
    14, is gone through three times."""
    small, large = write_indexed(folder / "small", numbered(13, 1)), write_indexed(folder / "large", numbered(37, 900))
    prefixes = f"[0.5,{small},0.5,{large}]" if blend else f"[{large}]"
    return ["data=redpajama", f"data.prefixes={prefixes}", 'data.split="80,20,0"', "model.vocab_size=4000", *CONSTANT]


@pytest.mark.parametrize(
    "blend", [pytest.param(False, id="epochs", marks=pytest.mark.slow), pytest.param(True, id="blend")]
)
def test_losses_are_those_of_the_run_that_never_stopped(tmp_path: Path, blend: bool) -> None:
    data = data_of(tmp_path, blend)
    whole = run(1, tmp_path / "whole", *data, "trainer.steps=11", until=11)
    epochs = [reading.epochs for reading in make_plan(1, tmp_path, *data, "trainer.steps=11").dataset_usage]
    assert max(epochs) > (2.7 if blend else 1.5), "no end of an epoch is crossed"
    losses = {}
    # Stopped in the first epoch, one step before it ends, and later; each time as if the run ended there.
    for until, other in ((3, []), (6, ["trainer.recompute=full"]), (11, [f"data.cache_dir={tmp_path}/another"])):
        part = run(1, tmp_path / "parts", *data, f"trainer.steps={until}", *other, until=until)
        assert list(part.losses) == list(range(part.started_at + 1, until + 1))
        losses |= part.losses
    assert losses == whole.losses  # floats, all bits
    assert_same(part.tensors, whole.tensors)
    # Where the layout gives its sums another order, to rounding.
    layouts = [["trainer.pp=2"], ["trainer.zero=3"]] if blend else [["trainer.tp=2"]]
    for until, layout in zip((5, 11), [*layouts, *layouts], strict=False):
        rest = run(2, tmp_path / "layouts", *data, f"trainer.steps={until}", *layout, until=until)
    assert rest.started_at == 5
    for step, loss in rest.losses.items():
        assert loss == pytest.approx(whole.losses[step], rel=1e-5)


def _another_batch(checkpointer: object) -> None:
    at = Blend.at
    Blend.at = lambda self, number: at(self, number + 8)  # type: ignore[method-assign]


def test_another_order_would_be_seen(tmp_path: Path) -> None:
    data = [*data_of(tmp_path, blend=True), "trainer.steps=4"]
    whole = run(1, tmp_path / "whole", *data, until=4)
    run(1, tmp_path / "parts", *data, until=3)
    assert run(1, tmp_path / "parts", *data, until=4, tamper=_another_batch).losses[4] != whole.losses[4]


def _in_megatrons_order(checkpointer: Checkpointer) -> None:
    checkpointer.data.resume(megatron_record(checkpointer.plan, 0), RunPosition())


def _without_record(checkpointer: Checkpointer) -> None:
    checkpointer.data.record = lambda consumed: None  # type: ignore[method-assign,assignment,return-value]


def test_a_run_in_megatrons_order_resumes_in_that_order(tmp_path: Path) -> None:
    data = [*data_of(tmp_path, blend=True), "trainer.steps=8"]
    whole = run(1, tmp_path / "whole", *data, until=6, tamper=_in_megatrons_order)
    new = run(1, tmp_path / "new", *data, until=2)
    assert new.losses[1] != whole.losses[1], "the orders are the same here: nothing is shown"
    run(1, tmp_path / "parts", *data, until=2, tamper=_in_megatrons_order)
    record = read_manifest(tmp_path / "parts" / "checkpoints" / "step_00000002").state.data
    assert record is not None and record["order"] == "megatron"
    second = run(1, tmp_path / "parts", *data, until=4)
    third = run(1, tmp_path / "parts", *data, until=6)
    assert second.losses | third.losses == {step: whole.losses[step] for step in (3, 4, 5, 6)}


def test_a_checkpoint_without_a_record_is_refused_in_words(tmp_path: Path) -> None:
    data = [*data_of(tmp_path, blend=False), "trainer.steps=4"]
    run(1, tmp_path / "run", *data, until=2, tamper=_without_record)
    assert read_manifest(tmp_path / "run" / "checkpoints" / "step_00000002").state.data is None
    rule = r"(?s)the\s+checkpoint\s+of\s+step\s+2\s+has\s+no\s+data\s+record.*init_from=FOLDER"
    with pytest.raises(RankFailed, match=rule):
        run(1, tmp_path / "run", *data, until=4)
