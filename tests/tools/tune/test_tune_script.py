"""Output, experiment files and error messages of ``scripts/tune.py``."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from megatron_llama.cli import CONF_DIR
from megatron_llama.config import load_config
from megatron_llama.config.settings_table import get
from megatron_llama.system.files import locked_folder
from megatron_llama.tools.tune import objectives, trial
from megatron_llama.tools.tune.candidates import TUNED, Candidate, Tuner
from megatron_llama.tools.tune.cli import main
from megatron_llama.tools.tune.longest_sequence import (
    length_settings,
    longest_in_any_layout,
    longest_sequence,
    sequence_rows,
    sequence_table,
)
from megatron_llama.tools.tune.trial import DONE, FAILED, TrialOutcome
from tests.paths import ROOT
from tests.tools.tune.searches import WORDS, tuned

LLAMA_7B = (
    "model=llama7b trainer.precision=bf16 data.seq_length=4096 trainer.global_batch_size=32 trainer.vpp=1".split()
)
FAKE = ["cluster.device=h100", "device.memory_gib=80", "tune.name=best"]


@pytest.fixture(autouse=True)
def output_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write experiments and trials of these tests to a temporary folder."""
    monkeypatch.setattr(trial, "experiment_path", lambda name: tmp_path / f"{name}.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no calibration of this machine
    return tmp_path


def rows(text: str) -> list[list[str]]:
    """Return the numbered rows of the table of forecasts."""
    return [line.split() for line in text.splitlines() if re.match(r"\d+ +\d+ ", line)]


def test_experiment_has_the_best_settings(output_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["optim=wsd", "optim.lr=1e-4", "finetune=lora", "finetune.lora_rank=4", "trainer.tp=2"]
    more.append("optim.schedule.min_lr=1e-6")
    assert main([*LLAMA_7B, *more, *FAKE, "tune.trials=0"]) == 0
    best = rows(capsys.readouterr().out)[0]
    config = load_config([f"experiment={output_dir / 'best.yaml'}"], CONF_DIR)
    expected = load_config([*LLAMA_7B, *more, "device.memory_gib=80", "device.name=cuda"], CONF_DIR)
    names = ("tp", "cp", "pp", "vpp", "dp", "zero", "micro_batch_size", "recompute")
    shown = dict(zip(names, [*best[1:7], *best[8:10]], strict=True))
    assert {name: str(get(config, f"trainer.{name}")) for name in shown} == shown
    for name in TUNED:
        section, _, key = name.rpartition(".")
        setattr(get(expected, section), key, get(config, name))
    assert config == expected
    assert main([*LLAMA_7B, *FAKE]) == 2, "an experiment is not replaced without tune.overwrite"
    words = [*LLAMA_7B, *FAKE, "cluster.nodes=2", "trainer.recompute=elementwise", "tune.overwrite=true"]
    assert "tune.overwrite=true" in capsys.readouterr().err and main(words) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()) == 69


def test_context_parallelism_and_recomputation_in_the_table() -> None:
    """A small host: 2 ranks that share 1 GiB, each combination once."""
    tuner, done = tuned(memory=1 << 30), list[int]()
    table = sequence_table(tuner.config, tuner.fixed, tuner.target, done.append)
    assert sum(map(len, table.values())) == len(done)
    tokens = {key: row[2] for key, row in table.items()}
    for method in ("full", "lora"):
        for cp in ("1", "all"):
            none, full, offload = (tokens[method, saving, cp, 3] for saving in ("none", "full", "full, offload"))
            assert 0 < none < full <= offload
        assert tokens[method, "full", "all", 3] > 1.5 * tokens[method, "full", "1", 3], "half of the tokens per rank"
    only = sequence_table(tuner.config, {"trainer.cp": 2, "trainer.zero": 1}, tuner.target, lambda done: None)
    assert {(cp, zero, *row) for (_, _, cp, zero), row in only.items()} == {("2", 1, 2)}


def test_the_longest_layout_uses_context_parallelism() -> None:
    layouts = list(Tuner(tuned().config, {}, tuned(cores=4).target, context=True).layouts(4))
    assert {layout["trainer.cp"] for layout in layouts} == {1, 2, 4}
    assert {math.prod(layout[f"trainer.{axis}"] for axis in ("tp", "cp", "pp", "dp")) for layout in layouts} == {4}
    assert {layout["trainer.cp"] for layout in tuned().layouts(2)} == {1}, "other objectives keep the config's size"


def test_the_longest_sequence_in_any_layout_uses_mlp_chunks() -> None:
    words = ("model.intermediate_size=4096", "model.max_position_embeddings=1000000")

    def longest(*overrides: str) -> tuple[int, dict[str, int]]:
        tuner = tuned(*overrides, memory=2 << 30)
        return longest_in_any_layout(tuner, lambda each: each.required_bytes <= 2 << 30, lambda _: None)

    tokens, settings = longest(*words)
    whole, nothing = longest(*words, "trainer.compile=true")
    assert settings == {"trainer.mlp_chunks": 8} and nothing == {} and tokens > 1.2 * whole > 0
    assert longest(words[0], "model.max_position_embeddings=512")[1] == {}, "the model has no more positions"


def test_longest_sequence_is_maximal() -> None:
    tuner = tuned("trainer.recompute=full", memory=2 << 30)
    settings = next(tuner.layouts(2)) | {"trainer.micro_batch_size": 1}

    def needs(tokens: int) -> int:
        return tuner.candidate({**settings, **length_settings(tuner.config, tokens)}, 2).required_bytes

    tokens = longest_sequence(tuner, settings, 2, lambda each: each.required_bytes <= tuner.target.usable_bytes)
    assert tokens % 64 == 0 and needs(tokens) <= 2 << 30 < needs(tokens + 64)


def test_trials_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, output_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def attempt(candidate: Candidate, words: tuple[str, ...], *_: object) -> TrialOutcome:
        assert words == WORDS
        return TrialOutcome(DONE, 2 * candidate.seconds, candidate.first_peak + (500 << 20))

    monkeypatch.setattr(trial, "run_trial", attempt)
    assert main([*WORDS, "tune.trials=3", "tune.name=here", "cluster.devices_per_node=2"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("trial ") == 3 and "\nmeasured\n" in captured.out and "not tried" in captured.out
    text = (output_dir / "here.yaml").read_text()
    assert "Measured: a step of" in text and "3 trials" in text
    assert (output_dir / "runs/tune-here/trials.json").exists()
    monkeypatch.setattr(trial, "run_trial", lambda *_: TrialOutcome(FAILED, message="no disk"))
    assert main([*WORDS, "tune.trials=2", "tune.name=other", "cluster.devices_per_node=2"]) == 1
    assert "no disk" in capsys.readouterr().err and not (output_dir / "other.yaml").exists()
    with locked_folder(output_dir / "runs/tune-other"):
        assert main([*WORDS, "tune.trials=2", "tune.name=other", "cluster.devices_per_node=2"]) == 2
    assert "is in use by another process" in capsys.readouterr().err
    Path("recipe.yaml").touch()
    for path in ("recipe.yaml", "recipe.txt", "recipe.yaml/best.yaml"):
        assert main([*WORDS, f"--output={path}"]) == 2, "before the search"
        assert f"--output = {path}" in capsys.readouterr().err


def test_virtual_stages_are_candidates() -> None:
    assert isinstance(tuner := tuned("model=llama_15m", cores=4), Tuner)
    assert {each.settings["trainer.vpp"] for each in tuner.enumerate().candidates} > {1}


# --- docs/results/longest_sequences.md: its rows are the forecast of the current code --------------------------------

PAGE = ROOT / "docs" / "results" / "longest_sequences.md"


MACHINES = {"a100": "8 A100 80GB", "trn2": "16 Trainium 2"}


def rows_of_page(machine: str) -> dict[tuple[str, ...], list[str]]:
    """Return the cells of a machine's table by (method, recomputation, cp, ZeRO stage)."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {MACHINES[machine]}\n")[2].partition("\n## ")[0]
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line)
    return {tuple(row[:4]): row[4:] for row in rows}


@pytest.mark.parametrize("machine", ["a100", "trn2"])
def test_the_page_is_the_forecast(machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO 3 with full recomputation, within 10 %."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["objective=max_seq_len", "model=llama3_8b", "data=mock", "trainer.global_batch_size=16"]
    words += ["trainer.precision=bf16", f"cluster.device={machine}", "cluster.nodes=1"]
    request, page = objectives.read_request(words), rows_of_page(machine)
    fixed = {"trainer.zero": 3, "trainer.recompute": "full"}
    _, *rows = sequence_rows(sequence_table(request.config, fixed, request.target, lambda done: None))
    assert len(rows) == 4, "two methods, with and without context parallelism"
    for row in rows:
        expected = page[tuple(row[:4])]
        assert len(expected) == len(row) - 4 == (4 if machine == "a100" else 7)
        for text, other in zip(row[4:], expected, strict=True):
            tokens, published = (int(each.replace(",", "").replace("-", "0")) for each in (text, other))
            assert tokens == pytest.approx(published, rel=0.1)
