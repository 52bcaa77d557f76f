"""The loss-spike guard: the rule, skipped updates and rewinds in several layouts, exact resume, and its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_llama.checkpoint.folder import folder_name, saved_steps
from megatron_llama.checkpoint.manifest import Manifest, State, read_manifest
from megatron_llama.config import ConfigError
from megatron_llama.data.mock import MockDataset
from megatron_llama.data.pretraining_samples import SampleStream
from megatron_llama.devices import get_device
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from megatron_llama.system.errors import TrainingFault
from megatron_llama.train import stop_signals
from megatron_llama.train.metrics_file import read_metrics
from megatron_llama.train.run_rank import train_model
from megatron_llama.train.spike_guard import SpikeGuard, SpikeLimit
from tests.checkpoint.runner import make_plan
from tests.config.helpers import make
from tests.data.files import numbered, write_indexed
from tests.oracle import rank_data, rank_groups, rank_model
from tests.ranks import RankFailed, run_ranks
from tests.rows import each_layout

RUN = (
    *("trainer.steps=16", "trainer.spike_window=8", "checkpoint.every_steps=4", "optim=constant"),
    *("optim.warmup_steps=0", "device.peak_tflops=0.01", "logging.tensorboard=false", "trainer.global_batch_size=8"),
)
SPIKE_STEP = 10
BAD = range(8 * (SPIKE_STEP - 1), 8 * SPIKE_STEP)
"""Samples of step 10."""
Samples = Callable[[int], int]
Records = list[dict[str, Any]]
"""Lines of metrics.jsonl."""


def run(
    world: int, folder: Path, *overrides: str, bad: range = BAD, number: Samples = int, fails_at: int | None = None
) -> Records:
    """Train; return metrics.jsonl. The loss of a step with a sample in ``bad`` is tenfold; ``number`` maps samples.

    ``fails_at``: a step that fails at its first try after a rewind.
    """
    plan = make_plan(world, folder, *RUN, *overrides)
    folder.mkdir(exist_ok=True)
    run_ranks(_rank, world, plan, bad, number, fails_at)
    return read_metrics(folder / "metrics.jsonl")


def _rank(rank: int, plan: Plan, bad: range, number: Samples, fails_at: int | None) -> None:
    device, samples = get_device("cpu"), MockDataset if plan.config.data.mock else SampleStream
    item, forward_backward = samples.__getitem__, ParallelModel.forward_backward

    def renumbered(self: Any, index: int) -> dict[str, torch.Tensor]:
        sample = dict(item(self, number(index)))
        if index in bad:
            sample["tokens"] = torch.zeros_like(sample["tokens"])
        return sample

    def planted(self: ParallelModel, microbatches: Any, *args: Any, **more: Any) -> torch.Tensor:
        loss = forward_backward(self, microbatches, *args, **more)
        has_bad = torch.tensor(float(any(not batch.tokens.any(dim=-1).all() for batch in microbatches)))
        dist.all_reduce(has_bad, op=dist.ReduceOp.MAX)
        return loss * (1 + 9 * has_bad)

    def fail(self: SpikeGuard, metrics: Any, *args: Any) -> None:
        if metrics["step"] == fails_at and self.counts.rewinds:
            raise RuntimeError("planted")
        after_step(self, metrics, *args)

    after_step = SpikeGuard.after_step
    patches = (
        patch.object(samples, "__getitem__", renumbered),
        patch.object(ParallelModel, "forward_backward", planted),
        patch.object(SpikeGuard, "after_step", fail),
    )
    with patches[0], patches[1], patches[2], rank_groups(plan, rank):
        device.seed(plan.config.trainer.seed)
        train_model(plan, plan.topology(rank), device, rank_model(plan, rank), rank_data(plan))


def saved(folder: Path, step: int) -> Manifest:
    return read_manifest(folder / "checkpoints" / folder_name(step))


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer states of a checkpoint."""
    stored = saved(folder, step).stored
    return {name: stored.rows(name) for name in stored.tensors if "random" not in name}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def column(records: Records, name: str) -> list[Any]:
    return [record[name] for record in records]


# The rule


def test_the_limit_is_olmo_cores() -> None:
    """There is none before the window is half full, and old values leave the window."""
    values = torch.rand(8, generator=torch.Generator().manual_seed(0))
    deviation, mean = torch.std_mean(values)
    limit = SpikeLimit("loss", 6.0, 8, values.tolist())
    assert limit.value == pytest.approx(float(mean + 6 * deviation), rel=1e-6)
    assert limit.value == float(torch.tensor(limit.value)), "host and device compare the same fp32 number"
    assert SpikeLimit("loss", 1.0, 8, [1.0, 2.0, 1.0]).value == float("inf")
    assert SpikeLimit("loss", 1.0, 8, [1.0, 2.0, 1.0, 2.0]).value < 3
    assert SpikeLimit("loss", 1.0, 4, [100.0, 1.0, 1.0, 1.0, 1.0]).value == 1.0


@pytest.mark.parametrize(("loss", "norm", "is_spike"), [(9.0, 1.0, True), (2.0, 9.0, True), (0.1, 0.1, False)])
def test_device_and_host_take_the_same_decision(loss: float, norm: float, is_spike: bool) -> None:
    guard = guard_with_history("skip")
    assert bool(guard.rejects(torch.tensor(loss), torch.tensor(norm))) is is_spike
    with patch.object(dist, "get_rank", lambda: 1):
        assert guard.check(9, loss, norm, []) is not is_spike


def guard_with_history(kind: str) -> SpikeGuard:
    guard = SpikeGuard(make_plan(1, Path("unused"), *RUN, f"trainer.spike_guard={kind}").config.trainer)
    for step in range(8):
        guard.check(step, 2.0 + 0.1 * (step % 2), 1.0 + 0.1 * (step % 2), [])
    return guard


def test_nonfinite_steps_have_their_own_rule() -> None:
    guard = guard_with_history("skip")
    guard.skips = 1
    before = guard.state()
    assert guard.rejects(torch.tensor(torch.nan), torch.tensor(1.0))
    with patch.object(dist, "get_rank", lambda: 1), patch.object(dist, "get_world_size", lambda: 1):
        with patch.object(dist, "all_gather_object", lambda *_: None):
            assert not guard.check(9, float("nan"), 1.0, [])
            assert guard.state() == before, "means and counts exclude it"
            with pytest.raises(TrainingFault, match="loss nan"):
                guard.check(10, float("nan"), 1.0, [])


def test_repeated_spikes_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    guard = SpikeGuard(make(**{"trainer.spike_window": 8}).trainer)
    for step in (1, 5, 9, 10, 20, 26, 22):  # a rewind goes back from step 26
        guard._note_spike(step)
    lines = capsys.readouterr().err.replace("\n    ", " ").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 10", "step 22"]
    assert lines[0].startswith("step 10: 3 spikes within 8 steps: ")


# Skipped updates


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Records]:
    """Metrics of one process, by guard."""
    folder = tmp_path_factory.mktemp("one")
    return {kind: run(1, folder / kind, f"trainer.spike_guard={kind}") for kind in ("off", "skip", "rewind")}


@each_layout(__file__, "spike guard")
def test_a_skipped_step_changes_no_weight_and_no_state(
    tmp_path: Path, ranks: int, layout: list[str], one_process: dict[str, Records]
) -> None:
    records = run(ranks, tmp_path / "run", *layout, "trainer.spike_guard=skip", "checkpoint.every_steps=1")
    assert column(records, "spike_skipped_steps") == [0] * 9 + [1] * 7
    assert_equal(tensors(tmp_path / "run", 9), tensors(tmp_path / "run", 10))
    assert (saved(tmp_path / "run", 10).state.updates, saved(tmp_path / "run", 16).state.updates) == (9, 15)
    oracle = one_process["skip"]
    assert column(records, "reduced_train_loss") == pytest.approx(column(oracle, "reduced_train_loss"), abs=1e-5)
    assert column(records, "consumed_samples") == [8 * step for step in range(1, 17)]


def test_off_is_the_default_and_reports_nothing(one_process: dict[str, Records]) -> None:
    assert "spike_rewinds" not in one_process["off"][-1]
    off, skip = (column(one_process[kind], "reduced_train_loss") for kind in ("off", "skip"))
    assert off[:10] == skip[:10] and off[10:] != skip[10:]


# Rewinds


def after_the_spike(index: int) -> int:
    """The sample that a run without the data of the rewind reads: steps 9 and 10 are missing."""
    return index if index < 64 else index + 16


@each_layout(__file__, "spike guard")
def test_a_rewind_equals_a_run_without_the_data(tmp_path: Path, ranks: int, layout: list[str]) -> None:
    records = run(ranks, tmp_path / "run", *layout, "trainer.spike_guard=rewind")
    oracle = run(ranks, tmp_path / "oracle", *layout, number=after_the_spike, bad=range(0))
    for name in ("step", "reduced_train_loss", "gradient_norm", "lr"):
        assert column(records, name) == column(oracle, name)
    assert_equal(tensors(tmp_path / "run", 16), tensors(tmp_path / "oracle", 16))
    assert column(records, "spike_rewinds") == [0] * 8 + [1] * 8
    assert column(records, "spike_skipped_samples") == [0] * 8 + [16] * 8
    assert column(records, "consumed_samples")[7:9] == [64, 88]
    assert column(records, "consumed_tokens")[7:9] == [64 * 16, 88 * 16]
    state = saved(tmp_path / "run", 16).state
    assert state.spikes is not None and state.spikes["skipped_samples"] == [[64, 80]]
    assert state.consumed_samples == 8 * 16 + 16


def test_a_run_that_is_killed_after_a_rewind_repeats_it(tmp_path: Path, one_process: dict[str, Records]) -> None:
    guard, whole = "trainer.spike_guard=rewind", one_process["rewind"]
    with pytest.raises(RankFailed, match="planted"):
        run(1, tmp_path / "killed", guard, "checkpoint.resume=never", fails_at=11)  # step 12 would be saved
    assert read_metrics(tmp_path / "killed" / "metrics.jsonl")[-1]["step"] == 11
    resumed = run(1, tmp_path / "killed", guard)
    assert column(resumed, "reduced_train_loss") == column(whole, "reduced_train_loss")
    assert column(resumed, "spike_rewinds") == column(whole, "spike_rewinds")


@pytest.mark.parametrize("kind", ["skip", "rewind"])
def test_resume_keeps_the_means_and_the_skipped_data(
    tmp_path: Path, kind: str, one_process: dict[str, Records]
) -> None:
    run(1, tmp_path / "run", f"trainer.spike_guard={kind}", "trainer.steps=9")  # in the window before the spike
    run(1, tmp_path / "run", f"trainer.spike_guard={kind}", "trainer.steps=13")
    records = run(1, tmp_path / "run", f"trainer.spike_guard={kind}", "trainer.steps=16")
    assert column(records, "spike_rewinds" if kind == "rewind" else "spike_skipped_steps") == [0] * 9 + [1] * 7
    if kind == "skip":  # a rewind resumes from step 9 here, from step 8 in the other run
        assert column(records, "reduced_train_loss") == column(one_process[kind], "reduced_train_loss")
    state = saved(tmp_path / "run", 16).state.spikes
    assert state is not None and state["skipped_samples"] == ([] if kind == "skip" else [[72, 80]])


@pytest.mark.slow
def test_a_rewound_run_resumes_in_another_layout(tmp_path: Path, one_process: dict[str, Records]) -> None:
    run(2, tmp_path / "run", "trainer.tp=2", "trainer.spike_guard=rewind", "trainer.steps=13")
    records = run(2, tmp_path / "run", "trainer.dp=2", "trainer.spike_guard=rewind")
    losses = column(one_process["rewind"], "reduced_train_loss")
    assert column(records, "reduced_train_loss") == pytest.approx(losses, abs=1e-5)


def test_a_rewind_continues_in_each_dataset_of_a_blend(tmp_path: Path) -> None:
    small, large = (
        write_indexed(tmp_path / name, numbered(count, first))
        for name, count, first in (("small", 13, 1), ("large", 37, 900))
    )
    prefixes = f"data.prefixes=[0.5,{small},0.5,{large}]"
    blend = ("data=redpajama", prefixes, 'data.split="80,20,0"', "model.vocab_size=4000")
    records = run(1, tmp_path / "run", *blend, "trainer.spike_guard=rewind", "trainer.spike_factor=20")
    oracle = run(1, tmp_path / "oracle", *blend, number=after_the_spike, bad=range(0))
    assert column(records, "spike_rewinds")[-1] == 1
    assert column(records, "reduced_train_loss") == column(oracle, "reduced_train_loss")
    assert saved(tmp_path / "run", 16).state.data["consumed_samples"] == 144  # type: ignore[index]


# Ends


def test_rewinds_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="no rewinds are left after trainer.spike_rewinds=2"):
        few = "trainer.spike_rewinds=2"
        run(2, tmp_path / "run", "trainer.tp=2", "trainer.spike_guard=rewind", few, bad=range(72, 999))


def test_a_rewind_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="no checkpoint to rewind to. Write checkpoint.every_steps below 10"):
        run(1, tmp_path / "run", "trainer.spike_guard=rewind", "checkpoint.every_steps=15")


def test_a_stop_signal_during_the_spike_saves_nothing(tmp_path: Path) -> None:
    """The next start rewinds."""
    with patch.object(stop_signals.StopSignals, "received", property(lambda signals: spiking())):
        with pytest.raises(RankFailed):
            run(2, tmp_path / "run", "trainer.tp=2", "trainer.spike_guard=rewind")
    assert saved_steps(tmp_path / "run" / "checkpoints") == [8, 4]
    resumed = run(2, tmp_path / "run", "trainer.tp=2", "trainer.spike_guard=rewind")
    whole = run(2, tmp_path / "whole", "trainer.tp=2", "trainer.spike_guard=rewind")
    assert column(resumed, "reduced_train_loss") == column(whole, "reduced_train_loss")


def spiking() -> bool:
    """Whether rank 1 is rewinding: its phase names the step."""
    from megatron_llama.system import phase

    return dist.get_rank() == 1 and phase.current().name == f"step {SPIKE_STEP}"


def test_a_damaged_state_is_rejected() -> None:
    state = State(1, 8, "adamw", 1, 1, {}, spikes={"rewinds": "many"})
    with pytest.raises(ConfigError, match="trainer.spike_guard is damaged"):
        guard_with_history("rewind").restore(state)
