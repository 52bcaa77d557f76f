"""``resolve`` derives settings without side effects, and the plan is printed."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_llama.cli import main
from megatron_llama.config import Config, ConfigError, load_config
from megatron_llama.config.precision import PRECISIONS
from megatron_llama.plan import Plan, format_plan, resolve
from megatron_llama.plan.derive import COSINE
from megatron_llama.plan.format_plan import _short_names
from tests.config.helpers import everything_exists, make
from tests.golden import GoldenFiles
from tests.paths import CONF
from tests.plan.rule_cases import parse_settings


def test_the_input_is_left_alone_and_the_plan_is_the_same_twice() -> None:
    config = make(**{"trainer.tp": 2, "trainer.pp": 2, "trainer.vpp": 2, "trainer.global_batch_size": 16})
    before = copy.deepcopy(config)
    first, second = resolve(config, 8), resolve(config, 8)
    assert config == before
    assert first == second
    assert first.config is not config and first.config.optim.betas is not config.optim.betas
    plan = resolve(make(**{"trainer.tp": 2, "trainer.pp": 2, "model.num_hidden_layers": 11, "trainer.vpp": 3}), 4)
    assert resolve(plan.config, 4) == plan


def test_importing_and_resolving_imports_no_torch() -> None:
    """A login node answers at once."""
    program = (
        "import sys; from pathlib import Path; from megatron_llama.config import load_config\n"
        "from megatron_llama.plan import format_plan, resolve\n"
        "config = load_config(['model=llama3_405b', 'data=mock', 'trainer.tp=8', 'trainer.pp=16',"
        f" 'trainer.global_batch_size=64'], Path({str(CONF)!r}))\n"
        "print(format_plan(resolve(config, 512)))\n"
        "print(sorted({'torch', 'megatron.core', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CONF.parent, check=True)
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


SCHEDULES = {
    "trainer.steps=50 optim.lr=1e-3": {"max_steps": 50, "warmup_steps": 5, "constant_steps": 0, "min_lr": 1e-4},
    "optim=wsd": {"warmup_steps": 10, "constant_steps": 10},
    "optim=wsd optim.constant_steps=30": {"constant_steps": 30},
    "optim=wsd optim.warmup_steps=95": {"constant_steps": 5},
}


@pytest.mark.parametrize("settings", SCHEDULES)
def test_the_schedule_gets_the_derived_values(settings: str) -> None:
    schedule = resolve(load_config(["data=mock", *settings.split()], CONF), 1).config.optim.schedule
    expected = SCHEDULES[settings]
    assert {name: schedule[name] for name in expected} == pytest.approx(expected)
    assert schedule["_target_"].endswith("CosineAnnealing") or "wsd" in settings


def test_a_config_made_in_python_has_the_same_schedule_as_one_from_conf() -> None:
    assert load_config([], CONF).optim.schedule == COSINE
    planned = resolve(load_config(["data=mock"], CONF), 1).config.optim.schedule
    assert resolve(make(), 1).config.optim.schedule == planned
    schedule = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 7}
    assert resolve(make(**{"optim.schedule": schedule}), 1).config.optim.schedule == schedule


@pytest.mark.parametrize(("tp", "length", "sp"), [(1, 256, False), (2, 256, True), (2, 255, False)])
def test_sequence_parallelism_is_on_where_it_can_be(tp: int, length: int, sp: bool) -> None:
    plan = resolve(make(**{"trainer.tp": tp, "data.seq_length": length}), tp)
    assert plan.sp is sp
    assert bool(plan.notes) is (tp > 1 and not sp), "switching it off is worth a note"
    assert not resolve(make(**{"trainer.sp": True}), 1).sp


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


def test_sizes_of_vocabulary_shards_and_chunks() -> None:
    for tp, padded in ((1, 4099), (2, 4100), (4, 4100)):
        plan = resolve(make(**{"model.vocab_size": 4099, "trainer.tp": tp, "model.num_key_value_heads": 4}), tp)
        assert plan.padded_vocab_size == padded and plan.model.vocab_size == 4099
    rows = {"zero=0": 1, "zero=1": 8, "zero=3 shard_group=4": 4, "zero=2 tp=2": 4}
    assert {row: resolve(make(**parse_settings(row)), 8).shard_size for row in rows} == rows
    settings = "pp=2 vpp=2 pipeline_layers=[3,2] num_hidden_layers=5"
    assert resolve(make(**parse_settings(settings)), 2).stage_layers == ((0, 1), (2,), (3,), (4,))


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
    misspelled = "model.num_hiden_layers=9 trainer.tp=abc trainer.vpp=2 optim.min_lr=1"
    rows = {misspelled: (["model.num_hiden_layers", "trainer.tp"], ["trainer.vpp", "optim.min_lr"])}
    rows["model=llama7 trainer.tp=8"] = (["model"], [])  # 8 does not divide the default model's heads
    for settings, (first, second) in rows.items():
        with pytest.raises(ConfigError) as written:
            load_config(["data=mock", *settings.split()], CONF)
        assert [problem.field for problem in written.value.problems] == first
        assert written.value.config is not None
        with pytest.raises(ConfigError) as caught:
            resolve(written.value.config, 8, known=written.value.problems)
        assert [problem.field for problem in caught.value.problems] == [*first, *second]


def plan_of(world: int, settings: str) -> Plan:
    return resolve(load_config(["data=mock", *settings.split()], CONF), world, exists=everything_exists)


@pytest.mark.parametrize("name", GoldenFiles.names("plan/*.txt", r"\$ .*, on \d+ ranks"))
def test_pages(name: str) -> None:
    (command,) = GoldenFiles.commands(name)
    settings, _, ranks = command.removesuffix(" ranks").rpartition(", on ")
    page = format_plan(plan_of(int(ranks), settings))
    assert max(map(len, page.splitlines())) <= 79 and len(page.splitlines()) <= 50
    GoldenFiles.check(name, f"$ {command}\n{page}")


LINES = {
    "validation": GoldenFiles.commands("plan/validation.txt"),
    "precision": [f"trainer.precision={name}" for name in PRECISIONS],
}


@pytest.mark.parametrize("subject", LINES)
def test_lines(subject: str) -> None:
    pages = {settings: format_plan(plan_of(1, settings)) for settings in LINES[subject]}
    matches = {settings: re.search(rf"\n( +{subject} .*\n(?: {{16}}.*\n)*)", page) for settings, page in pages.items()}
    text = "\n".join(f"$ {settings}\n{match[1]}" for settings, match in matches.items() if match)
    GoldenFiles.check(f"plan/{subject}.txt", text)


def test_names_of_datasets_lose_no_more_than_needed() -> None:
    names = ["/data/wiki_text_document", "/data/code_text_document"]
    assert _short_names(names, 19) == ["…wiki_text_document", "…code_text_document"]
    assert _short_names(names, 18) == ["…wiki…", "…code…"]


def test_the_ranks_in_the_table_are_those_of_the_topology() -> None:
    plan = resolve(make(**{"trainer.tp": 2, "trainer.pp": 2, "trainer.global_batch_size": 12}), 12)
    rows = [line.split() for line in format_plan(plan).splitlines() if re.match(r"  pp \d", line)]
    for rank in range(12):
        topology = plan.topology(rank)
        first, last = map(int, rows[topology.place["pp"]][-plan.dp :][topology.place["dp"]].split("-"))
        assert first <= rank <= last and rank - first == topology.place["tp"]


def test_the_dry_run_of_a_common_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama7b", "trainer.tp=8", "device=cuda", "trainer.dp=1", "device.memory_gib=80", "data=mock"]
    assert main(["--dry-run", *words]) == 0
    GoldenFiles.check("plan/dry_run.txt", capsys.readouterr().out)
