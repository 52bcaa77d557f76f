"""The four experiments from end to end on this machine: their own commands make the data, and what stands on the
command line is only a smaller model and other devices."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import megatron_llama.train  # noqa: F401  imported once, before the forks
from megatron_llama.config import compose
from megatron_llama.launch.cli import CONF_DIR
from tests.layouts.test_train_py import run_train_py

ROOT = Path(__file__).parents[2]
SMALL = ("model=llama_2m", "device=cpu", "data.seq_length=256", "logging.tensorboard=false")
# What people would write to try an experiment on two cores.
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
    "llama2_7b_lora_zero3": (
        *("trainer.dp=2", "trainer.global_batch_size=8", "trainer.epochs=1", "finetune.lora_rank=8"),
    ),
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
    _python(
        "data_prep/train_tokenizer.py",
        "--input",
        raw / "text.jsonl",
        "--vocab-size",
        384,
        "--model-prefix",
        "tok",
        cwd=folder,
    )
    base = ("model=llama_2m", "data=mock", "device=cpu", "trainer.steps=0", "checkpoint.export_hf=true")
    status, said = run_train_py(folder / "base", *base, "logging.tensorboard=false")
    assert status == 0, said
    (folder / "models").mkdir()
    for name in ("Llama-2-70b-chat-hf", "Llama-2-70b-hf", "Llama-2-7b-hf"):
        (folder / "models" / name).symlink_to(folder / "base" / "hf")
    return folder


def _raw() -> dict[str, list[str]]:
    """Small sets in the shapes of the four works' own."""

    def asked(n: int) -> tuple[str, str]:
        return f"What is {n} and one?", f"It is {n + 1}, of course."

    def said(n: int) -> str:
        question, answer = asked(n)
        return json.dumps(
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        )

    def alpaca(n: int) -> str:
        return json.dumps({"instruction": asked(n)[0], "input": "" if n % 2 else f"n = {n}", "output": asked(n)[1]})

    def preferred(n: int) -> str:
        question, answer = asked(n)
        prompt = f"\n\nHuman: {question}\n\nAssistant:"
        return json.dumps({"prompt": prompt, "chosen": f" {answer}", "rejected": " I won't say."})

    def labelled(n: int) -> str:
        return f"{n}\t{asked(n)[0]}\t{asked(n + n % 2)[1]}\t{'not_entailment' if n % 2 else 'entailment'}"

    table = "index\tquestion\tsentence\tlabel"
    numbers = range(200)
    return {
        "chat.jsonl": [said(n) for n in numbers],
        "alpaca_data.jsonl": [alpaca(n) for n in numbers],
        "train.tsv": [table, *map(labelled, numbers)],
        "dev.tsv": [table, *map(labelled, range(200, 240))],
        "train.jsonl": [preferred(n) for n in range(32)],
        "test.jsonl": [preferred(n) for n in range(200, 220)],
        "text.jsonl": [json.dumps({"text": "\n".join(map(said, range(n, 200, 20))) + __doc__}) for n in range(20)],
    }


def _python(script: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / script), *map(str, arguments)]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def prepare(name: str, folder: Path) -> None:
    """Runs the command that the experiment itself names, with the two words filled in that stand for the user's own."""
    command = compose([f"+experiment={name}"], CONF_DIR).data.prepare
    assert command is not None
    for word in ("TOKENIZER", "models/Llama-2-70b-chat-hf"):
        command = command.replace(f"--tokenizer-model {word}", f"--tokenizer-model {folder / 'tok.model'}")
    command = command.replace("FOLDER/", f"{folder / 'raw'}/")
    command = command.replace("python data_prep/sft.py", f"{shlex.quote(sys.executable)} {ROOT}/data_prep/sft.py")
    done = subprocess.run(["bash", "-euc", command], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, workplace: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """(experiment, folder of its run, its resolved config)."""
    name, folder = request.param, workplace / request.param
    prepare(name, workplace)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workplace)  # where the experiment's paths lead to what is there
        status, said = run_train_py(folder, f"+experiment={name}", *SMALL, *RUNS[name])
        assert status == 0, said
        yield name, folder, yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))


def test_it_runs(run: tuple[str, Path, dict[str, Any]], workplace: Path) -> None:
    name, folder, config = run
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["reduced_train_loss"] for line in lines]
    steps = config["trainer"]["steps"]
    assert len(losses) == steps >= 4 and all(math.isfinite(loss) for loss in losses)
    print(name, losses, [line.get("val_loss") for line in lines], [line["lr"] for line in lines])
