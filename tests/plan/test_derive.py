"""Split of layers over pipeline stages, and the settings of fine-tuning that follow from others."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
from pathlib import Path

import pytest

from megatron_llama.arch.parameters import parameters
from megatron_llama.config import Config, ConfigError, load_config
from megatron_llama.config.settings import LORA_TARGETS
from megatron_llama.plan import Plan, format_plan, resolve
from megatron_llama.plan.memory import States, rank_memory, stage_footprints
from megatron_llama.plan.stage_split import balance_layers, head_cost_in_layers, split_evenly, split_layers
from megatron_llama.system.missing_packages import pip_install
from megatron_llama.system.tables import GIB
from tests.config.helpers import everything_exists, make, problems_of
from tests.paths import CONF
from tests.plan.rule_cases import parse_settings


@pytest.mark.parametrize(("pp", "vpp"), itertools.product((1, 2, 3, 4, 8), (1, 2, 3)))
def test_stages_partition_the_layers(pp: int, vpp: int) -> None:
    """Each layer occurs once, in ascending order, and no virtual stage is empty."""
    for layers in range(pp * vpp, 3 * pp * vpp + 2):
        chunks = split_layers(layers, pp, vpp, None)
        assert len(chunks) == pp * vpp and list(itertools.chain.from_iterable(chunks)) == list(range(layers))
        sizes = [len(chunk) for chunk in chunks]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True), "the first stages take the remainder"
        per_stage = [sum(map(len, chunks[stage::pp])) for stage in range(pp)]
        assert split_layers(layers, pp, vpp, per_stage) == chunks


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2), (3, 2), (4, 3)])
def test_an_explicit_split_is_kept(pp: int, vpp: int) -> None:
    for given in itertools.product(range(vpp, vpp + 3), repeat=pp):
        chunks = split_layers(sum(given), pp, vpp, given)
        assert tuple(sum(map(len, chunks[stage::pp])) for stage in range(pp)) == given
        assert list(itertools.chain.from_iterable(chunks)) == list(range(sum(given)))
        assert all(chunks), "every virtual stage has a layer"


def config_of(model: str, pp: int, *settings: str) -> Config:
    return load_config([f"model={model}", "data=mock", f"trainer.pp={pp}", "data.seq_length=256", *settings], CONF)


def test_the_head_in_layers() -> None:
    """By hand: llama_56m has 8 layers of 4 matrices for attention, 3 for the rest, and 512 x 32,000 for the head."""
    layer = 512 * (2 * 512 + 2 * 256) + 3 * 512 * 1376
    attention = 512 * 512  # causal: half of the square, two matmuls
    head = 512 * 32_000
    config = config_of("llama_56m", 2, "data.seq_length=512")
    assert head_cost_in_layers(config) == pytest.approx(head / (layer + attention))
    with_recompute = config_of("llama_56m", 2, "data.seq_length=512", "trainer.recompute=full")
    assert head_cost_in_layers(with_recompute) == pytest.approx(head / (layer + attention) * 3 / 4)
    window = config_of("llama_56m", 2, "data.seq_length=512", "model.sliding_window=1")
    assert head_cost_in_layers(window) == pytest.approx(head / layer, rel=0.001)
    # Frozen weights take 4 FLOPs, not 6, and 2 more if they are recomputed.
    lora = "data.seq_length=512", "finetune.method=lora", "finetune.lora_rank=1"
    tuned, with_recompute = config_of("llama_56m", 2, *lora), config_of("llama_56m", 2, *lora, "trainer.recompute=full")
    assert head_cost_in_layers(tuned) == pytest.approx(4 * head / (4 * layer + 6 * attention), rel=0.02)
    assert head_cost_in_layers(with_recompute) == pytest.approx(4 * head / (6 * layer + 8 * attention), rel=0.02)


def test_no_stage_is_waited_for_more_than_needed() -> None:
    sizes = itertools.product((100, 4000, 32_000, 128_256), (2, 3, 4), (*range(4, 14), 32))
    config = config_of("llama_56m", 2)
    is_even = []
    for config.model.vocab_size, config.trainer.pp, config.model.num_hidden_layers in sizes:
        layers, pp = config.model.num_hidden_layers, config.trainer.pp
        head, balanced = head_cost_in_layers(config), balance_layers(config, 8)

        def heaviest(split: list[int], head: float = head) -> float:
            return max(*split[:-1], split[-1] + head)

        cuts = itertools.combinations(range(1, layers), pp - 1)
        splits = [[b - a for a, b in itertools.pairwise((0, *cut, layers))] for cut in cuts]
        least, even = min(map(heaviest, splits)), split_evenly(layers, pp)
        taken = balanced or even
        assert sum(taken) == layers and min(taken) >= 1 and len(taken) == pp
        assert heaviest(taken) * 0.94 <= least
        if balanced:
            assert heaviest(even) * 0.94 > least and heaviest(balanced) < heaviest(even)
            nearer = [*split_evenly(layers - balanced[-1] - 1, pp - 1), balanced[-1] + 1]
            assert heaviest(nearer) * 0.94 > least, "of splits that are almost as good the nearest to even"
        is_even.append(balanced is None)
    assert 20 < sum(is_even) < len(is_even) - 20


def test_who_is_split_unevenly() -> None:
    """Llama 2's layouts stay as published: its heads are less than a layer. Llama 3's are up to 2.4."""
    assert balance_layers(config_of("llama_56m", 2), 8) == [6, 2]
    assert balance_layers(config_of("llama3_8b", 4), 8) == [9, 8, 8, 7]
    for model, pp in (("llama7b", 4), ("llama70b", 8), ("llama3_70b", 4), ("llama3_405b", 16), ("llama_56m", 1)):
        assert balance_layers(config_of(model, pp), 8) is None
    assert balance_layers(config_of("llama_56m", 2, "trainer.vpp=2"), 8) is None
    assert balance_layers(config_of("llama_56m", 2), 1) is None, "no two stages work at a time"


def test_what_is_chosen_is_named_and_what_is_written_stays() -> None:
    plan = resolve(config_of("llama_56m", 2), 2)
    assert plan.config.trainer.pipeline_layers == [6, 2] and [len(layers) for layers in plan.stage_layers] == [6, 2]
    (choice,) = (line for line in plan.chosen if "pipeline_layers" in line)
    head = "the last stage also has the output head, which costs as much as 5.4 layers"
    assert choice == f"trainer.pipeline_layers=[6,2]: {head}" and resolve(plan.config, 2) == plan
    written = resolve(config_of("llama_56m", 2, "trainer.pipeline_layers=[4,4]"), 2)
    assert written.config.trainer.pipeline_layers == [4, 4]
    assert not any("pipeline_layers" in line for line in written.chosen)


def test_even_stages_are_among_the_changes_that_fit() -> None:
    """The first stage is the heaviest: it keeps the activations of two micro batches, and has two layers more."""

    def planned(gib: float, *more: str) -> Plan:
        settings = "device=cuda", "trainer.precision=fp32", "data.seq_length=1024", "trainer.micro_batch_size=4"
        more = *more, "trainer.compile=false"
        return resolve(config_of("llama_56m", 2, *settings, f"device.memory_gib={gib}", *more), 2)

    def needed(split: str) -> float:
        plan = planned(1000, f"trainer.pipeline_layers={split}", "trainer.global_batch_size=16")
        return max(footprint.total for footprint in stage_footprints(plan)) / GIB

    faster, even = needed("[6,2]"), needed("[4,4]")
    between = (0.9 * faster + even) / 2  # a plan is rejected if 0.9 of the forecast does not fit
    assert planned(between, "trainer.pipeline_layers=[4,4]", "trainer.global_batch_size=16")
    with pytest.raises(ConfigError, match=re.escape("trainer.pipeline_layers=[4,4]")):
        planned(between, "trainer.global_batch_size=16")


def test_a_run_that_goes_on_keeps_its_stages(tmp_path: Path) -> None:
    """Also one that began when all stages were even."""
    run = tmp_path / "run"
    (run / "checkpoints" / "step_00000004").mkdir(parents=True)

    def resumed(saved: str, *settings: str) -> Plan:
        (run / "config.yaml").write_text(f"trainer: {{{saved}}}\n", encoding="utf-8")
        return resolve(config_of("llama_56m", 2, f"run.dir={run}", *settings), 2)

    plan = resumed("pp: 2, vpp: 1, pipeline_layers: [4, 4]")
    assert plan.config.trainer.pipeline_layers == [4, 4]
    assert f"trainer.pipeline_layers=[4,4]: kept from {run}" in plan.chosen
    assert resumed("vpp: 1, pipeline_layers: [4, 4]", "trainer.pipeline_layers=[5,3]").stage_layers[1] == (5, 6, 7)
    for other in ("vpp: 1, pipeline_layers: [8]", "vpp: 1, pipeline_layers: [4, 5]", "vpp: 2, pipeline_layers: [4, 4]"):
        assert resumed(other).config.trainer.pipeline_layers == [6, 2]
    for broken in (
        "vpp: 1, pipeline_layers: x",
        "vpp: 1, pipeline_layers: [9, -1]",
        "pp: 2",
        "vpp: 1, pipeline_layers: [a, 4]",
    ):
        assert resumed(broken).config.trainer.pipeline_layers == [6, 2]


WIDE = "LORA WIDE intermediate_size=768"
BIG = ["model=llama70b", "data=mock", "trainer.zero=3", "trainer.dp=8", "trainer.precision=bf16", "dry_run=true"]


def plan_of(*overrides: str) -> Plan:
    return resolve(load_config([*BIG, "finetune=lora", "finetune.lora_rank=4", *overrides], CONF), 8)


@pytest.mark.parametrize("spelling", ["all-linear", "[all-linear]"])
def test_all_matrices_have_a_name_as_in_peft(spelling: str) -> None:
    chosen = ["data=mock", "finetune=lora", f"finetune.lora_target_modules={spelling}"]
    assert load_config(chosen, CONF).finetune.lora_target_modules == list(LORA_TARGETS)
    mixed = load_config([*chosen[:2], "finetune.lora_target_modules=[all-linear,q_proj]"], CONF)
    assert [problem.field for problem in problems_of(mixed)] == ["finetune.lora_target_modules"]


# peft prints these for the published models: get_peft_model(...).print_trainable_parameters()
@pytest.mark.parametrize(
    ("preset", "rank", "targets", "count"),
    [
        ("llama7b", 8, "[q_proj,v_proj]", 4_194_304),
        ("llama7b", 8, "[q_proj,k_proj,v_proj,o_proj]", 8_388_608),
        ("llama7b", 16, "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]", 39_976_960),
        ("llama70b", 4, "[q_proj,k_proj,v_proj,o_proj]", 16_384_000),
    ],
)
def test_published_counts(preset: str, rank: int, targets: str, count: int) -> None:
    settings = [f"finetune.lora_rank={rank}", f"finetune.lora_target_modules={targets}"]
    plan = resolve(load_config([f"model={preset}", "data=mock", "finetune=lora", *settings], CONF), 1)
    assert plan.whole.trained == count
    assert f"{count:,} · {100 * count / (parameters(plan.model) + count):.4g} %" in format_plan(plan)


def memory_of(plan: Plan) -> States:
    return rank_memory(plan, plan.stages[0])


def test_frozen_weights_have_no_gradient_and_no_moments() -> None:
    """70 B in bf16 on 8 devices: 138 GB of weights are divided by 8, and LoRA adds little."""
    full, memory = memory_of(resolve(load_config(BIG, CONF), 8)), memory_of(plan_of())
    trained, frozen = 16_384_000 // 8, 68_976_648_192 // 8
    assert (memory.gradients, memory.optimizer) == (4 * trained, 8 * trained)
    assert memory.weights == 4 * trained + 2 * frozen and sum(memory) < 17 * GIB < 128 * GIB < sum(full)
    assert memory_of(plan_of("finetune.frozen_dtype=fp32")).weights > 2 * memory.weights * 0.99


def test_quantized_weights_in_the_plan() -> None:
    matrices = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 8192 * 28672)  # the published shape
    others, trained = 68_976_648_192 - matrices, 16_384_000
    for kind, share in {"int8": 1.0625, "nf4": 0.5625}.items():
        plan = plan_of(f"finetune.frozen_dtype={kind}")
        memory = memory_of(plan)
        assert memory.weights == (4 * trained + 2 * others + share * matrices) / 8
        assert f"blocks' frozen matrices in {kind}: {share} bytes per value" in format_plan(plan)
    whole = memory_of(plan_of("finetune.frozen_dtype=nf4", "trainer.zero=1"))
    # Gathered weights are packed too. A block frees its gathered weights when its gradient is ready.
    assert whole.weights == memory.weights + 2 * (others + trained) + share * matrices - memory.gradients


@pytest.mark.parametrize("installed", [None, "0.13.0"])
def test_quantizing_needs_torchao(installed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed

    monkeypatch.setattr("importlib.metadata.version", version)
    changes = parse_settings(f"{WIDE} frozen_dtype=int8")
    (problem,) = problems_of(make(**changes))
    assert problem.field == "finetune.frozen_dtype" and (installed or "no torchao") in problem.rule
    assert problem.instead.endswith(f"{pip_install(extra='quantize')}, or write finetune.frozen_dtype=bf16")
    assert any(pip_install(extra="quantize") in note for note in resolve(make(**changes, dry_run=True), 1).notes)
    assert not problems_of(make(**parse_settings(f"{WIDE} frozen_dtype=bf16")))


def test_problems_of_quantized_blocks_come_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.18.0")
    for tp, row, field in ((8, WIDE, "trainer.tp"), (1, "LORA WIDE intermediate_size=800", "finetune.frozen_dtype")):
        changes = parse_settings(f"{row} frozen_dtype=nf4 tp={tp}")
        assert [problem.field for problem in problems_of(make(**changes), tp)] == [field]
        both = problems_of(make(**{**changes, "optim.lr": -1.0}), tp, exists=everything_exists)
        assert {problem.field for problem in both} == {field, "optim.lr"}
