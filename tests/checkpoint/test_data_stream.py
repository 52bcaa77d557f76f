"""A run that resumes with other steps, batches or data, and a run that stops anywhere, across epochs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.manifest import State, read_manifest
from megatron_llama.config import load_config
from megatron_llama.data.batches import Batches
from megatron_llama.data.mock import MockDataset
from megatron_llama.data.pretraining_samples import EndlessDataset
from megatron_llama.model.inputs import MicroBatch
from megatron_llama.optim import build_optimizer
from megatron_llama.plan import Plan, resolve
from tests.checkpoint.runner import SMALL, assert_same, make_plan, resumed, run, run_job
from tests.data.files import numbered, write_indexed
from tests.messages import raises_with_message
from tests.oracle import rank_groups, rank_model
from tests.paths import CONF
from tests.ranks import RankFailed, run_ranks

ADAM = ["optim.lr=0.01", "optim.warmup_steps=2"]
NO_SAVE = "checkpoint.save_last=false"
ON_FILES = ["data=redpajama", 'data.split="80,20,0"', "data.seq_length=16", "model.vocab_size=20000"]


def state_of(run_dir: Path) -> State:
    """Return the state of the newest checkpoint."""
    return read_manifest(find_checkpoint(run_dir)).state


def cosine(step: int, steps: int) -> float:
    """The rate of ADAM's schedule at a step, counted from 0: from 0.01 to 0.001 after two steps of warm-up."""
    return 0.001 + 0.009 * 0.5 * (1 + math.cos(math.pi * (step - 2) / (steps - 2)))


def test_more_steps_log_a_jump_of_the_rate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(1, tmp_path / "run", *ADAM, "trainer.steps=4", until=4)
    assert state_of(tmp_path / "run").lr == pytest.approx(0.001)  # of a fifth step, after the end of the cosine
    capfd.readouterr()
    assert run(1, tmp_path / "run", *ADAM, "trainer.steps=12", until=5).started_at == 4
    output = capfd.readouterr().err
    assert "checkpoint: trainer.steps: from 4 to 12\n" in output
    assert f"the learning rate of step 5 is {cosine(4, 12):g}, not 0.001\n" in output and "schedule:" not in output
    # A schedule that does not depend on the steps logs nothing; the stream test below compares such runs.
    constant = [*ADAM, "optim=constant"]
    run(1, tmp_path / "constant", *constant, "trainer.steps=3", until=3)
    capfd.readouterr()
    run(1, tmp_path / "constant", *constant, "trainer.steps=12", NO_SAVE)
    assert "learning rate" not in capfd.readouterr().err


def test_losses_of_an_interrupted_run_across_epochs(tmp_path: Path) -> None:
    """A blend: in 88 samples, the small set of 14 is read three times."""
    small = write_indexed(tmp_path / "small", numbered(13, 1))
    large = write_indexed(tmp_path / "large", numbered(37, 900))
    settings = [*ON_FILES, f"data.prefixes=[0.5,{small},0.5,{large}]", *ADAM, "optim=constant"]
    whole = run(1, tmp_path / "whole", *settings, "trainer.steps=11", until=11)
    usage = make_plan(1, tmp_path, *settings, "trainer.steps=11").dataset_usage
    assert max(dataset.epochs for dataset in usage) > 2.7, "no end of an epoch is crossed"
    joined: dict[int, float] = {}
    # Stopped one step before the first epoch ends, as if the run ended there.
    for until, other in ((6, ["trainer.recompute=full"]), (11, [f"data.cache_dir={tmp_path}/another"])):
        part = run(1, tmp_path / "parts", *settings, f"trainer.steps={until}", *other, until=until)
        joined |= part.losses
    assert joined == whole.losses  # floats, all bits
    assert_same(part.tensors, whole.tensors)


def _by_hand(rank: int, plan: Plan, sizes: list[int]) -> tuple[list[float], list[int]]:
    """Train steps of the given sizes in micro batches of one; return losses and consumed samples."""
    with rank_groups(plan, rank):
        model = rank_model(plan, rank)
        optimizer = build_optimizer(plan, model)
        samples = MockDataset(10**6, 16, 64, plan.config.trainer.seed)
        results, consumed = [], [0]
        for size in sizes:
            batch = []
            for number in range(consumed[-1], consumed[-1] + size):
                tensors = (samples[number][key][None] for key in ("tokens", "labels", "loss_mask"))
                batch.append(MicroBatch(*tensors, token_counts=torch.tensor([16, 16 * 16])))
            results.append(model.forward_backward(batch).item())
            optimizer.step(optimizer.gradient_norm())
            consumed.append(consumed[-1] + size)
        return results, consumed[1:]


CONSTANT = [*ADAM, "optim=constant", "trainer.steps=9", "trainer.micro_batch_size=1"]
RISING = [*CONSTANT, "trainer.global_batch_size=4", "trainer.batch_schedule=[[10,8],[30,2]]"]
RISING_SIZES = [4, 4, 4, 8, 8, 8, 2, 2, 2]  # 4, 8, 12 (of 10), 20, 28, 36 (of 30), ...


@pytest.fixture(scope="module")
def by_hand() -> tuple[list[float], list[int]]:
    """RISING, batch by batch."""
    return run_ranks(_by_hand, 1, make_plan(1, Path("unused"), *RISING), RISING_SIZES)[0]


def test_a_batch_schedule_is_that_counted_by_hand(tmp_path: Path, by_hand: tuple[list[float], list[int]]) -> None:
    expected, consumed = by_hand
    folder = tmp_path / "run"
    for more in (["trainer.tp=2", "checkpoint.every_steps=5", "trainer.steps=5"], ["trainer.dp=2"]):
        run_job(folder, *RISING, *more)  # the second run resumes in another layout
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["reduced_train_loss"] for record in records] == pytest.approx(expected, rel=1e-5)
    assert [record["consumed_samples"] for record in records] == consumed == [4, 8, 12, 20, 28, 36, 38, 40, 42]
    assert [record["consumed_tokens"] for record in records] == [16 * samples for samples in consumed]
    assert [record["global_batch_size"] for record in records] == RISING_SIZES
    state = state_of(folder)
    assert (state.step, state.consumed_samples, state.consumed_tokens) == (9, 42, 16 * 42)
    output = run_job(folder, *RISING, "trainer.dp=2", "optim.lr=0.02", "trainer.seed=7", status=2)
    assert output.count("checkpoint.allow=[data,optim]") == 2 and "Traceback" not in output


def test_another_batch_size_continues_after_the_consumed_samples(
    tmp_path: Path, by_hand: tuple[list[float], list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    first = run(1, tmp_path, *CONSTANT, "trainer.global_batch_size=4", until=3)
    eight = "trainer.global_batch_size=8"
    with raises_with_message(RankFailed, r"trainer.global_batch_size = 8.*checkpoint.allow=\[batch\]"):
        run(1, tmp_path, *CONSTANT, eight, until=6)
    capfd.readouterr()
    second = run(1, tmp_path, *CONSTANT, eight, "checkpoint.allow=[batch]", until=5)
    assert "checkpoint: trainer.global_batch_size: from 4 to 8, allowed\n" in capfd.readouterr().err
    assert state_of(tmp_path).consumed_samples == 12 + 2 * 8
    third = run(1, tmp_path, *CONSTANT, eight, until=6)  # its checkpoint has the new size
    assert list((first.losses | second.losses | third.losses).values()) == by_hand[0][:6]
    assert (state_of(tmp_path).consumed_samples, state_of(tmp_path).consumed_tokens) == (36, 36 * 16)


Reads = list[tuple[str, int]]
"""(dataset, which of its samples) in the order of reading."""


def reads_of(folder: Path, *overrides: str, until: int) -> Reads:
    """Return the samples of a run in ``folder`` up to step ``until``, which it saves."""
    return run_ranks(_read, 1, make_plan(1, folder / "run", *ON_FILES, *overrides), until)[0]


def _read(rank: int, plan: Plan, until: int) -> Reads:
    with resumed(rank, plan) as (_, checkpointer, schedule):
        data = checkpointer.data
        assert isinstance(data.train, Batches)
        known: dict[tuple[int, ...], tuple[str, int]] = {}
        for path in data.train.samples.datasets:  # type: ignore[attr-defined]
            one = EndlessDataset(plan, path, 0)
            for number in range(200):
                sample = one.sample(number)
                text = torch.cat((sample["tokens"], sample["labels"][-1:]))
                known[tuple(text.tolist())] = (Path(path).name, number)
        results = []
        for step in range(schedule.start.step + 1, until + 1):
            for batch in data.train.at(schedule.after(step - 1).samples):
                for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
                    results.append(known[tuple(torch.cat((tokens, labels[-1:])).tolist())])
            checkpointer.after_step(step)
        checkpointer.finish(until)
        return results


def of(name: str, reads: Reads) -> list[int]:
    return [number for dataset, number in reads if dataset == name]


@pytest.fixture
def datasets(tmp_path: Path) -> Path:
    for name, first_id in (("a", 1), ("b", 6000), ("c", 12000)):
        write_indexed(tmp_path / name, numbered(150, first_id))
    return tmp_path


def blend(folder: Path, *items: object) -> str:
    """data.prefixes with these weights and datasets."""
    return f"data.prefixes=[{','.join(str(folder / item) if isinstance(item, str) else str(item) for item in items)}]"


def test_each_dataset_continues_after_its_last_sample(datasets: Path) -> None:
    allow = "checkpoint.allow=[data]"
    first = reads_of(datasets, blend(datasets, 0.5, "a", 0.5, "b"), until=4)
    assert len(of("a", first)) == len(of("b", first)) == 16
    with pytest.raises(RankFailed, match="data.prefixes"):
        reads_of(datasets, blend(datasets, 0.25, "a", 0.75, "b"), until=5)
    second = reads_of(datasets, blend(datasets, 0.25, "a", 0.75, "b"), allow, until=8)
    assert (len(of("a", second)), len(of("b", second))) == (8, 24)
    third = reads_of(datasets, blend(datasets, 0.5, "c", 0.5, "b"), allow, until=10)  # a rests, c is new
    assert (len(of("c", third)), len(of("b", third))) == (8, 8)
    fourth = reads_of(datasets, blend(datasets, 0.5, "a", 0.5, "c"), allow, until=12)
    fifth = reads_of(datasets, blend(datasets, 0.5, "a", 0.5, "c"), until=13)  # the same blend: nothing to allow
    reads = first + second + third + fourth + fifth
    for name, count in (("a", 16 + 8 + 8 + 4), ("b", 16 + 24 + 8), ("c", 8 + 8 + 4)):
        assert of(name, reads) == list(range(count)), f"{name}: a sample was skipped or read twice"


def test_another_seed_orders_the_remaining_samples(datasets: Path) -> None:
    one, seed = blend(datasets, 1, "a"), "trainer.seed=5"
    reads_of(datasets, one, until=3)
    with pytest.raises(RankFailed, match="trainer.seed"):
        reads_of(datasets, one, seed, until=4)
    # Numbers are of the new seed's order: 24 samples of the epoch were read.
    assert of("a", reads_of(datasets, one, seed, "checkpoint.allow=[data]", until=4)) == list(range(24, 32))


def test_epochs_in_other_batches_log_their_end(datasets: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = (["trainer.global_batch_size=4"], ["trainer.global_batch_size=16", "checkpoint.allow=[batch]"])
    common = [item for item in SMALL if "trainer.steps" not in item]
    common += [*ON_FILES, f"data.prefixes=[{datasets}/a]", "trainer.epochs=1", f"run.dir={datasets}/run"]
    (small, large) = (resolve(load_config([*common, *size], CONF), 1) for size in sizes)
    run_ranks(_read, 1, small, 2)
    capfd.readouterr()
    run_ranks(_read, 1, large, 3)
    planned = large.config.trainer.steps * 16
    ends, right = 8 + (large.config.trainer.steps - 2) * 16, 2 + (planned - 8) // 16
    output = capfd.readouterr().err
    assert f"{large.config.trainer.steps} steps (trainer.epochs) end at sample {ends}; " in output
    assert f"for {planned} samples write trainer.steps={right}\n" in output


def test_another_sequence_length_continues_at_the_token(datasets: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = blend(datasets, 1, "a")
    assert of("a", reads_of(datasets, one, until=3)) == list(range(24))
    longer = ["data.seq_length=20", "checkpoint.allow=[data]"]
    capfd.readouterr()
    assert of("a", reads_of(datasets, one, *longer, until=4))[0] == math.ceil(24 * 16 / 20)
    assert "data.seq_length: from 16 to 20, allowed" in capfd.readouterr().err
    state = state_of(datasets / "run")
    assert (state.consumed_samples, state.consumed_tokens) == (32, 24 * 16 + 8 * 20)
    assert of("a", reads_of(datasets, one, *longer, until=5)) == list(range(28, 36))  # no second rounding
