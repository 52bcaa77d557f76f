"""The checks that run with training, validation on one set and on named ones, and the samples at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_llama import devices
from megatron_llama.config import ConfigError
from megatron_llama.data.batches import Batches, Data
from megatron_llama.data.pretraining_samples import SampleStream
from megatron_llama.devices import get_device
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan, format_plan
from megatron_llama.system.errors import TrainingFault
from megatron_llama.train.loop import train, training_step, validate
from megatron_llama.train.metrics_file import read_metrics
from megatron_llama.train.sample_text import continue_prompts
from megatron_llama.train.step_checks import StepGuard, check_every_gradient
from tests.checkpoint.runner import run_job
from tests.data.files import data_plan, numbered, train_tokenizer, write_indexed
from tests.messages import unwrap
from tests.oracle import CPU, RaggedSamples, batches_of, make_plan, on_ranks, rank_batches, rank_data
from tests.rows import each_layout


def test_a_weight_without_gradient_is_named() -> None:
    (message,) = on_ranks(_forgotten, make_plan(1))
    assert message == "no gradient reached layers.2.mlp.down_proj.weight"


def _forgotten(plan: Plan, model: ParallelModel) -> str:
    model.forward_backward(rank_batches(plan).at(0))
    check_every_gradient(model.shards)
    next(s for s in model.shards if s.name == "layers.2.mlp.down_proj.weight").parameter.grad = None
    with pytest.raises(TrainingFault) as fault:
        check_every_gradient(model.shards)
    return str(fault.value)


def test_nan_loss_stops_before_weights_change() -> None:
    for message, unchanged in on_ranks(_poisoned, make_plan(2, "trainer.tp=2")):
        assert "step 1: loss nan, gradient norm " in message and "the weights were not updated" in message
        assert unchanged


def _poisoned(plan: Plan, model: ParallelModel) -> tuple[str, bool]:
    shard = next(s for s in model.shards if s.name == "layers.0.mlp.down_proj.weight")
    shard.local[0, 0] = float("nan")
    before = [s.local.clone() for s in model.shards]
    with pytest.raises(TrainingFault) as fault:
        training_step(1, plan, model, build_optimizer(plan, model), rank_batches(plan), StepGuard(0))
    pairs = zip(before, model.shards, strict=True)
    return str(fault.value), all(torch.equal(b.nan_to_num(), s.local.nan_to_num()) for b, s in pairs)


FP32 = "trainer.precision=fp32"
ASYNCHRONOUS = "as on an accelerator"
NOT_FUSED = (
    ["trainer.precision=bf16_sr"],
    ["optim.name=sgd", FP32],
    ["optim.name=muon"],
    *[["optim.name=onebit_adam", "trainer.zero=0", f"optim.freeze_step={step}", FP32] for step in (1, 9)],
)


@pytest.mark.parametrize(
    "settings",
    [
        ["optim.name=adamw"],
        ["trainer.precision=bf16", "trainer.micro_batch_size=8", "trainer.global_batch_size=8"],
        *[[*optimizer, *device] for optimizer in NOT_FUSED for device in ([], [ASYNCHRONOUS])],
        *[["trainer.offload=[optimizer]", f"optim.name={name}"] for name in ("adamw", "sgd")],
    ],
    ids=" ".join,
)
def test_a_skipped_step_leaves_weights_states_and_their_count(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused optimizers and asynchronous devices skip on the device, offloaded optimizers on the host."""
    on_device = ASYNCHRONOUS in settings
    monkeypatch.setattr(type(get_device("cpu")), "asynchronous", on_device)
    settings = [setting for setting in settings if setting != ASYNCHRONOUS]
    for (before, skipped, after), left in on_ranks(_skipping, make_plan(1, *settings)):
        assert all(torch.equal(one, other) for one, other in zip(before, skipped, strict=True))
        assert not all(torch.equal(one, other) for one, other in zip(skipped, after, strict=True)), (
            "the next step updates"
        )
        assert left == 0, "the skip was counted"


def _skipping(plan: Plan, model: ParallelModel) -> tuple[list[list[torch.Tensor]], int]:
    optimizer, batches, guard = build_optimizer(plan, model), rank_batches(plan), StepGuard(1)
    if devices.of(CPU).asynchronous:
        assert optimizer.skips_on_device
    inner, states = model.forward_backward, []

    def poisoned(*arguments: Any, **keywords: Any) -> torch.Tensor:
        loss = inner(*arguments, **keywords)
        if len(states) == 1:
            model.shards[-1].grad[0] = torch.inf  # type: ignore[index]
        return loss

    model.forward_backward = poisoned  # type: ignore[method-assign]
    for step in (1, 2, 3):
        training_step(step, plan, model, optimizer, batches, guard)
        tensors = [*(s.local for s in model.shards), *(tensor for *_, tensor in optimizer.states())]
        states.append([torch.tensor(optimizer.updates), *(tensor.clone() for tensor in tensors)])
    return states, guard.skips


def test_validation_repeats_its_samples_and_changes_nothing() -> None:
    answers = on_ranks(_validations, make_plan(2, "trainer.zero=1", "trainer.val_every_steps=1", "trainer.val_steps=2"))
    assert answers[0] == answers[1]
    first, second, trained, positions, gradients = answers[0]
    assert first == second != trained
    assert positions == [0, 8] * 3 and gradients == 0


def _validations(plan: Plan, model: ParallelModel) -> tuple[float, float, float, list[int], int]:
    batches, positions = rank_batches(plan), []

    class RecordingBatches(Batches):
        def on_host(self, consumed_samples: int) -> Any:
            positions.append(consumed_samples)
            return super().on_host(consumed_samples)

    sets = {"": RecordingBatches(batches.samples, plan, batches.topology, model.device)}
    first, second = validate(plan, model, sets), validate(plan, model, sets)
    gradients = sum(shard.grad is not None for shard in model.shards)
    training_step(1, plan, model, build_optimizer(plan, model), batches, StepGuard(0))
    return first, second, validate(plan, model, sets), positions, gradients


class ShorterAnswers(RaggedSamples):
    """A data set whose second batch has few tokens with loss, and other tokens."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        with_loss = torch.arange(self.seq_length) < (self.seq_length - index % 3 if index < 8 else 1 + index % 2)
        labels = sample["labels"] if index < 8 else torch.zeros_like(sample["labels"])
        # An untrained model is rarely right; the input token is its most likely prediction.
        labels = torch.where(torch.arange(self.seq_length) % 3 == 1, sample["tokens"], labels)
        return sample | {"loss_mask": with_loss.float(), "labels": labels}


def _val_loss(plan: Plan, model: ParallelModel) -> tuple[dict[str, float], list[tuple[float, int, int]]]:
    """Return the result of ``validate``, and (loss, correct tokens, tokens) of each sample, computed one by one."""
    samples = ShorterAnswers(plan.config.data.seq_length, plan.model.vocab_size)
    batches = batches_of(samples, plan)
    alone = []
    if plan.world_size == 1:
        for index in range(16):
            logits = model.logits(samples[index]["tokens"][None])
            assert logits is not None
            losses = torch.nn.functional.cross_entropy(logits[:, 0].float(), samples[index]["labels"], reduction="none")
            counted = samples[index]["loss_mask"].bool()
            right = logits[:, 0].argmax(-1) == samples[index]["labels"]
            alone.append((losses[counted].double().sum().item(), int(right[counted].sum()), int(counted.sum())))
    return validate(plan, model, {"": batches}), alone


def test_validation_is_the_mean_over_tokens_in_every_layout() -> None:
    settings = ["trainer.val_every_steps=1", "trainer.val_steps=2", "trainer.z_loss=0.5", "model.initializer_range=0.3"]
    settings += ["model.tie_word_embeddings=true", "model.vocab_size=61"]  # which tp pads
    ((result, alone),) = on_ranks(_val_loss, make_plan(1, *settings))
    sums, right, counts = (sum(column) for column in zip(*alone, strict=True))
    halves = [sum(loss for loss, *_ in half) / sum(n for *_, n in half) for half in (alone[:8], alone[8:])]
    assert abs(sum(halves) / 2 - sums / counts) > 0.1, "otherwise a mean of batch means would not differ"
    assert result == pytest.approx({"val_loss": sums / counts, "val_token_accuracy": right / counts}, rel=1e-6)
    assert 0 < right < counts
    for layout in ("trainer.tp=2", "trainer.pp=2", "trainer.zero=1", "trainer.exact=true"):
        for other, _ in on_ranks(_val_loss, make_plan(2, *settings, layout)):
            assert other == pytest.approx(result, rel=1e-6), layout


@pytest.fixture(scope="module")
def sampling(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    tokenizer = train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")
    return [
        f"data.tokenizer={tokenizer}",
        "model.vocab_size=301",  # not a multiple of tp: padding ids must not be sampled
        "model.initializer_range=0.3",
        "data.seq_length=32",
        "logging.sample_prompts=[walking,'open jumps']",
        "logging.sample_tokens=10",
    ]


@pytest.fixture(scope="module")
def alone(sampling: list[str]) -> list[str]:
    return on_ranks(continue_prompts, make_plan(1, *sampling))[0]


def test_samples_continue_their_prompts(alone: list[str], sampling: list[str]) -> None:
    assert len(alone) == 2 and alone[0].startswith("walking") and alone[1].startswith("open jumps")
    assert all(len(text) > len("open jumps") for text in alone)
    assert on_ranks(continue_prompts, make_plan(1, *sampling, "trainer.seed=7"))[0] != alone
    assert on_ranks(continue_prompts, make_plan(1, *sampling, "logging.sample_prompts=[]"))[0] == []


@each_layout(__file__, "samples")
def test_samples_are_the_same_in_every_layout(
    ranks: int, layout: list[str], sampling: list[str], alone: list[str]
) -> None:
    assert on_ranks(continue_prompts, make_plan(ranks, *sampling, *layout)) == [alone] * ranks


def test_samples_have_only_ids_of_the_tokenizer(sampling: list[str], tmp_path: Path) -> None:
    """Without a tokenizer there are no samples."""
    settings = [setting.replace("vocab_size=301", "vocab_size=3000") for setting in sampling]
    assert len(on_ranks(continue_prompts, make_plan(2, *settings, "trainer.tp=2"))[0]) == 2
    plan = make_plan(1, *sampling)
    plan.config.data.tokenizer = str(tmp_path / "nothing.model")
    assert on_ranks(continue_prompts, plan)[0] == []


class SomeLabels(RaggedSamples):
    """An epoch of 32 samples (4 steps), with labels in ``labelled`` only."""

    labelled: tuple[int, ...] = ()

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        return sample | {"loss_mask": sample["loss_mask"] * (index in self.labelled)}


STAGES = {1: [], 4: ["trainer.pp=2"]}
STEPS = ["optim.warmup_steps=1", "checkpoint.keep_best=true", "checkpoint.every_steps=2", "checkpoint.keep=20"]


@pytest.mark.parametrize("world", STAGES)
def test_batches_without_labels(tmp_path: Path, capfd: pytest.CaptureFixture[str], world: int) -> None:
    """Sample 9 is in one data-parallel rank's share of step 2."""

    def outcomes(name: str, steps: int, train: tuple[int, ...], held_out: tuple[int, ...]) -> list[str]:
        (tmp_path / name).mkdir()
        folder = f"run.dir={tmp_path / name}"
        plan = make_plan(world, *STAGES[world], *STEPS, folder, f"trainer.steps={steps}", "trainer.val_every_steps=2")
        return on_ranks(_train, plan, train, held_out)

    def saved(name: str) -> list[str]:
        return sorted(path.name for path in (tmp_path / name / "checkpoints").glob("[!.]*"))

    good = outcomes("good", 5, (9,), (3,))
    output = capfd.readouterr().err
    assert set(good) == {""} and output.count("no label in the batch of step 1, so its loss is 0") == 1
    assert "batch of step 3" not in output and max(map(len, output.splitlines())) <= 79
    epoch = outcomes("epoch", 12, (9,), (3,))
    assert all("have no label in a whole epoch of 32 samples, up to step 6" in message for message in epoch), epoch
    assert "step_00000004" in saved("epoch") and "step_00000006" not in saved("epoch")
    short = outcomes("short", 2, (), (3,))
    assert all("have no label in any of the 16 samples of the run" in message for message in short), short
    validation = outcomes("validation", 4, (1, 9, 17, 25), ())
    assert all("no token of the 32 validation samples has loss" in message for message in validation), validation
    assert "step_00000002" not in saved("validation") and "best" not in saved("validation")


def _train(plan: Plan, model: ParallelModel, labelled: tuple[int, ...], held_out: tuple[int, ...]) -> str:
    topology, parts = plan.topology(torch.distributed.get_rank()), []
    for samples in (labelled, held_out):
        some = SomeLabels(plan.config.data.seq_length, plan.model.vocab_size)
        some.labelled = samples
        parts.append(Batches(some, plan, topology, model.device))
    try:
        optimizer = build_optimizer(plan, model)
        train(plan, topology, get_device("cpu"), model, optimizer, Data(parts[0], {"": parts[1]}), StepGuard(0))
    except ConfigError as error:
        return " ".join(str(error).split())
    return ""


SIZES = {"wiki": 40, "code": 12, "tiny": 3}
"""Documents; tiny has fewer sequences than a batch."""


def write_sets(folder: Path) -> list[str]:
    """Return the settings of a training set and three validation sets of 64 ids, from another seed each."""
    for number, (name, count) in enumerate({"train": 60, **SIZES}.items()):
        documents = [[(7 * token + number) % 64 for token in document] for document in numbered(count)]
        write_indexed(folder / name, documents)
    sets = ",".join(f"{name}:{folder}/{name}" for name in SIZES)
    data = ["data=python_stdlib", "data.tokenizer=null", f"data.prefixes=[{folder}/train]", "data.seq_length=16"]
    return [*data, f"data.cache_dir={folder}/cache", f"data.validation_prefixes={{{sets}}}"]


def _losses(plan: Plan, model: ParallelModel) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of a validation, and in one process the mean loss of each set, sequence by sequence."""
    by_hand = {}
    sets = rank_data(plan).validation
    for name, batches in sets.items() if plan.world_size == 1 else ():
        samples, losses = batches.samples, []
        assert isinstance(samples, SampleStream)
        for number in range(min(len(samples), 4 * plan.config.trainer.global_batch_size)):
            logits = model.logits(samples[number]["tokens"][None])
            assert logits is not None
            losses.append(torch.nn.functional.cross_entropy(logits[:, 0].double(), samples[number]["labels"]))
        by_hand[f"val_loss/{name}"] = torch.stack(losses).mean().item()
    return validate(plan, model, sets), by_hand


def test_each_set_has_its_loss_in_every_layout(tmp_path: Path) -> None:
    settings = [*write_sets(tmp_path), "trainer.val_every_steps=1", "model.initializer_range=0.3"]
    ((metrics, by_hand),) = on_ranks(_losses, make_plan(1, *settings))
    assert len(by_hand) == 3 and {name: metrics[name] for name in by_hand} == pytest.approx(by_hand, rel=1e-6)
    assert metrics["val_loss"] == pytest.approx(sum(by_hand.values()) / 3) and len({*by_hand.values()}) == 3
    assert len(metrics) == 2 * (1 + len(SIZES))
    for layout in ("trainer.zero=3", "trainer.cp=2"):
        for other, _ in on_ranks(_losses, make_plan(2, *settings, layout)):
            assert other == pytest.approx(metrics, rel=1e-6), layout


def test_a_resumed_run_validates_the_same_and_not_before_its_first_step(tmp_path: Path) -> None:
    every = [*write_sets(tmp_path), "trainer.val_every_steps=2", "trainer.val_at_start=true", "trainer.dp=1"]
    every += ["optim=constant", "optim.warmup_steps=0"]
    logged = []
    for name, steps in (("whole", [4]), ("parts", [2, 4])):
        for count in steps:
            output = run_job(tmp_path / name, *every, f"trainer.steps={count}")
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        logged.append([{key: each[key] for key in each if "val" in key or key == "step"} for each in records])
        assert [each["step"] for each in records] == [0, 1, 2, 3, 4]
    assert logged[0] == logged[1] and [len(each) for each in logged[0]] == [9, 1, 9, 1, 9]
    assert output.count("before step 1: val loss ") == 1, "a resumed run has validated already"


def test_the_plan_of_named_sets(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "text", numbered(60))
    plan = data_plan([prefix], **{"data.validation_prefixes": [{"same": [prefix]}, {"x.y-z_1": prefix}]})
    assert "every 10 steps · 4 batches of 8 · sets same, x.y-z_1 by default" in unwrap(format_plan(plan))
    assert f"{prefix} is read in training and in validation" in " ".join(plan.notes)
