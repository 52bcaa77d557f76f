"""Raw data files in data.prefixes: prepared once, atomically, by one process, as sft.py does."""

from __future__ import annotations

import json
import lzma
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import data_prep.sft
from data_prep.lib import prepare_at_start, record_formats, sft_and_text_sets
from megatron_llama import cli
from megatron_llama.config import Config, ConfigError, load_config
from megatron_llama.config import settings as choices
from megatron_llama.config.data_settings import raw_data_files, resolve_raw_data
from megatron_llama.config.settings import DataConfig
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.system.wrapping import WIDTH
from megatron_llama.text.chat_template import NAMED_TEMPLATES
from megatron_llama.text.conversation import LABELLED
from tests.checkpoint.runner import run_job
from tests.config.helpers import problems_of
from tests.data_prep.helpers import sft_arguments, write_csv, write_parquet
from tests.messages import unwrap
from tests.paths import CONF
from tests.processes import Launcher, wait_until
from tests.tools.inference.models import command, make_folder

pytest.importorskip("tokenizers", reason="Hugging Face tokenizers are an extra")
TALKS = [("the cat sat", "on the mat"), ("a dog", "and a cat"), ("Hello", "answer é 😀"), ("question", "a cat")]


def with_prepared(config: Config) -> Config:
    return prepare_at_start.prepare_datasets(config, raw_data_files(config.data), config.data.length, make=True)


def with_finished(config: Config) -> Config:
    return prepare_at_start.prepare_datasets(config, raw_data_files(config.data), config.data.length, make=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    lines = [{"messages": [dict(role="user", content=q), dict(role="assistant", content=a)]} for q, a in TALKS * 4]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config_of(base: Path, *files: Path, cache: Path, **data: object) -> Config:
    """Return a config with these files as data and the given cache."""
    names = [str(file) for file in files]
    settings = DataConfig(kind="sft", prefixes=names, seq_length=64, cache_dir=str(cache), **data)  # type: ignore[arg-type]
    return Config(data=settings, init_from=str(base))


def content(prefix: str | Path) -> list[bytes]:
    """Read the files with ids and masks."""
    return [Path(f"{prefix}{end}").read_bytes() for end in (".bin", ".idx", "_mask.bin", "_mask.idx")]


def by_hand(tmp_path: Path, base: Path, file: Path, *options: str) -> list[bytes]:
    """Prepare a file with sft.py; return its output."""
    assert data_prep.sft.main(sft_arguments(base, file, tmp_path / "by_hand/set", *options, length=64)) == 0
    return content(tmp_path / "by_hand" / "set_sft")


def test_dataset_matches_sft_command(base: Path, chat: Path, tmp_path: Path, capsys) -> None:
    config = config_of(base, chat, cache=tmp_path / "cache")
    (prefix,) = with_prepared(config).data.prefixes
    assert Path(prefix).name == f"{chat.stem}_sft"  # in plans and model cards
    assert config.data.prefixes == [str(chat)] and content(prefix) == by_hand(tmp_path, base, chat)
    documents = IndexedDataset(prefix)
    output = capsys.readouterr().out
    assert f"16 documents, {int(documents.index.lengths.sum()):,} tokens" in " ".join(output.split())
    assert "0 skipped" in " ".join(output.split()) and str(Path(prefix).parent) in output
    # Only paths, which are not broken, pass the width.
    ours = output.partition("by_hand")[0].splitlines()
    assert all(len(line) <= WIDTH or len(line.split()) == 1 for line in ours), ours
    # A run on a copy of the file, and a dry run, use the prepared dataset.
    times = os.stat(prefix + ".bin").st_mtime_ns
    copy = tmp_path / "copies" / chat.name
    copy.parent.mkdir()
    copy.write_bytes(chat.read_bytes())
    config_of_copy = config_of(base, copy, cache=tmp_path / "cache")
    assert with_prepared(config_of_copy).data.prefixes == with_finished(config_of_copy).data.prefixes == [prefix]
    assert os.stat(prefix + ".bin").st_mtime_ns == times
    assert "using the prepared dataset" in " ".join(capsys.readouterr().out.split())


def test_a_table(base: Path, tmp_path: Path) -> None:
    table = tmp_path / "few.tsv"
    table.write_text("index\tquestion\tsentence\tlabel\n0\ta\tb\tentailment\n1\tc\td\tnot_entailment\n")
    config = config_of(base, table, cache=tmp_path / "cache", template="qnli", chat_template="plain")
    config.data.seq_length = 300
    config.data.validation_prefixes = [str(table)]
    prepared = with_prepared(config)
    made = prepared.data
    assert made.prefixes == made.validation_prefixes != config.data.prefixes  # the same records, once
    options = ("--template", "qnli", "--chat-template", "plain", "--seq-length", "300")
    assert content(made.prefixes[0]) == by_hand(tmp_path, base, table, *options)
    # A run resolves its config again after preparation; templates are valid for files only.
    problems = problems_of(prepared)
    assert not [problem for problem in problems if problem.field.startswith("data.")], problems


@pytest.mark.parametrize("marker", [None, "<|im_start|>assistant\n"])
def test_rendered_texts(marker: str | None, base: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": f"{q}<|im_start|>assistant\n{a}"}) + "\n" for q, a in TALKS))
    typed = [f"data.prefixes=[{file}]", f"init_from={base}", "data.seq_length=64", f"data.cache_dir={tmp_path}/cache"]
    typed += [] if marker is None else [f'data.response_marker="{marker}"']
    config = load_config(["data=chat", "model=from_hf", "data.format=text", *typed], CONF)
    (prefix,) = (made := with_prepared(config)).data.prefixes
    flags = [] if marker is None else [f"--response-marker={marker}"]
    assert content(prefix) == by_hand(tmp_path, base, file, "--format", "text", *flags)
    assert not [problem for problem in problems_of(made) if problem.field.startswith("data.")]
    config.data.format, config.data.response_marker = "auto", None
    with pytest.raises(ConfigError, match=r"unknown_format[^;]*;\s+data.format=text\s+reads\s+rendered"):
        with_prepared(config)


def test_other_kinds_of_files_and_a_folder(base: Path, chat: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="an extra")
    rows = [{"prompt": question, "completion": answer} for question, answer in TALKS * 4]
    hub = tmp_path / "hf/hub/datasets--org--talks"
    for path in (tmp_path / "a.parquet", hub / "blobs/b0"):
        write_parquet(path, rows)
    (hub / "snapshots/0a1b/data").mkdir(parents=True)
    (hub / "snapshots/0a1b/data/train-00000-of-00001.parquet").symlink_to(hub / "blobs/b0")
    (hub / "snapshots/0a1b/data/test-00000-of-00001.parquet").write_bytes(b"not looked at")
    write_csv(tmp_path / "b.csv", rows)
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(chat.read_bytes()))
    expected = by_hand(tmp_path, base, chat)
    folder = resolve_raw_data(str(hub / "snapshots/0a1b"))
    for path in (tmp_path / "a.parquet", tmp_path / "b.csv", tmp_path / "c.jsonl.xz", folder):
        config = config_of(base, cache=tmp_path / "cache")
        config.data.prefixes = [str(path)]
        (prefix,) = with_prepared(config).data.prefixes
        assert content(prefix) == expected, path
        assert with_finished(config).data.prefixes == [prefix]
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"damaged\s+parquet"):
        with_prepared(config_of(base, tmp_path / "a.parquet", cache=tmp_path / "cache"))


def test_folder_name_depends_on_content_and_settings(base: Path, chat: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = with_prepared(config_of(base, chat, cache=cache)).data.prefixes
    shorter = config_of(base, chat, cache=cache)
    shorter.data.seq_length = 60
    named = config_of(base, chat, cache=cache, chat_template="plain")
    with chat.open("a") as file:
        file.write(chat.read_text().splitlines()[0] + "\n")
    changed = config_of(base, chat, cache=cache)
    for config in (shorter, named, changed):
        assert with_finished(config).data.prefixes == [str(chat)], "nothing is prepared for it"
    (prefix,) = with_prepared(changed).data.prefixes
    assert prefix != first[0] and len(IndexedDataset(prefix)) == 17
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings["chat_template"] = "x" + settings["chat_template"]
    other = make_folder(tmp_path / "other")
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    assert with_finished(config_of(other, chat, cache=cache)).data.prefixes == [str(chat)]


def test_a_bad_record_stops_the_start(base: Path, chat: Path, tmp_path: Path) -> None:
    with chat.open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "alone"}]}\n')
    with pytest.raises(ConfigError) as refused:
        with_prepared(config_of(base, chat, cache=tmp_path / "cache"))
    output = " ".join(str(refused.value).split())
    assert f"{chat}, line 17: no_assistant_turn: no turn is an answer with loss" in output
    assert "--on-bad-line skip" in output
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] == []


def test_each_choice_is_a_template() -> None:
    assert set(choices.CHAT_TEMPLATES) == {"own", *NAMED_TEMPLATES}
    assert set(choices.LABEL_TEMPLATES) == set(LABELLED)
    assert {*choices.CHAT_FORMATS, choices.RENDERED} == set(record_formats._READERS)


def test_two_starts_at_once(base: Path, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = sft_and_text_sets.make_sft_set

    def slowly(*arguments: Any) -> Any:
        wait_until(lambda: len(list(tmp_path.glob("looked*"))) == 2)  # the other process has found no dataset
        return prepare(*arguments)

    try_lock = prepare_at_start.try_lock

    def looking(file: Any) -> bool | None:
        (tmp_path / f"looked{os.getpid()}").touch()
        return try_lock(file)

    monkeypatch.setattr(prepare_at_start, "try_lock", looking)
    monkeypatch.setattr(sft_and_text_sets, "make_sft_set", slowly)
    config = config_of(base, chat, cache=tmp_path / "cache")
    (records,), _, _ = prepare_at_start._find_records(config, config.data, raw_data_files(config.data))
    rest = records.folder.parent / f".{records.folder.name}.partial.elsewhere.1"  # leftover of a killed run
    rest.mkdir(parents=True)

    def prepared() -> int:
        return int(with_prepared(config).data.prefixes != [records.prefix])

    starts = [Launcher(prepared, tmp_path, f"said{number}") for number in range(2)]
    assert [start.wait() for start in starts] == [0, 0]
    output = " ".join(" ".join(start.errors for start in starts).split())
    assert output.count("16 documents") == 1 and output.count("prepared by another run") == 1
    assert sorted(path.suffix for path in records.folder.parent.iterdir()) == ["", ".lock"]


def test_a_run(base: Path, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    overrides = [
        "data=chat", f"data.prefixes=[{chat}]", "data.seq_length=32", "model=from_hf", f"init_from={base}",
        "model.vocab_size=290", "model.num_hidden_layers=3", "finetune=lora", "data.split='50,50,0'",
        "trainer.global_batch_size=2",
        "trainer.micro_batch_size=1", "trainer.val_every_steps=2", f"data.tokenizer={base}", "device=cpu",
    ]  # fmt: skip
    dry = command(cli.main, *overrides, "--dry-run")
    assert (
        dry.status == 0 and "is not prepared yet" in " ".join(dry.out.split()) and not (tmp_path / "cache").exists()
    ), dry.err
    pickle = tmp_path / "pickle"
    pickle.mkdir()
    (pickle / "config.json").write_bytes((base / "config.json").read_bytes())
    (pickle / "pytorch_model.bin").write_bytes(b"weights")
    output = run_job(tmp_path / "none", *overrides, f"init_from={pickle}", status=2)
    assert "only pytorch_model.bin" in unwrap(output)
    assert "rank grid" not in output and not (tmp_path / "cache").exists(), "refused before any work"
    output = unwrap(run_job(tmp_path / "run", *overrides, "trainer.steps=2"))
    assert "16 documents" in output and "0 skipped" in output
    dry = command(cli.main, *overrides, "trainer.epochs=1", "--dry-run")
    assert "not prepared" not in " ".join(dry.out.split()) and "1 epoch of" in dry.out, dry.err


@pytest.mark.parametrize(
    ("setting", "value", "template"),
    [
        ("chat_template", "own", None),
        ("chat_template", "own", "{{ messages"),
        ("chat_template_kwargs", {"tools": []}, "{{ messages }}"),
    ],
)
def test_a_dry_run_reports_a_faulty_chat_template(
    setting: str, value: Any, template: str | None, base: Path, chat: Path, tmp_path: Path
) -> None:
    shutil.copytree(base, copy := tmp_path / "no template")
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (copy / "chat_template.jinja").write_text(template)
    config, problems = config_of(copy, chat, cache=tmp_path / "cache", **{setting: value}), []
    for take in (with_finished, with_prepared):
        with pytest.raises(ConfigError) as refused:
            take(config)
        problems.append(refused.value.problems)
    assert problems[0] == problems[1] and problems[0][0].field == f"data.{setting}"


def test_the_command_for_a_large_file_can_be_pasted(base: Path, tmp_path: Path, monkeypatch) -> None:
    (folder := tmp_path / "of the year 2026, it's").mkdir()
    file = folder / "my own chats.jsonl"
    file.write_text("{}\n")
    monkeypatch.setattr(prepare_at_start, "MAX_BYTES", 1)
    for take in (with_prepared, with_finished):
        with pytest.raises(ConfigError) as error:
            take(config_of(base, file, cache=tmp_path / "cache"))
        advice = str(error.value).partition("python data_prep/sft.py")[2].replace("\\\n", " ").partition("\n")[0]
        words = shlex.split(advice)
        assert words[words.index("--input") + 1] == str(file) and words[-1] == "corpora/my_own_chats/my_own_chats"
