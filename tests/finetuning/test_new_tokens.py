"""New tokens: rows that start as the mean, in each layout; the same ids from preparation to export; peft's adapters."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import megatron_llama.train.run_rank  # noqa: F401  imported before the fork
from benchmarks.verify.parity import fine_tuning_rows
from data_prep import sft
from data_prep.lib.sft_and_text_sets import ExampleOptions, build_chat_format
from megatron_llama.cli import main
from megatron_llama.config import ConfigError, load_config
from megatron_llama.data.checks import check_data
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import sha256_file
from megatron_llama.tools.inference.saved_model import open_saved_model, tokenizer_of
from tests.checkpoint.runner import QUIET
from tests.finetuning import runner
from tests.finetuning.runner import (
    BY_ROWS,
    GROWN,
    IN_FULL,
    LORA,
    NEW,
    OLD,
    PLAIN,
    ROWS,
    TIED,
    TOKENS,
    Tuned,
    World,
    assert_exchanged,
    assert_near,
    make_bases,
    make_plan,
    tune,
)
from tests.golden import GoldenFiles
from tests.messages import raises_with_message, unwrap
from tests.paths import CONF, ROOT
from tests.processes import Launcher
from tests.ranks import RankFailed, run_ranks
from tests.rows import each_layout, read_layouts, rows
from tests.tools.inference.models import CPU, command, generate, make_folder, train_sentencepiece, write_tokenizer

Bases = dict[bool, tuple[Path, Path]]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def bases(world: World, tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """By whether embeddings are tied: a base model with a tokenizer, and the same model that transformers resized."""
    return {tied: make_bases(tmp_path_factory.mktemp("new_tokens"), tied) for tied in (False, True)}


@pytest.fixture(scope="module")
def theirs(bases: Bases, tied: bool) -> Tuned:
    """Full fine-tuning of the grown model by transformers."""
    plan = make_plan(1, bases[tied][1] / "run", f"model.vocab_size={ROWS}", *([TIED] if tied else []))
    return run_ranks(runner.run_full, 1, plan, bases[tied][1], 3)[0]


@each_layout(__file__, "new tokens")
def test_training_equals_a_resized_model(
    ranks: int, layout: list[str], bases: Bases, tied: bool, theirs: Tuned, tmp_path: Path
) -> None:
    """Spare rows stay, new ones start as the mean, in all layouts; then losses and weights are transformers'."""
    base, grown = bases[tied]
    start = ["finetune=full", f"init_from={base}", *GROWN, *([TIED] if tied else []), *layout]
    assert make_plan(ranks, tmp_path, f"init_from={base}", PLAIN, *layout).model.vocab_size == OLD, "spare rows"
    initial, expected = tune(ranks, tmp_path / "start", *start, steps=0).trained, load_file(grown / "model.safetensors")
    assert initial.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in initial.items())
    tune(ranks, tmp_path / "run", *start, steps=1)
    resumed = tune(ranks, tmp_path / "run", *start, steps=3)
    theirs = Tuned(theirs.losses[1:], theirs.norms[1:], trained=theirs.trained)
    assert_near(resumed, theirs)


ADAPTED, QUICK_ADAPTED = read_layouts(__file__, "adapters of new tokens")


@pytest.mark.parametrize("name", rows([(name, [name]) for name in ADAPTED], QUICK_ADAPTED))
def test_adapters_with_new_tokens_are_exchanged_with_peft(name: str, bases: Bases, tied: bool, tmp_path: Path) -> None:
    """peft's adapter with grown modules_to_save trains as in peft; peft reads ours, which starts a run again."""
    import peft

    (ranks, layout), kind = ADAPTED[name], BY_ROWS if name.startswith("rows") else IN_FULL
    (base, grown), adapter = bases[tied], tmp_path / "adapter"
    model = [f"init_from={base}", *GROWN, *([TIED] if tied else [])]
    plan = make_plan(1, tmp_path, *LORA, *kind[tied], *model)
    run_ranks(runner.save_adapter, 1, plan, grown, adapter)
    theirs = run_ranks(runner.run_lora, 1, plan, grown, adapter, 3)[0]
    chosen = ["finetune=lora", f"finetune.adapter={adapter}", *model]
    assert_near(tune(ranks, tmp_path / "run", *chosen, *layout, steps=3), theirs)
    made, *_ = assert_exchanged(tmp_path / "run", tmp_path / "ours", chosen, plan, grown, model)
    assert (made.folder / "tokenizer.json").exists() and made.tokenizer
    assert open_saved_model(made.folder).model.vocab_size == ROWS  # on the base, which has fewer rows
    by_name = peft.AutoPeftModelForCausalLM.from_pretrained(made.folder)  # resizes the base by the folder's tokenizer
    assert by_name.get_input_embeddings().weight.shape[0] == ROWS


def test_a_tied_adapter_of_peft_must_stay_tied(bases: Bases, tmp_path: Path) -> None:
    plan = make_plan(1, tmp_path, *LORA, "finetune.modules_to_save=[embed_tokens]", TIED)
    run_ranks(runner.save_adapter, 1, plan, bases[True][0], tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({**config, "ensure_weight_tying": False}))
    with raises_with_message(RankFailed, r"apart from the tied output head.*ensure_weight_tying=True"):
        tune(1, tmp_path / "run", "finetune=lora", f"finetune.adapter={tmp_path / 'adapter'}",
             f"init_from={bases[True][0]}", TIED, steps=1)  # fmt: skip


def test_the_published_table_has_the_rows_of_fine_tuning() -> None:
    """A new row needs `python -m benchmarks.verify.parity --fine-tuning --rows NAME`."""
    page = (ROOT / "docs/results/parity.txt").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| ") and line.count("|") == 7]
    assert [line.split(" | ")[0][2:] for line in lines[1:]] == [name for name, *_ in fine_tuning_rows()]


CHAT = {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "<think>a</think> mat"}]}


def test_the_same_ids_from_preparation_to_export(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, source = make_folder(tmp_path / "base"), tmp_path / "chat.jsonl"
    source.write_text((json.dumps(CHAT) + "\n") * 8)
    flags = ["--add-tokens", *TOKENS[:2], "--add-special-tokens", TOKENS[2]]
    made = ["--input", source, "--tokenizer-model", base, "--seq-length", 32, "--output-prefix", tmp_path / "data/chat"]
    assert sft.main([*map(str, made), *flags, "--workers", "1"]) == 0
    manifest = json.loads((tmp_path / "data/chat_sft.json").read_text())
    assert manifest["options"]["add_tokens"] == TOKENS[:2] and manifest["vocab_size"] == 293
    start = ["data=chat", "model=from_hf", "data.seq_length=32", "finetune=full", "trainer.tp=2", "trainer.steps=2"]
    start += ["trainer.global_batch_size=4", "checkpoint.export_hf=true", f"data.cache_dir={tmp_path / 'cache'}"]
    jobs = {"prepared": tmp_path / "data/chat_sft", "raw": source}
    for name, path in jobs.items():
        _train(tmp_path / name, *start, f"init_from={base}", f"data.prefixes=[{path}]", *NEW)
    exported = tmp_path / "prepared/hf"
    theirs, ours = AutoTokenizer.from_pretrained(exported), tokenizer_of(open_saved_model(tmp_path / "prepared"))
    text = "a <think>b</think><|call|>mat"
    expected = AutoTokenizer.from_pretrained(base)
    expected.add_tokens(TOKENS[:2])
    expected.add_tokens(TOKENS[2:], special_tokens=True)
    assert theirs(text).input_ids == expected(text).input_ids == ours.encode(text) and len(theirs) == 293
    assert theirs.decode([290, 291, 292], skip_special_tokens=True) == "<think></think>" == ours.decode([290, 291, 292])
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.config.vocab_size == 293 == len(model.get_input_embeddings().weight)
    assert sha256_file(exported / "tokenizer.json") == manifest["tokenizer_sha256"]
    written = [tmp_path / name / "hf/model.safetensors" for name in jobs]
    assert sha256_file(written[0]) == sha256_file(written[1]), "raw data files get the same ids"
    run = (tmp_path / "prepared",)
    folders = [run, (exported,), (*run, "--tokenizer", base), (*run, "--tokenizer", exported)]
    prompt = (*CPU, "--prompt", text, "--greedy", "--max-new-tokens", 4)
    answers = [command(generate, *arguments, *prompt) for arguments in folders]
    assert answers[0].status == 0, answers[0].err
    assert len({answer.out for answer in answers}) == 1, answers
    _train(tmp_path / "next", *start, f"init_from={exported}", f"data.prefixes=[{jobs['prepared']}]")


def _train(folder: Path, *overrides: str) -> None:
    """Run ``python train.py`` in a forked process."""
    job = Launcher(lambda: main([*QUIET, f"run.dir={folder}", *overrides]), folder.parent, folder.name + ".out")
    assert job.wait() == 0, job.out.read_text()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths by their names in tests/golden/finetuning/new_tokens.txt."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty").mkdir()
    write_tokenizer(folder / "base", template=True)
    (folder / "chat.jsonl").write_text(json.dumps(CHAT) + "\n")
    made = ["--input", folder / "chat.jsonl", "--tokenizer-model", folder / "base", "--seq-length", 32]
    made += ["--output-prefix", folder / "chat", "--workers", 1, "--add-special-tokens", TOKENS[2]]
    assert sft.main([*map(str, made)]) == 0
    spm = train_sentencepiece(folder / "spm")
    paths = {"BASE": folder / "base", "EMPTY": folder / "empty", "SPM": spm, "DATA": folder / "chat_sft"}
    return {name: str(path) for name, path in paths.items()}


def test_bad_tokens(places: dict[str, str]) -> None:
    page = ""
    for line in GoldenFiles.commands("finetuning/new_tokens.txt"):
        settings = [places.get(word, word) for word in re.split(r"(BASE|EMPTY|SPM|DATA)", line)]
        with pytest.raises(ConfigError) as raised:
            config = load_config(["data=mock", *shlex.split("".join(settings))], CONF)
            raise ConfigError(check_data(config))
        assert raised.value.problems
        page += f"$ {line}\n{unwrap(str(raised.value))}\n"
    GoldenFiles.check("finetuning/new_tokens.txt", page, {path: name for name, path in places.items()})


def test_preparation_rejects_bad_tokens(places: dict[str, str]) -> None:
    with raises_with_message(UserError, r"tokenizer.json cannot get new tokens: the tokenizer has <\|end\|> \(id 0\)"):
        build_chat_format(ExampleOptions(places["BASE"], 32, add_tokens=["<|end|>"]), [])
