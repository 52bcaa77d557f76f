"""``resolve`` derives settings without side effects."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_llama.config import Config, ConfigError, load_config
from megatron_llama.plan import resolve
from megatron_llama.plan.derive import COSINE
from tests.config.helpers import make
from tests.paths import CONF


def test_the_input_is_left_alone_and_the_plan_is_the_same_twice() -> None:
    config = make(**{"trainer.tp": 2, "trainer.pp": 2, "trainer.vpp": 2, "trainer.global_batch_size": 16})
    before = copy.deepcopy(config)
    first, second = resolve(config, 8), resolve(config, 8)
    assert config == before
    assert first == second
    assert first.config is not config and first.config.optim.betas is not config.optim.betas


def test_a_resolved_config_resolves_to_itself() -> None:
    plan = resolve(make(**{"trainer.tp": 2, "trainer.pp": 2, "model.num_hidden_layers": 11, "trainer.vpp": 3}), 4)
    assert resolve(plan.config, 4) == plan


def test_importing_and_resolving_imports_no_torch() -> None:
    """A login node answers at once; torch alone takes seconds to import."""
    program = (
        "import sys; from pathlib import Path; from megatron_llama.config import load_config\n"
        "from megatron_llama.plan import format_plan, resolve\n"
        "config = load_config(['model=llama3_405b', 'data=mock', 'trainer.tp=8', 'trainer.pp=16',"
        f" 'trainer.global_batch_size=64'], Path({str(CONF)!r}))\n"
        "print(format_plan(resolve(config, 512)))\n"
        "print(sorted({'torch', 'megatron.core', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=CONF.parent, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_everything_that_can_be_derived_is() -> None:
    config = load_config(["data.prefixes=[folder/text_document]", "data.tokenizer=null"], CONF)
    plan = resolve(config, 1, exists=lambda path: True)
    model, data, trainer, optim = plan.config.model, plan.config.data, plan.config.trainer, plan.config.optim
    assert (model.num_key_value_heads, model.head_dim) == (2, 48)
    assert data.cache_dir == "folder/index_cache"
    assert (trainer.sp, trainer.dp, trainer.shard_group, trainer.pipeline_layers) == (False, 1, 1, [4])
    assert (optim.min_lr, optim.warmup_steps, optim.constant_steps) == (pytest.approx(3e-5), 10, 0)
    assert (plan.dp, plan.num_microbatches, plan.tokens_per_step, plan.shard_size) == (1, 8, 2048, 1)


def test_warm_up_is_a_tenth_of_the_steps_and_at_most_2000() -> None:
    steps = {0: 0, 9: 0, 10: 1, 500: 50, 20_000: 2000, 1_000_000: 2000}
    got = {count: resolve(make(**{"trainer.steps": count}), 1).config.optim.warmup_steps for count in steps}
    assert got == steps


def test_the_schedule_gets_the_derived_values() -> None:
    plan = resolve(load_config(["data=mock", "trainer.steps=50", "optim.lr=1e-3"], CONF), 1)
    assert plan.config.optim.schedule == {
        "_target_": "megatron_llama.optim.schedules.CosineAnnealing",
        "max_steps": 50,
        "warmup_steps": 5,
        "constant_steps": 0,
        "min_lr": pytest.approx(1e-4),
    }


def test_a_config_made_in_python_has_the_same_schedule_as_one_from_conf() -> None:
    assert load_config([], CONF).optim.schedule == COSINE
    assert (
        resolve(make(), 1).config.optim.schedule == resolve(load_config(["data=mock"], CONF), 1).config.optim.schedule
    )


def test_wsd_decays_over_the_last_tenth_unless_stated() -> None:
    schedule = resolve(load_config(["data=mock", "optim=wsd"], CONF), 1).config.optim.schedule
    assert (schedule["warmup_steps"], schedule["constant_steps"]) == (10, 10)
    stated = resolve(load_config(["data=mock", "optim=wsd", "optim.constant_steps=30"], CONF), 1).config.optim.schedule
    assert stated["constant_steps"] == 30
    full = resolve(load_config(["data=mock", "optim=wsd", "optim.warmup_steps=95"], CONF), 1).config.optim.schedule
    assert full["constant_steps"] == 5


def test_a_schedule_of_another_package_keeps_its_arguments() -> None:
    schedule = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 7}
    assert resolve(make(**{"optim.schedule": schedule}), 1).config.optim.schedule == schedule


@pytest.mark.parametrize(("tp", "length", "sp"), [(1, 256, False), (2, 256, True), (2, 255, False)])
def test_sequence_parallelism_is_on_where_it_can_be(tp: int, length: int, sp: bool) -> None:
    plan = resolve(make(**{"trainer.tp": tp, "data.seq_length": length}), tp)
    assert plan.sp is sp
    assert bool(plan.notes) is (tp > 1 and not sp), "switching it off is worth a note"


def test_sequence_parallelism_without_tensor_parallelism_is_off_with_a_note() -> None:
    plan = resolve(make(**{"trainer.sp": True}), 1)
    assert not plan.sp
    assert "trainer.tp=1" in plan.notes[0]


@pytest.mark.parametrize(
    ("installed", "noted"),
    [
        (["flash_attn_interface.py"], "FlashAttention 3 on Hopper GPUs"),
        (["transformer_engine.py"], "cuDNN through Transformer Engine on Hopper and Blackwell GPUs"),
        (["flash_attn_interface.py", "transformer_engine.py"], "FlashAttention 3 on Hopper GPUs, else cuDNN"),
        ([], None),
    ],
)
def test_packages_with_attention_are_noted(
    installed: list[str], noted: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in installed:
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    notes = resolve(make(**{"device.name": "cuda", "trainer.precision": "bf16"}), 1).notes
    attention = [note for note in notes if "packages of this machine" in note]
    assert len(attention) == (noted is not None) and all(str(noted) in note for note in attention)
    in_fp32 = resolve(make(**{"device.name": "cuda", "trainer.precision": "fp32"}), 1).notes
    assert not any("packages of this machine" in note for note in in_fp32)


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({}, True),
        ({"trainer.async_tp": True}, False),
        ({"trainer.sp": False}, False),
        ({"trainer.compile": False}, False),
        ({"device.name": "neuron", "trainer.compile": False}, False),
        ({"trainer.float8": "tensorwise"}, False),
    ],
)
def test_communication_that_matmuls_could_hide_is_noted(changes: dict[str, object], noted: bool) -> None:
    values = {"device.name": "cuda", "trainer.tp": 2, "trainer.compile": True, "trainer.precision": "bf16"}
    plan = resolve(make(**{**values, **changes}), 2)
    assert any("trainer.async_tp=true overlaps" in note for note in plan.notes) == noted


def test_the_vocabulary_is_padded_to_a_multiple_of_tp() -> None:
    for tp, padded in ((1, 4099), (2, 4100), (4, 4100)):
        plan = resolve(make(**{"model.vocab_size": 4099, "trainer.tp": tp, "model.num_key_value_heads": 4}), tp)
        assert plan.padded_vocab_size == padded and plan.model.vocab_size == 4099


def test_what_shards_share() -> None:
    def shard_size(**changes: int) -> int:
        return resolve(make(**{f"trainer.{name}": value for name, value in changes.items()}), 8).shard_size

    assert shard_size(zero=0) == 1
    assert shard_size(zero=1) == 8
    assert shard_size(zero=3, shard_group=4) == 4
    assert shard_size(zero=2, tp=2) == 4


def test_chunks_of_a_stage_are_spread_through_the_model() -> None:
    plan = resolve(
        make(**{"trainer.pp": 2, "trainer.vpp": 2, "trainer.pipeline_layers": [3, 2], "model.num_hidden_layers": 5}), 2
    )
    assert plan.stage_layers == ((0, 1), (2,), (3,), (4,))


@pytest.mark.parametrize(
    ("tp", "pp", "vpp", "zero"),
    [(8, 16, 1, 1), (8, 8, 3, 3), (16, 2, 1, 0), (1, 1, 1, 3), (8, 64, 1, 2), (128, 2, 1, 1)],
)
def test_512_ranks(tp: int, pp: int, vpp: int, zero: int) -> None:
    config = load_config(
        ["model=llama3_405b", "data=mock", f"trainer.tp={tp}", f"trainer.pp={pp}", f"trainer.vpp={vpp}"]
        + [f"trainer.zero={zero}", "trainer.global_batch_size=512"],
        CONF,
    )
    plan = resolve(config, 512)
    assert plan.dp * tp * pp == 512
    assert plan.num_microbatches * plan.dp == 512
    assert sorted(itertools.chain.from_iterable(plan.stage_layers)) == list(range(126))


def test_a_config_error_is_a_value_error_with_all_of_it_in_the_message() -> None:
    config = Config()
    config.trainer.tp, config.trainer.vpp = 3, 2
    with pytest.raises(ValueError) as caught:
        resolve(config, 8)
    assert isinstance(caught.value, ConfigError)
    assert all(problem.rule.split()[0] in str(caught.value) for problem in caught.value.problems)
    assert {"trainer.tp", "trainer.vpp", "data.prefixes"} == {problem.field for problem in caught.value.problems}


def test_mistakes_in_writing_and_in_meaning_come_together() -> None:
    """The readable part of the config goes to resolve, which reports no setting a second time."""
    with pytest.raises(ConfigError) as written:
        load_config(
            ["data=mock", "model.num_hiden_layers=9", "trainer.tp=abc", "trainer.vpp=2", "optim.min_lr=1"], CONF
        )
    assert [problem.field for problem in written.value.problems] == ["model.num_hiden_layers", "trainer.tp"]
    assert written.value.config is not None
    with pytest.raises(ConfigError) as caught:
        resolve(written.value.config, 3, known=written.value.problems)
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["model.num_hiden_layers", "trainer.tp", "trainer.vpp", "optim.min_lr"]


def test_a_model_that_does_not_exist_breaks_no_rule() -> None:
    with pytest.raises(ConfigError) as written:
        load_config(["data=mock", "model=llama7", "trainer.tp=8"], CONF)
    assert written.value.config is not None
    with pytest.raises(ConfigError) as caught:
        resolve(written.value.config, 8, known=written.value.problems)
    assert [problem.field for problem in caught.value.problems] == ["model"], (
        "8 does not divide the default model's heads"
    )


def test_what_never_happens_is_noted() -> None:
    plan = resolve(make(**{"trainer.val_every_steps": 101, "data.prefixes": ["x"], "data.mock": True}), 1)
    assert plan.notes == (
        "no validation: trainer.val_every_steps=101 of 100 steps",
        "data.mock=true generates random tokens; data.prefixes is ignored",
    )
    assert not resolve(make(**{"trainer.val_every_steps": 100, "data.mock": True}), 1).notes
