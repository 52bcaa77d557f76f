"""The page that a dry run prints."""

from __future__ import annotations

import re

import pytest

from megatron_llama.cli import main
from megatron_llama.config import PRECISIONS, load_config
from megatron_llama.plan import Plan, format_plan, resolve
from megatron_llama.plan.format_plan import _short_names
from tests.config.helpers import everything_exists, make
from tests.golden import GoldenFiles
from tests.paths import CONF

BIG = "model=llama3_405b data.seq_length=8192 trainer.precision=bf16 trainer.global_batch_size=512"
PLANS = {
    "demo": (2, "trainer.tp=2 trainer.dp=1 device=cpu"),
    "405b_512_ranks": (512, f"{BIG} trainer.tp=8 trainer.pp=16"),
    "405b_16384_ranks": (16384, f"{BIG} trainer.tp=8 trainer.pp=32 trainer.global_batch_size=2048"),
    "405b_vpp": (1024, f"{BIG} trainer.tp=8 trainer.pp=32 trainer.vpp=3 trainer.recompute=full"),
    "405b_hybrid": (64, f"{BIG} trainer.zero=3 trainer.shard_group=8 init_from=/a/b optim.name=sgd optim=wsd"),
    "qnli": (1, "experiment=llama2_7b_qnli_trainium data=mock trainer.tp=1 trainer.dp=1"),
    "13b": (2, "experiment=pretrain_llama13b data=mock trainer.dp=1 device=cuda"),
    "70b": (32, "experiment=pretrain_llama70b data=mock trainer.tp=8 trainer.dp=1 device=cuda"),
    "70b_lora": (8, "model=llama70b trainer.zero=3 trainer.dp=8 finetune=lora finetune.lora_rank=4 device=cuda"),
    "7b_8_bit": (1, "model=llama7b device=cuda optim.state_bits=8 trainer.zero=0 trainer.steps=5000 trainer.sp=true"),
    "uneven": (12, "trainer.tp=2 trainer.pp=2 trainer.global_batch_size=12 model.num_hidden_layers=5 trainer.sp=false"),
}


def plan_of(world: int, settings: str) -> Plan:
    return resolve(load_config(["data=mock", *settings.split()], CONF), world, exists=everything_exists)


@pytest.mark.parametrize("name", PLANS)
def test_pages(name: str) -> None:
    page = format_plan(plan_of(*PLANS[name]))
    assert max(map(len, page.splitlines())) <= 79 and len(page.splitlines()) <= 50
    GoldenFiles.check(f"plan/{name}.txt", page)


LINES = {
    "validation": [
        "trainer.steps=100",
        "trainer.steps=100 trainer.val_every_steps=200",
        "trainer.steps=5",
        "trainer.val_every_steps=20",
        "trainer.val_every_steps=1 trainer.val_steps=1",
        "trainer.val_every_steps=20 data=python_stdlib data.split='90,10,0'",
    ],
    "precision": [f"trainer.precision={name}" for name in PRECISIONS],
}


@pytest.mark.parametrize("subject", LINES)
def test_lines(subject: str) -> None:
    pages = {settings: format_plan(plan_of(1, settings)) for settings in LINES[subject]}
    matches = {settings: re.search(rf"\n( +{subject} .*\n(?: {{16}}.*\n)*)", page) for settings, page in pages.items()}
    text = "\n".join(f"{settings}\n{match[1]}" for settings, match in matches.items() if match)
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
