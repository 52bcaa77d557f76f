"""Bytes per rank by precision and ZeRO stage, on disk too, and the rejection of plans that do not fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron_llama.arch.parameters import StageParameters
from megatron_llama.config import Config, load_config
from megatron_llama.config.problems import format_problems
from megatron_llama.devices import find_device
from megatron_llama.plan import Machine, Plan, resolve
from megatron_llama.plan.memory import States, disk_use, rank_memory, stage_footprints
from megatron_llama.system.tables import GIB, gib
from tests.config.helpers import make, problems_of
from tests.golden import GoldenFiles
from tests.oracle import make_plan
from tests.paths import CONF
from tests.plan.rule_cases import parse_settings
from tests.rows import overrides

COUNT = 1_000_000


def plan_of(zero: int, precision: str, dp: int = 4, optimizer: str = "adamw", micro_batches: int = 2) -> Plan:
    batch = dp * micro_batches
    settings = f"zero={zero} precision={precision} optim.name={optimizer} global_batch_size={batch}"
    return resolve(make(**parse_settings(settings)), dp)


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
    expected = [count * COUNT for count in (weights, gradients, optimizer)]
    assert [memory.weights, memory.gradients, memory.optimizer] == expected


def test_states_of_sgd_of_8_bits_and_of_stages() -> None:
    assert memory_of(plan_of(1, "fp32", optimizer="sgd")).optimizer == 4 / 4 * COUNT
    once = memory_of(plan_of(1, "fp32", micro_batches=1))
    assert (once.weights, once.gradients, once.optimizer) == (4 * COUNT, COUNT, 2 * COUNT)
    plan = resolve(load_config(["model=llama7b", "data=mock", "trainer.zero=0", "optim.state_bits=8"], CONF), 1)
    norms = (2 * 32 + 1) * 4096
    assert rank_memory(plan, plan.stages[0]).optimizer == 2 * (1.125 * (plan.parameters - norms) + 4 * norms)
    assert not any("state_bits" in note for note in plan.notes)
    plan = resolve(make(**{"trainer.pp": 2, "model.num_hidden_layers": 5}), 2)
    assert [sum(rank_memory(plan, stage)) for stage in plan.stages] == [16 * stage.held for stage in plan.stages]


def test_one_data_parallel_rank_holds_its_weights_once_where_nothing_is_cast() -> None:
    for zero in (0, 1, 2, 3):
        assert memory_of(plan_of(zero, "fp32", dp=1)).weights == 4 * COUNT
        assert memory_of(plan_of(zero, "bf16_sr", dp=1)).weights == 2 * COUNT
    assert memory_of(plan_of(1, "bf16", dp=1)).weights == (4 + 2) * COUNT
    assert memory_of(plan_of(1, "fp32_ZeroOptMaster", dp=1)).weights == (4 + 2) * COUNT


def test_ranks_on_one_host_share_its_memory() -> None:
    config = make()
    plan = resolve(config, 4)
    needed = max(sum(rank_memory(plan, stage)) for stage in plan.stages)
    assert problems_of(config, 4, Machine(4 * needed, 4)) == []
    (problem,) = problems_of(config, 4, Machine(4 * needed - 1, 4))
    assert "for 4 ranks" in problem.rule
    assert "smaller model" in problem.instead or "trainer.zero" in problem.instead


def test_stated_memory_goes_before_what_was_found() -> None:
    """A dry run notes what this machine lacks, and refuses what was stated."""
    config = load_config(["model=llama7b", "data=mock", "device.memory_gib=24"], CONF)
    (problem,) = problems_of(config, 1, Machine(1000 * GIB))
    assert (problem.field, problem.value) == ("device.memory_gib", 24)
    config.device.memory_gib = 200
    assert problems_of(config, 1, Machine(1 * GIB)) == []
    config = load_config(["model=llama7b", "data=mock", "dry_run=true", "trainer.global_batch_size=16"], CONF)
    plan = resolve(config, 1, Machine(1 * GIB, 1, "this laptop"))
    assert "this laptop has 1 GiB" in plan.notes[0] and resolve(config, 1, Machine(1000 * GIB)).notes == ()
    config.device.memory_gib = 1
    assert [problem.field for problem in problems_of(config, 1)] == ["device.memory_gib"]
    config = load_config(["model=llama7b", "device=cpu", "data=mock", "dry_run=true"], CONF)
    assert replace(resolve(config, 1, Machine(1 * GIB)), notes=()) == replace(resolve(config, 1), notes=())


def host(gib: int) -> Machine:
    return Machine(gib * GIB, 1, "a host")


def device(gib: int) -> Machine:
    return Machine(gib * GIB, 1, "a device", accelerator=True)


def test_each_suggestion_fits() -> None:
    """Append each suggested change to the command, as a user would."""
    page = []
    for row in GoldenFiles.commands("plan/memory.txt"):
        ranks, kind, size, settings = re.fullmatch(r"(\d+) ranks, (a \w+) of (\d+) GiB: (.*)", row).groups()  # type: ignore
        world, machine = int(ranks), (host if kind == "a host" else device)(int(size))
        typed = ["data=mock", *settings.split()]
        (problem,) = problems_of(load_config(typed, CONF), world, machine)
        page += [f"$ {row}", *format_problems([problem]).splitlines()[2:], ""]
        options = [option.partition(" (") for option in problem.instead.removeprefix("write ").split(", or ")]
        assert len({option for option, *_ in options}) == len(options) <= 3
        for option, _, _ in options:
            words, _, devices = option.partition(" on a multiple of ")
            if words.startswith("a smaller model"):
                continue
            more = int(devices.removesuffix(" devices") or world)
            assert problems_of(load_config([*typed, *words.split()], CONF), more, machine) == [], (row, option)
    GoldenFiles.check("plan/memory.txt", "\n".join(page))


def test_only_states_count_on_a_host() -> None:
    """Llama 3 8B, zero 3 over 8, micro batch 8 x 8192: 15 GiB of states, hundreds of activations."""
    words = "model=llama3_8b data.seq_length=8192 trainer.zero=3 trainer.micro_batch_size=8 trainer.precision=bf16"
    config = load_config(["data=mock", *words.split(), "trainer.global_batch_size=128"], CONF)
    assert problems_of(config, 8, device(80)) and not problems_of(config, 8, host(80))
    config.trainer.micro_batch_size = 1
    assert not problems_of(config, 8, device(80))


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


def test_what_is_close_is_left_to_be_tried() -> None:
    """The forecast may be wrong by a tenth: within it nothing is refused."""
    config = load_config(["model=llama_110m", "data=mock", "data.seq_length=1024"], CONF)
    peak = max(each.total for each in stage_footprints(resolve(config, 1)))
    for share, refused in ((0.92, False), (0.88, True)):
        machine = Machine(int(share * peak), 1, "a device", accelerator=True)
        assert bool(problems_of(config, 1, machine)) == refused


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


def test_checkpoints_at_the_same_time() -> None:
    """The fewest and the most checkpoints on the disk."""
    page = ""
    for row in GoldenFiles.commands("plan/disk.txt"):
        start, _, settings = row.partition("  # ")[0].rpartition(": ")
        first, saved = map(int, re.findall(r"\d+", start) or (0, 0))
        plan = resolve(load_config(["model=llama_2m", "data=mock", *settings.split()], CONF), 1)
        use = disk_use(plan, first, saved)
        assert use.checkpoint == 3 * 4 * plan.parameters, "fp32 weights and two moments"
        page += f"$ {row}\n    {use.sure} to {use.most}\n"
    GoldenFiles.check("plan/disk.txt", page)


def test_lora_saves_only_its_parameters_and_export_adds_the_whole_model() -> None:
    words = ["model=llama_2m", "data=mock", "finetune=lora", "checkpoint.export_hf=true", "trainer.precision=bf16"]
    plan = resolve(load_config(words, CONF), 1)
    use = disk_use(plan, 0, 0)
    assert use.checkpoint == 3 * 4 * plan.whole.trained < plan.parameters and use.export == 2 * plan.whole.held
    assert use.sure_bytes == use.checkpoint + use.export + use.logs


EMBEDDING_ON = {"an only stage": (True, True), "a first stage": (True, False), "a last stage": (False, True)}


def test_storage() -> None:
    """Kind of storage, bf16 gradients that are kept, and stages that free their copy of the embedding."""
    page = ""
    for row in GoldenFiles.commands("plan/storage.txt"):
        ranks, _, settings = row.partition(" ranks: ")
        storage = make_plan(int(ranks), *overrides(settings)).storage
        flags = [name for name in ("one_micro_batch", "keeps_bf16_grads", "frees_embedding") if getattr(storage, name)]
        page += f"$ {row}\n    {', '.join([storage.kind, *flags])}\n"
        for stage, (is_first, is_last) in EMBEDDING_ON.items():
            is_freed = storage.frees_embedding_of(is_first=is_first, is_last=is_last)
            page += f"    the embedding is freed on {stage}\n" if is_freed else ""
    GoldenFiles.check("plan/storage.txt", page)
