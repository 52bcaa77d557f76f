"""Bytes per rank by precision and ZeRO stage, and the rejection of plans that do not fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron_llama.arch.shapes import StageParameters
from megatron_llama.config import Config, load_config
from megatron_llama.devices import find_device
from megatron_llama.plan import Machine, Plan, format_plan, resolve, stage_memory
from megatron_llama.plan.memory import States, rank_memory, stage_footprints
from megatron_llama.system.tables import GIB, gib
from tests.config.helpers import make, problems_of
from tests.paths import CONF

COUNT = 1_000_000


def plan_of(zero: int, precision: str, dp: int = 4, optimizer: str = "adamw", micro_batches: int = 2) -> Plan:
    changes = {
        "trainer.zero": zero,
        "trainer.precision": precision,
        "optim.name": optimizer,
        "trainer.global_batch_size": dp * micro_batches,
    }
    return resolve(make(**changes), dp)


def memory_of(plan: Plan) -> States:
    return rank_memory(plan, StageParameters(held=COUNT, trained=COUNT, quantizable=0))


@pytest.mark.parametrize(
    ("zero", "precision", "weights", "gradients", "optimizer"),
    [
        (0, "fp32", 4 + 4, 4, 8),
        (1, "fp32", 4 + 4 / 4, 4, 8 / 4),
        (2, "fp32", 4 + 4 / 4, 4 / 4, 8 / 4),
        (3, "fp32", 4 / 4, 4 / 4, 8 / 4),
        (0, "bf16", 4 + 2, 4, 8),
        (1, "bf16", 2 + 4 / 4, 4, 8 / 4),
        (2, "bf16", 2 + 4 / 4, 4 / 4, 8 / 4),
        (3, "bf16", 4 / 4, 4 / 4, 8 / 4),
        (0, "bf16_sr", 2 + 2, 2, 4),
        (1, "bf16_sr", 2 + 2 / 4, 2, 4 / 4),
        (2, "bf16_pure", 2 + 2 / 4, 2 / 4, 4 / 4),
        (3, "bf16SR", 2 / 4, 2 / 4, 4 / 4),
        (1, "fp32_OptStates", 2 + 2 / 4, 2, 8 / 4),
        (1, "fp32_ZeroOptMaster", 2 + 4 / 4, 2, 8 / 4),
        (0, "fp32_ZeroOptMaster", 2 + 4, 4, 8),
        (1, "fp32_ZeroOptMasterGradAcc", 2 + 4 / 4, 4, 8 / 4),
        (1, "megatron_amp_O2", 2 + 4 / 4, 4, 8 / 4),
    ],
)
def test_bytes_per_parameter(zero: int, precision: str, weights: float, gradients: float, optimizer: float) -> None:
    memory = memory_of(plan_of(zero, precision))
    assert (memory.weights, memory.gradients, memory.optimizer) == (
        weights * COUNT,
        gradients * COUNT,
        optimizer * COUNT,
    )
    assert memory.total == (weights + gradients + optimizer) * COUNT


def test_sgd_has_its_momentum_and_one_micro_batch_is_reduced_at_once() -> None:
    assert memory_of(plan_of(1, "fp32", optimizer="sgd")).optimizer == 4 / 4 * COUNT
    once = memory_of(plan_of(1, "fp32", micro_batches=1))
    assert (once.weights, once.gradients, once.optimizer) == (4 * COUNT, COUNT, 2 * COUNT)


def test_8_bit_states_are_planned_and_shown() -> None:
    config = load_config(["model=llama7b", "data=mock", "trainer.zero=0", "optim.state_bits=8"], CONF)
    plan = resolve(config, 1)
    norms = (2 * 32 + 1) * 4096
    assert stage_memory(plan)[0].optimizer == 2 * (1.125 * (plan.parameters - norms) + 4 * norms)
    assert "states of matrices in 8 bits: 1.125 bytes per value" in format_plan(plan)
    assert not any("state_bits" in note for note in plan.notes)
    toy = {
        "model.hidden_size": 32,
        "model.intermediate_size": 32,
        "model.vocab_size": 99,
        "model.num_attention_heads": 4,
    }
    (note,) = resolve(make(**toy, **{"optim.state_bits": 8}), 1).notes
    assert note.startswith("optim.state_bits=8 has no effect")


def test_each_stage_needs_what_its_parameters_need() -> None:
    plan = resolve(make(**{"trainer.pp": 2, "model.num_hidden_layers": 5}), 2)
    assert [memory.total for memory in stage_memory(plan)] == [16 * stage.held for stage in plan.stages]


def test_one_data_parallel_rank_holds_its_weights_once_where_nothing_is_cast() -> None:
    for zero in (0, 1, 2, 3):
        assert memory_of(plan_of(zero, "fp32", dp=1)).weights == 4 * COUNT
        assert memory_of(plan_of(zero, "bf16_sr", dp=1)).weights == 2 * COUNT
    assert memory_of(plan_of(1, "bf16", dp=1)).weights == (4 + 2) * COUNT
    assert memory_of(plan_of(1, "fp32_ZeroOptMaster", dp=1)).weights == (4 + 2) * COUNT


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    settings = ["trainer.global_batch_size=16", "trainer.precision=fp32", "data.seq_length=256"]
    config = load_config(["model=llama7b", "data=mock", *settings], CONF)
    (problem,) = problems_of(config, 8, Machine(48 * GIB, 1, "one A40"))
    assert problem.value == "llama7b"
    assert "one A40 has 48 GiB" in problem.rule
    assert "trainer.zero=2" in problem.instead
    config.trainer.zero = 2
    assert problems_of(config, 8, Machine(48 * GIB, 1, "one A40")) == []


def test_a_bigger_grid_is_advised_where_sharding_can_not_help_and_then_fits() -> None:
    config = load_config(["model=llama70b", "data=mock", "trainer.zero=3"], CONF)
    machine = Machine(80 * GIB, 1, "one H100")
    (problem,) = problems_of(config, 8, machine)
    assert "trainer.tp=8 trainer.pp=2 on a multiple of 16 devices (64.2 GiB" in problem.instead
    config.trainer.tp, config.trainer.pp = 8, 2
    assert problems_of(config, 16, machine) == []


def test_ranks_on_one_host_share_its_memory() -> None:
    config = make()
    needed = max(memory.total for memory in stage_memory(resolve(config, 4)))
    assert problems_of(config, 4, Machine(4 * needed, 4)) == []
    (problem,) = problems_of(config, 4, Machine(4 * needed - 1, 4))
    assert "for 4 ranks" in problem.rule
    assert "smaller model" in problem.instead or "trainer.zero" in problem.instead


def test_stated_memory_goes_before_what_was_found() -> None:
    config = load_config(["model=llama7b", "data=mock", "device.memory_gib=24"], CONF)
    (problem,) = problems_of(config, 1, Machine(1000 * GIB))
    assert (problem.field, problem.value) == ("device.memory_gib", 24)
    config.device.memory_gib = 200
    assert problems_of(config, 1, Machine(1 * GIB)) == []


def test_a_dry_run_notes_what_this_machine_lacks_and_refuses_what_was_stated() -> None:
    config = load_config(["model=llama7b", "data=mock", "dry_run=true", "trainer.global_batch_size=16"], CONF)
    plan = resolve(config, 1, Machine(1 * GIB, 1, "this laptop"))
    assert "this laptop has 1 GiB" in plan.notes[0]
    assert resolve(config, 1, Machine(1000 * GIB)).notes == ()
    config.device.memory_gib = 1
    assert [problem.field for problem in problems_of(config, 1)] == ["device.memory_gib"]


def test_the_machine_changes_nothing_else() -> None:
    config = load_config(["model=llama7b", "device=cpu", "data=mock", "dry_run=true"], CONF)
    assert replace(resolve(config, 1, Machine(1 * GIB)), notes=()) == replace(resolve(config, 1), notes=())


def test_activations_that_can_not_fit_are_refused_on_an_accelerator_alone() -> None:
    """Llama-3-8B, zero 3 over 8, micro batch 8 x 8192: 15 GiB of states, hundreds of activations."""
    settings = ["model=llama3_8b", "data=mock", "data.seq_length=8192", "trainer.zero=3", "trainer.precision=bf16"]
    batch = ["trainer.micro_batch_size=8", "trainer.global_batch_size=128"]
    config = load_config([*settings, *batch], CONF)
    machine = Machine(80 * GIB, 1, "one H100", accelerator=True)
    (problem,) = problems_of(config, 8, machine)
    assert "activations 349 GiB, logits 4.42 GiB" in problem.rule
    assert problems_of(config, 8, replace(machine, accelerator=False)) == [], "a host's memory counts states alone"
    config.trainer.micro_batch_size = 1
    assert problems_of(config, 8, machine) == []


@pytest.mark.parametrize(
    "settings",
    [
        [
            "model=llama3_8b",
            "data.seq_length=8192",
            "trainer.zero=3",
            "trainer.micro_batch_size=8",
            "trainer.precision=fp32",
        ],
        ["model=llama70b", "data.seq_length=4096", "trainer.tp=4", "trainer.precision=bf16"],
        ["model=llama13b", "data.seq_length=4096", "trainer.precision=fp32"],
        ["model=llama70b", "data.seq_length=4096", "finetune=lora", "trainer.precision=bf16"],
    ],
    ids=["activations", "states", "both", "lora"],
)
def test_each_advice_is_tried_and_fits(settings: list[str]) -> None:
    """Append each suggested change to the command, as a user would."""
    typed = [*settings, "data=mock", "trainer.global_batch_size=128"]
    machine = Machine(80 * GIB, 1, "one H100", accelerator=True)
    (problem,) = problems_of(load_config(typed, CONF), 16, machine)
    options = [option.partition(" (")[0] for option in problem.instead.removeprefix("write ").split(", or ")]
    assert 1 <= len(options) <= 3 and len(set(options)) == len(options)
    for option in options:
        words, _, devices = option.partition(" on a multiple of ")
        world = int(devices.removesuffix(" devices") or 16)
        assert problems_of(load_config([*typed, *words.split()], CONF), world, machine) == [], option


def test_states_in_8_bits_are_advised_where_they_do_and_are_not_there_yet() -> None:
    """One device, so that nothing can be shared: weights and gradients of 7 B, and 14 or 50 GiB of states."""
    settings = ["model=llama7b", "data=mock", "data.seq_length=512", "trainer.precision=bf16", "trainer.recompute=full"]
    machine = Machine(96 * GIB, 1, "one device", accelerator=True)
    (problem,) = problems_of(load_config(settings, CONF), 1, machine)
    assert re.match(r"write optim.state_bits=8 \([\d.]+ GiB", problem.instead), problem.instead
    assert problems_of(load_config([*settings, "optim.state_bits=8"], CONF), 1, machine) == []
    for more in (["optim.name=onebit_adam", "trainer.zero=0"], ["model.intermediate_size=11000"]):  # not 32 a block
        (problem,) = problems_of(load_config([*settings, *more], CONF), 1, machine)
        assert problem.field == "model" and "state_bits" not in problem.instead, more
    (problem,) = problems_of(
        load_config([*settings, "optim.state_bits=8"], CONF), 1, replace(machine, memory_bytes=GIB)
    )
    assert "state_bits" not in problem.instead, "it is there"


def test_offloading_is_advised_where_a_device_has_a_host_beside_it_and_then_fits() -> None:
    """One device with less memory: 8-bit states do not fit, offloaded states do."""
    settings = ["model=llama7b", "data=mock", "data.seq_length=512", "trainer.precision=bf16", "trainer.recompute=full"]
    machine = Machine(80 * GIB, 1, "one device", accelerator=True)
    (problem,) = problems_of(load_config(settings, CONF), 1, machine)
    # 4 bytes for each of an fp32 weight, its gradient and two states, of 6.74 billion.
    suggestion = r"write trainer.precision=bf16_sr \([\d.]+ GiB[^)]*\), or "
    suggestion += r"trainer.offload=\[optimizer\] \([\d.]+ GiB and 100 GiB of its host, \+\d+% time\), or "
    assert re.match(suggestion + r"\S+ on a multiple of 2 devices", problem.instead), problem.instead
    assert problems_of(load_config([*settings, "trainer.precision=bf16_sr"], CONF), 1, machine) == []
    followed = load_config([*settings, "trainer.offload=[optimizer]"], CONF)
    assert problems_of(followed, 1, machine) == []
    (problem,) = problems_of(followed, 1, replace(machine, memory_bytes=GIB))
    assert "offload=[optimizer]" not in problem.instead, "it is there"
    # On a CPU the host is the device.
    (problem,) = problems_of(load_config([*settings, "device=cpu"], CONF), 1, replace(machine, accelerator=False))
    assert "offload" not in problem.instead and "optim.state_bits=8 (" in problem.instead


def test_bf16_weights_with_recomputation_are_advised_before_offloading() -> None:
    """7 B on one device of 80 GiB: fp32 master weights and states alone take 100 GiB."""
    settings = ["model=llama7b", "data=mock", "data.seq_length=4096", "trainer.precision=bf16"]
    settings += ["trainer.micro_batch_size=2", "device=cuda"]
    machine = Machine(80 * GIB, 1, "one device", accelerator=True)
    (problem,) = problems_of(load_config(settings, CONF), 1, machine)
    first, *others = problem.instead.removeprefix("write ").split(", or ")
    assert first.startswith("trainer.precision=bf16_sr trainer.recompute=full ("), problem.instead
    assert any("trainer.offload=" in option for option in others), problem.instead
    assert problems_of(load_config([*settings, *first.partition(" (")[0].split()], CONF), 1, machine) == []


LONG = ["data.seq_length=262144", "model.max_position_embeddings=262144", "model.num_hidden_layers=80"]


@pytest.mark.parametrize(
    ("settings", "world", "size", "expected"),
    [
        (
            ["model=llama_110m", *LONG, "trainer.recompute=full", "optim.name=onebit_adam", "trainer.zero=0"],
            1,
            38,
            "[activations] ",
        ),
        (["model=llama7b", "trainer.recompute=elementwise"], 1, 68, "[activations,optimizer] "),
        (["model=llama7b", "trainer.offload=[activations]"], 1, 72, "[activations,optimizer] "),
        (
            ["model=llama7b", "trainer.offload=[optimizer]", "trainer.micro_batch_size=8"],
            1,
            72,
            "trainer.recompute=full ",
        ),
        (["model=llama13b", "trainer.zero=3"], 2, 80, "optim.state_bits=8 trainer.offload=[activations] "),
    ],
    ids=["a step that must be here", "recomputed elementwise", "one is there", "the other is there", "less than both"],
)
def test_what_is_advised_to_be_offloaded_is_allowed(settings: list[str], world: int, size: int, expected: str) -> None:
    typed = ["data=mock", "data.seq_length=4096", "trainer.precision=bf16", "trainer.global_batch_size=8", *settings]
    machine = Machine(size * GIB, 1, "one device", accelerator=True)
    (problem,) = problems_of(load_config(typed, CONF), world, machine)
    assert expected in problem.instead, problem.instead
    for option in problem.instead.removeprefix("write ").split(", or "):
        words, _, devices = option.partition(" (")[0].partition(" on a multiple of ")
        ranks = int(devices.removesuffix(" devices") or world)
        assert problems_of(load_config([*typed, *words.split()], CONF), ranks, machine) == [], option


@pytest.mark.parametrize(
    "settings",
    [
        ["trainer.tp=4", "trainer.pp=2", "trainer.dp=1", "trainer.pipeline_layers=[39,41]"],
        ["trainer.dp=8"],
        ["trainer.tp=2", "trainer.dp=16", "trainer.zero=3", "trainer.shard_group=4"],
    ],
    ids=["stages", "dp", "shard group"],
)
def test_advice_replaces_what_was_asked_for_another_grid(settings: list[str]) -> None:
    """Typed after the command, where dp, stages and groups were given too, it is the plan that was priced."""
    typed = ["model=llama70b", "data=mock", "data.seq_length=4096", "trainer.precision=bf16", *settings]
    typed += ["trainer.global_batch_size=64", "device.memory_gib=80", "device=cuda", "dry_run=true"]

    def world(config: Config) -> int:
        return config.trainer.tp * config.trainer.pp * (config.trainer.dp or 1)

    (problem,) = problems_of(load_config(typed, CONF), world(load_config(typed, CONF)))
    for option in problem.instead.removeprefix("write ").split(", or "):
        change = re.fullmatch(
            r"(.+?)(?: on a multiple of (\d+) devices)? \(([\d.]+ GiB)(?: and [\d.]+ GiB of its host)?(?:, .+)?\)",
            option,
        )
        assert change, option
        config = load_config([*typed, *change[1].split()], CONF)
        config.device.memory_gib = None
        plan = resolve(config, world(config))
        assert change[2] in (None, str(plan.world_size)), option
        assert gib(max(each.total for each in stage_footprints(plan))) == change[3], option


def test_the_cheapest_change_comes_first() -> None:
    config = load_config(["model=llama3_8b", "data=mock", "data.seq_length=8192", "trainer.zero=3"], CONF)
    config.trainer.precision, config.trainer.micro_batch_size, config.trainer.global_batch_size = "bf16", 4, 64
    (problem,) = problems_of(config, 8, Machine(80 * GIB, 1, "one H100", accelerator=True))
    costs = [int(part.split("%")[0]) for part in problem.instead.replace("-", "+-").split(", +")[1:]]
    assert costs == sorted(costs) and len(costs) >= 2


def test_what_is_close_is_left_to_be_tried() -> None:
    """The forecast may be wrong by a tenth: within it nothing is refused."""
    config = load_config(["model=llama_110m", "data=mock", "data.seq_length=1024"], CONF)
    peak = max(each.total for each in stage_footprints(resolve(config, 1)))
    for share, refused in ((0.92, False), (0.88, True)):
        machine = Machine(int(share * peak), 1, "a device", accelerator=True)
        assert bool(problems_of(config, 1, machine)) == refused


def test_a_dry_run_prints_activations_and_logits() -> None:
    plan = resolve(load_config(["model=llama7b", "data=mock", "trainer.micro_batch_size=2"], CONF), 1)
    (footprint,) = stage_footprints(plan)
    page = format_plan(plan)
    assert f"activations {gib(footprint.activation_bytes)}" in page and f"logits {gib(footprint.logits)}" in page
    assert f"{gib(footprint.total)} of tensors at the heaviest rank's peak" in page


def test_a_plan_without_room_for_fragments_has_a_note() -> None:
    config = make(**{"device.name": "cuda", "trainer.micro_batch_size": 1})
    total = max(each.total for each in stage_footprints(resolve(config, 1)))
    needed = total + find_device("cuda").memory_reserve(total)  # type: ignore[union-attr]
    assert needed == total + int(0.06 * total) + 2 * GIB
    assert not any("tight" in note for note in resolve(config, 1, Machine(needed, 1, "a GPU", True)).notes)
    (note,) = [note for note in resolve(config, 1, Machine(needed - 1, 1, "a GPU", True)).notes if "tight" in note]
    assert f"{gib(total)} of tensors" in note and gib(needed - 1) in note
    config.device.memory_gib = (needed - GIB // 8) / GIB  # a dry run elsewhere
    assert any("tight" in note for note in resolve(config, 1).notes)
    config.device.name = "cpu"
    assert not any("tight" in note for note in resolve(config, 1).notes)
