"""Split of layers over pipeline stages: each layer once, and fewer on the last stage if the output head is costly."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from megatron_llama.config import Config, ConfigError, load_config
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.derive import balance_layers, head_cost_in_layers, split_evenly, split_layers
from megatron_llama.plan.memory import stage_footprints
from megatron_llama.system.tables import GIB
from tests.paths import CONF


@pytest.mark.parametrize(("pp", "vpp"), itertools.product((1, 2, 3, 4, 8), (1, 2, 3)))
def test_stages_partition_the_layers(pp: int, vpp: int) -> None:
    """Each layer occurs once, in ascending order, and no virtual stage is empty."""
    for layers in range(pp * vpp, 3 * pp * vpp + 2):
        chunks = split_layers(layers, pp, vpp, None)
        assert len(chunks) == pp * vpp
        assert list(itertools.chain.from_iterable(chunks)) == list(range(layers))
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
    assert choice == f"trainer.pipeline_layers=[6,2]: {head}"
    assert resolve(plan.config, 2) == plan
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
