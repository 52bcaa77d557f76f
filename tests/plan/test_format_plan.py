"""The page that a dry run prints."""

from __future__ import annotations

import re

import pytest

from megatron_llama.config import PRECISIONS, load_config
from megatron_llama.plan import format_plan, parameters, resolve
from tests.config.helpers import make
from tests.paths import CONF

BIG = [
    "model=llama3_405b",
    "data=mock",
    "data.seq_length=8192",
    "trainer.precision=bf16",
    "trainer.global_batch_size=512",
]


def test_the_demo() -> None:
    page = format_plan(resolve(load_config(["data=mock", "trainer.tp=2"], CONF), 2))
    assert "llama_2m · 1.771 M parameters · 2 ranks" in page
    assert "pp 1 × dp 1 × tp 2 = 2" in page
    assert "micro batch 1 × 8 × dp 1 = 8 sequences" in page
    assert "8 × 256 = 2,048 per step" in page
    assert "1,771,200 in all · 886,464 on a rank" in page


def test_512_ranks_on_a_page() -> None:
    plan = resolve(load_config([*BIG, "trainer.tp=8", "trainer.pp=16"], CONF), 512)
    page = format_plan(plan)
    assert f"{parameters(plan.model):,} in all" in page
    assert "pp 16 × dp 4 × tp 8 = 512" in page and "rank = (pp · 4 + dp) · 8 + tp" in page
    rows = [line.split() for line in page.splitlines() if re.match(r"  pp \d", line)]
    assert len(rows) == 16
    assert rows[0][2:4] == ["8", "0-7"] and rows[15][2:4] == ["7", "119-125"]
    assert rows[0][-3:] == ["0-7", "…", "24-31"] and rows[15][-1] == "504-511", "80 columns show the first and the last"


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (1, ["data=mock"]),
        (512, [*BIG, "trainer.tp=8", "trainer.pp=16"]),
        (16384, [*BIG, "trainer.tp=8", "trainer.pp=42", "trainer.global_batch_size=2048"][:-1] + ["trainer.pp=32"]),
        (
            1024,
            [*BIG, "trainer.tp=8", "trainer.pp=32", "trainer.vpp=3", "trainer.recompute=full", "trainer.compile=true"],
        ),
        (1, ["experiment=llama2_7b_qnli_trainium", "data=mock", "trainer.tp=1", "trainer.dp=1"]),
        (2, ["experiment=pretrain_llama13b", "data=mock", "trainer.dp=1", "device=cuda"]),
        (32, ["experiment=pretrain_llama70b", "data=mock", "trainer.tp=8", "trainer.dp=1", "device=cuda"]),
        (
            64,
            [*BIG, "trainer.zero=3", "trainer.shard_group=8", "init_from=/some/folder", "optim.name=sgd", "optim=wsd"],
        ),
    ],
)
def test_it_fits_a_terminal(world: int, overrides: list[str]) -> None:
    page = format_plan(resolve(load_config(overrides, CONF), world, exists=lambda path: True))
    assert max(map(len, page.splitlines())) <= 79
    assert len(page.splitlines()) <= 50
    assert not any(line != line.rstrip() for line in page.splitlines())


@pytest.mark.parametrize("name", PRECISIONS)
def test_precision_says_what_is_kept(name: str) -> None:
    page = format_plan(resolve(make(**{"trainer.precision": name}), 1))
    line = re.sub(r"\s+", " ", page.partition("  precision")[2].partition("  sharding")[0])
    assert line.split()[0].rstrip(":") == name
    assert ("stochastically" in line) == (name in ("bf16_sr", "bf16SR", "fp32_OptStates"))
    assert ("fp32 master" in line) == (PRECISIONS[name].master is not None)


def test_the_ranks_in_the_table_are_those_of_the_topology() -> None:
    plan = resolve(make(**{"trainer.tp": 2, "trainer.pp": 2, "trainer.global_batch_size": 12}), 12)
    rows = [line.split() for line in format_plan(plan).splitlines() if re.match(r"  pp \d", line)]
    for rank in range(12):
        topology = plan.topology(rank)
        first, last = map(int, rows[topology.place["pp"]][-plan.dp :][topology.place["dp"]].split("-"))
        assert first <= rank <= last and rank - first == topology.place["tp"]


def test_notes_are_shown() -> None:
    plan = resolve(make(**{"trainer.sp": True}), 1)
    assert "trainer.sp=true has no effect with trainer.tp=1" in format_plan(plan)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "off · trainer.val_every_steps=10 turns it on"),
        (["trainer.val_every_steps=200"], "off · trainer.val_every_steps=10 turns it on"),
        (["trainer.steps=5"], "off · trainer.val_every_steps=1 turns it on"),
        (["trainer.val_every_steps=20"], "every 20 steps · 4 batches of 8 · random tokens"),
        (["trainer.val_every_steps=1", "trainer.val_steps=1"], "after each step · 1 batch of 8 · random tokens"),
        (
            ["trainer.val_every_steps=20", "data=python_stdlib", "data.split='90,10,0'"],
            "every 20 steps · 4 batches of 8 · 10 % of the data (data.split)",
        ),
    ],
)
def test_the_plan_states_validation(overrides: list[str], line: str) -> None:
    common = ["data=mock", "trainer.steps=100"]
    page = format_plan(resolve(load_config([*common, *overrides], CONF), 1, exists=lambda path: True))
    assert f"\n  validation    {line}\n" in page


def test_the_plan_names_tensors_and_the_rest_of_the_memory() -> None:
    page = format_plan(resolve(load_config(["data=mock", "device=cpu"], CONF), 1))
    assert re.search(r"memory +\S+ MiB of tensors at the heaviest rank's peak", page)
    assert "not counted: Python and libraries, 0.3 GiB or more per process" in page
