"""In all layouts, fine-tuning equals a loop of transformers, peft and torch.optim on the same batches, step by step."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from tests.finetuning import runner
from tests.finetuning.runner import TOLERANCE, Tamper, Tuned, World, make_plan, tune, worst
from tests.oracle import distance
from tests.ranks import RankFailed, run_ranks
from tests.rows import rows

# Of a global batch of 4; without it, 2.
MICRO_1 = "trainer.micro_batch_size=1"
LAYOUTS = {
    "one process": (1, []),
    "tp2": (2, ["trainer.tp=2", "trainer.sp=false"]),
    "tp2+sp": (2, ["trainer.tp=2"]),
    "pp2": (2, ["trainer.pp=2"]),
    "zero 1": (2, ["trainer.zero=1", MICRO_1]),
    "zero 2": (2, ["trainer.zero=2", MICRO_1]),
    "zero 3": (2, ["trainer.zero=3", MICRO_1]),
}


def assert_equal(ours: Tuned, theirs: Tuned) -> None:
    differences = worst(ours, theirs)
    assert len(ours.losses) == runner.STEPS
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.parametrize(("ranks", "layout"), rows(LAYOUTS.items(), {"one process", "tp2+sp", "zero 3"}))
def test_full_fine_tuning(ranks: int, layout: list[str], world: World, theirs_full: Tuned, tmp_path: Path) -> None:
    assert_equal(tune(ranks, tmp_path, *world.full, *layout), theirs_full)


@pytest.mark.parametrize(("ranks", "layout"), rows(LAYOUTS.items(), {"tp2", "tp2+sp", "pp2", "zero 2"}))
def test_lora(ranks: int, layout: list[str], world: World, theirs_lora: Tuned, tmp_path: Path) -> None:
    ours = tune(ranks, tmp_path, *world.lora, *layout)
    assert_equal(ours, theirs_lora)
    base = load_file(world.base / "model.safetensors")
    assert ours.frozen.keys() == base.keys()
    assert all(torch.equal(tensor, base[name]) for name, tensor in ours.frozen.items()), "the base has moved"


HARDER = {
    "tp4, shared kv heads": (4, ["trainer.tp=4", "trainer.sp=false"]),
    "tp4+sp, shared kv heads": (4, ["trainer.tp=4"]),
    "tp2·pp2+sp": (4, ["trainer.tp=2", "trainer.pp=2"]),
    "dp8, rank below dp": (8, ["trainer.zero=3", "trainer.global_batch_size=8", MICRO_1]),
    "cp2·tp2+sp": (4, ["trainer.cp=2", "trainer.tp=2"]),
    "cp2·dp2, ulysses, zero 3, recompute": (
        4,
        ["trainer.cp=2", "trainer.cp_comm=ulysses", "trainer.zero=3", "trainer.recompute=full", MICRO_1],
    ),
    "tp2·dp2, mlp chunks": (4, ["trainer.tp=2", "trainer.zero=3", "trainer.mlp_chunks=3", MICRO_1]),
    "tp2·dp2, recompute": (4, ["trainer.tp=2", "trainer.zero=3", "trainer.recompute=full", MICRO_1]),
}


@pytest.mark.parametrize(("ranks", "layout"), rows(HARDER.items(), {"tp4+sp, shared kv heads"}))
def test_lora_in_harder_layouts(ranks: int, layout: list[str], world: World, tmp_path: Path) -> None:
    alone = [setting for setting in layout if "batch" in setting]
    ours = tune(ranks, tmp_path / "ours", *world.lora, *layout, steps=4)
    one = tune(1, tmp_path / "one", *world.lora, *alone, steps=4)
    assert max(worst(ours, one).values()) <= TOLERANCE, worst(ours, one)
    assert all(distance(ours.first_grads[name], grad) <= TOLERANCE for name, grad in one.first_grads.items())


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ("model.num_hidden_layers=4", ["trainer.pp=2", "trainer.vpp=2"]),
        ("model.tie_word_embeddings=true", ["trainer.pp=2"]),  # both stages have the table, and none trains it
        ("model.model_type=qwen2", ["trainer.tp=2"]),
        ("model.model_type=qwen3", ["trainer.tp=2", "trainer.sp=false"]),
        ("model.model_type=olmo2", ["trainer.tp=2"]),
    ],
    ids=["pp2·vpp2", "tied, pp2", "qwen2, tp2+sp", "qwen3, tp2", "olmo2, tp2+sp"],
)
def test_lora_in_other_shapes(shape: str, layout: list[str], tmp_path: Path) -> None:
    ours = tune(2, tmp_path / "ours", *runner.LORA, shape, *layout, steps=3)
    one = tune(1, tmp_path / "one", *runner.LORA, shape, steps=3)
    assert max(worst(ours, one).values()) <= TOLERANCE, worst(ours, one)
    assert ours.frozen.keys() == one.frozen.keys()
    assert all(torch.equal(ours.frozen[name], tensor) for name, tensor in one.frozen.items())


def test_whole_modules_beside_lora(world: World, tmp_path: Path) -> None:
    """Embedding, head and every norm train too, as peft's modules_to_save."""
    saved = ["finetune.modules_to_save=[embed_tokens,lm_head,norm]", "finetune.lora_target_modules=[v_proj,up_proj]"]
    plan = make_plan(1, tmp_path, *runner.RANK, *saved)
    adapter = tmp_path / "adapter"
    run_ranks(_save_adapter, 1, plan, world.base, adapter)
    theirs = run_ranks(runner.run_lora, 1, plan, world.base, adapter, 5)[0]
    assert "model.layers.1.input_layernorm.weight" in theirs.trained and "lm_head.weight" in theirs.trained
    layout = ["trainer.tp=2", "trainer.pp=2"]
    chosen = ["finetune=lora", f"finetune.adapter={adapter}", f"init_from={world.base}"]
    ours = tune(4, tmp_path / "run", *chosen, *layout, steps=5)
    assert max(worst(ours, theirs).values()) <= TOLERANCE, worst(ours, theirs)


@pytest.mark.parametrize(("ranks", "layout"), [(1, []), (2, ["trainer.tp=2"])], ids=["one process", "tp2+sp"])
def test_rank_stabilized_lora(ranks: int, layout: list[str], world: World, tmp_path: Path) -> None:
    """The adapter sets use_rslora; peft reads the exported adapter with the same setting."""
    plan = make_plan(1, tmp_path, *runner.RANK, "finetune.use_rslora=true", "finetune.lora_alpha=6")
    adapter = tmp_path / "adapter"
    run_ranks(_save_adapter, 1, plan, world.base, adapter)
    theirs = run_ranks(runner.run_lora, 1, plan, world.base, adapter, 3)[0]
    chosen = ["finetune=lora", f"finetune.adapter={adapter}", f"init_from={world.base}"]
    assert make_plan(1, tmp_path, *chosen).config.finetune.use_rslora
    ours = tune(ranks, tmp_path / "run", *chosen, *layout, steps=3)
    assert max(worst(ours, theirs).values()) <= TOLERANCE, worst(ours, theirs)


DORA = {
    "one process": (1, []),
    "tp2+sp": (2, ["trainer.tp=2"]),
    "tp2·dp2, zero 3, recompute": (4, ["trainer.tp=2", "trainer.zero=3", "trainer.recompute=full", MICRO_1]),
    "tp4, shared kv heads": (4, ["trainer.tp=4", "trainer.sp=false"]),
}


@pytest.mark.parametrize(("ranks", "layout"), rows(DORA.items(), {"one process", "tp2+sp"}))
def test_dora(ranks: int, layout: list[str], world: World, tmp_path: Path) -> None:
    """The adapter sets use_dora; its magnitudes are no norms of the base."""
    plan = make_plan(1, tmp_path, *runner.LORA, "finetune.use_dora=true")
    adapter = tmp_path / "adapter"
    run_ranks(_save_adapter, 1, plan, world.base, adapter)
    theirs = run_ranks(runner.run_lora, 1, plan, world.base, adapter, 3)[0]
    chosen = ["finetune=lora", f"finetune.adapter={adapter}", f"init_from={world.base}"]
    assert make_plan(1, tmp_path, *chosen).config.finetune.use_dora
    ours = tune(ranks, tmp_path / "run", *chosen, *layout, steps=3)
    assert sum("magnitude" in name for name in ours.trained) == 14
    assert max(worst(ours, theirs).values()) <= TOLERANCE, worst(ours, theirs)


@pytest.mark.parametrize(("ranks", "layout"), rows(DORA.items(), {"tp2·dp2, zero 3, recompute"}))
def test_dora_starts_at_the_norms_of_the_base(ranks: int, layout: list[str], world: World, tmp_path: Path) -> None:
    fresh = [*world.fresh, "finetune.use_dora=true", *layout]
    started = tune(ranks, tmp_path / "run", *fresh, steps=0)
    base = load_file(world.base / "model.safetensors")
    magnitudes = {name: tensor for name, tensor in started.trained.items() if name.endswith("magnitude_vector")}
    assert len(magnitudes) == 14
    for name, tensor in magnitudes.items():
        weight = base[name.removeprefix("base_model.model.").replace("lora_magnitude_vector", "weight")]
        assert distance(tensor, weight.norm(dim=1)) <= TOLERANCE
    assert tune(ranks, tmp_path / "run", *fresh, steps=1).losses[0] == pytest.approx(
        tune(1, tmp_path / "plain", *world.fresh, steps=1).losses[0], rel=TOLERANCE
    ), "the first output is the base model's"


def _save_adapter(rank: int, plan: Plan, base: Path, folder: Path) -> None:
    runner.save_adapter(plan, base, folder)


def _no_sums_over_the_sequence(model: ParallelModel) -> None:
    model.replicated.is_replicated = lambda name: False  # type: ignore[assignment]


def _norms_of_each_rank_alone(model: ParallelModel) -> None:
    """Row-parallel norms without the sum over tp."""
    import megatron_llama.model.lora as lora

    lora.all_reduce = lambda tensor, *_: tensor


def _with_gradients_of_norms(model: ParallelModel) -> None:
    import megatron_llama.model.lora as lora

    lora.torch = SimpleNamespace(**{**vars(torch), "no_grad": nullcontext})


@pytest.mark.parametrize("tamper", [_norms_of_each_rank_alone, _with_gradients_of_norms, _no_sums_over_the_sequence])
def test_dora_with_other_norms_would_be_seen(tamper: Tamper, world: World, tmp_path: Path) -> None:
    settings = [*world.fresh, "finetune.use_dora=true"]
    one = tune(1, tmp_path / "one", *settings, steps=3)
    try:
        other = tune(2, tmp_path / "other", *settings, "trainer.tp=2", steps=3, tamper=tamper)
    except (RankFailed, AssertionError) as failure:
        assert "differ" in str(failure)
        return
    assert max(worst(other, one).values()) > 5 * TOLERANCE


def _no_sums_over_kv_copies(model: ParallelModel) -> None:
    model.replicated.kv_group = None


def _no_sums_in_between(model: ParallelModel) -> None:
    for module in model.chunks[0].modules():
        if hasattr(module, "lora_A"):
            assert hasattr(module, "_communicate")
            module._communicate = lambda low: low  # type: ignore[assignment]


def _another_scale(model: ParallelModel) -> None:
    for module in model.chunks[0].modules():
        if hasattr(module, "lora_A"):
            module.scaling *= 1.001  # type: ignore[operator,assignment]


@pytest.mark.parametrize(
    ("ranks", "layout", "tamper"),
    [
        (2, ["trainer.tp=2"], _no_sums_over_the_sequence),
        (4, ["trainer.tp=4", "trainer.sp=false"], _no_sums_over_kv_copies),
        (2, ["trainer.tp=2", "trainer.sp=false"], _no_sums_in_between),
        (1, [], _another_scale),
    ],
    ids=["sequence", "kv copies", "between A and B", "scale"],
)
def test_what_is_left_out_would_be_seen(
    ranks: int, layout: list[str], tamper: runner.Tamper, world: World, theirs_lora: Tuned, tmp_path: Path
) -> None:
    try:
        ours = tune(ranks, tmp_path, *world.lora, *layout, steps=3, tamper=tamper)
    except RankFailed as error:
        assert "the copies of " in str(error)  # ranks drift apart: the save notices it
        return
    first = run_ranks(runner.run_lora, 1, world.plan, world.base, world.adapter, 3)[0]
    assert max(worst(ours, first).values()) > 10 * TOLERANCE
