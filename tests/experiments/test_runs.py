"""The four experiments from end to end on this machine: their own commands prepare the data, and the command line
changes only the model's size and the devices."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import megatron_llama.train.run_rank  # noqa: F401  imported once, before the forks
from megatron_llama.cli import CONF_DIR
from megatron_llama.config import load_config
from megatron_llama.train.metrics_file import read_metrics
from tests.config.helpers import leaves
from tests.paths import ROOT
from tests.processes import run_train_py

pytestmark = pytest.mark.slow
SMALL = ("model=llama_2m", "device=cpu", "data.seq_length=256", "logging.tensorboard=false")
# Overrides to try an experiment on two cores.
RUNS = {
    "llama2_70b_fsdp_chat": (
        *("trainer.dp=2", "trainer.global_batch_size=4", "trainer.steps=6", "trainer.val_every_steps=3"),
        *("trainer.val_steps=1", "checkpoint.every_steps=3", "optim.lr=1e-3"),
    ),
    "llama2_70b_lora_gaudi": ("trainer.dp=2", "trainer.global_batch_size=20", "trainer.compile=false"),
    "llama2_7b_qnli_trainium": (
        *("trainer.tp=2", "trainer.dp=2", "trainer.global_batch_size=8", "trainer.steps=6"),
        *("trainer.compile=false", "optim.lr=1e-3"),
    ),
    "llama2_7b_lora_zero3": (*("trainer.dp=2", "trainer.global_batch_size=8", "finetune.lora_rank=8"),),
}
FSDP, GAUDI, TRAINIUM, ZERO = RUNS


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, the raw data of each work, and a random Llama where its weights would be."""
    folder = tmp_path_factory.mktemp("experiments")
    raw = folder / "raw"
    raw.mkdir()
    for name, lines in _raw().items():
        (raw / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ("--input", raw / "text.jsonl", "--vocab-size", 384, "--model-prefix", "tok")
    _python("data_prep/train_tokenizer.py", *words, cwd=folder)
    base = ("model=llama_2m", "data=mock", "device=cpu", "trainer.steps=0", "checkpoint.export_hf=true")
    status, output = run_train_py(folder / "base", *base, "logging.tensorboard=false")
    assert status == 0, output
    (folder / "models").mkdir()
    for name in ("Llama-2-70b-chat-hf", "Llama-2-70b-hf", "Llama-2-7b-hf"):
        (folder / "models" / name).symlink_to(folder / "base" / "hf")
    return folder


def _raw() -> dict[str, list[str]]:
    """Small sets in the shapes of the four works' own."""

    def exchange(n: int) -> tuple[str, str]:
        return f"What is {n} and one?", f"It is {n + 1}, of course."

    def conversation(n: int) -> str:
        turns = zip(("user", "assistant"), exchange(n), strict=True)
        return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})

    def alpaca(n: int) -> str:
        question, answer = exchange(n)
        return json.dumps({"instruction": question, "input": "" if n % 2 else f"n = {n}", "output": answer})

    def preferred(n: int) -> str:
        question, answer = exchange(n)
        prompt = f"\n\nHuman: {question}\n\nAssistant:"
        return json.dumps({"prompt": prompt, "chosen": f" {answer}", "rejected": " I won't say."})

    def labelled(n: int) -> str:
        return f"{n}\t{exchange(n)[0]}\t{exchange(n + n % 2)[1]}\t{'not_entailment' if n % 2 else 'entailment'}"

    table = "index\tquestion\tsentence\tlabel"
    numbers = range(200)
    return {
        "chat.jsonl": [conversation(n) for n in numbers],
        "alpaca_data.json": ["[", *(alpaca(n) + "," * (n < 119) for n in range(120)), "]"],
        "train.tsv": [table, *map(labelled, numbers)],
        "dev.tsv": [table, *map(labelled, range(200, 240))],
        "train.jsonl": [preferred(n) for n in range(32)],
        "test.jsonl": [preferred(n) for n in range(200, 220)],
        "text.jsonl": [
            json.dumps({"text": "\n".join(map(conversation, range(n, 200, 20))) + __doc__}) for n in range(20)
        ],
    }


def _python(script: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / script), *map(str, arguments)]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def prepare(name: str, folder: Path) -> None:
    """Runs the command that the experiment itself names, with its two placeholders filled in."""
    command = load_config([f"+experiment={name}"], CONF_DIR).data.prepare
    assert command is not None
    for word in ("TOKENIZER", "models/Llama-2-70b-chat-hf"):
        command = command.replace(f"--tokenizer-model {word}", f"--tokenizer-model {folder / 'tok.model'}")
    command = command.replace("FOLDER/", f"{folder / 'raw'}/")
    command = command.replace("python data_prep/sft.py", f"{shlex.quote(sys.executable)} {ROOT}/data_prep/sft.py")
    done = subprocess.run(["bash", "-euc", command], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def train(workplace: Path, folder: Path, *overrides: str) -> None:
    """Run train.py in a folder that contains the experiments' datasets and weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workplace)
        status, output = run_train_py(folder, *SMALL, *overrides)
    assert status == 0, output


def logged(folder: Path, name: str) -> list[Any]:
    """Return a metric of each step; None for steps without it."""
    return [record.get(name) for record in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, workplace: Path) -> tuple[str, Path]:
    """Return (experiment, folder of its finished run)."""
    name, folder = request.param, workplace / request.param
    prepare(name, workplace)
    train(workplace, folder, f"+experiment={name}", *RUNS[name])
    return name, folder


def test_run_uses_the_experiments_settings_except_overrides(run: tuple[str, Path]) -> None:
    name, folder = run
    experiment = yaml.safe_load((CONF_DIR / "experiment" / f"{name}.yaml").read_text(encoding="utf-8"))
    experiment.pop("defaults")
    actual = leaves(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
    overridden = {word.partition("=")[0] for word in (*SMALL, *RUNS[name])}
    derived = {"trainer.epochs", "optim.warmup_ratio"}  # replaced by steps
    expected = {key: value for key, value in leaves(experiment).items() if key not in overridden | derived}
    assert {key: actual[key] for key in expected} == expected


def test_it_learns(run: tuple[str, Path]) -> None:
    name, folder = run
    losses, rates = logged(folder, "reduced_train_loss"), logged(folder, "lr")
    part = len(losses) // 4 or 1
    assert len(losses) >= 6 and sum(losses[-part:]) < sum(losses[:part])
    if name == FSDP:
        validated = [loss for loss in logged(folder, "val_loss") if loss is not None]
        assert len(validated) == 2 and validated[1] < validated[0]
    if name == GAUDI:
        assert rates[0] < 4e-4 and set(rates[1:]) == {4e-4}, "a constant rate after 3 % of warm-up"
    if name in (GAUDI, ZERO):
        plan = " ".join((folder / "plan.txt").read_text(encoding="utf-8").split())
        assert f"epochs of {32 if name == ZERO else ''}" in plan


def test_it_exports(run: tuple[str, Path], workplace: Path) -> None:
    name, folder = run
    if name == FSDP:
        assert (folder / "hf" / "model.safetensors").exists(), "exported by the experiment's own setting"
        return
    out = workplace / f"{name}_out"
    _python("scripts/export_hf.py", folder, out, cwd=workplace)
    if name == TRAINIUM:
        assert json.loads((out / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"] == 4
    else:
        adapter = json.loads((out / "adapter_config.json").read_text(encoding="utf-8"))
        assert (adapter["r"], adapter["lora_alpha"]) == ((4, 16) if name == GAUDI else (8, 1))
        assert (out / "adapter_model.safetensors").exists()
