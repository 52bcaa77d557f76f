"""Assumptions, errors and output of scripts/import_config.py; experiments by name and by path."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_llama.config import ConfigError, load_config
from megatron_llama.tools.import_nemo.cli import as_yaml, check, main
from megatron_llama.tools.import_nemo.convert import convert
from tests.paths import CONF, ROOT
from tests.tools.import_nemo.nemo_files import NEMO, NXDT, import_dict, load_converted, with_changes, write_source


def test_assumptions_are_reported(tmp_path: Path) -> None:
    bare = with_changes(NEMO, model__optim__weight_decay=..., model__optim__betas=..., model__data__data_prefix="???")
    result = import_dict(tmp_path, bare)
    text = " ".join(result.assumed)
    for words in (
        "model.vocab_size=32000",
        "optim.weight_decay=0.01",
        "optim.betas=[0.9,0.999]",
        "no dataset is given",
    ):
        assert words in text
    assert "train_setup.sh" in text, "configs do not distinguish bf16SR from fp32"
    load_converted(tmp_path, result)
    (problem,) = check(tmp_path / "ours.yaml", CONF, result.world_size)
    assert problem.field == "data.prefixes"
    assert check(tmp_path / "ours.yaml", CONF, 20) == [problem], "20 devices are not a multiple of tp * pp"


def test_nxdt_num_key_value_heads(tmp_path: Path) -> None:
    content = with_changes(NXDT)
    content["model"]["num_key_value_heads"] = content["model"].pop("num_kv_heads")
    assert load_converted(tmp_path, import_dict(tmp_path, content)).model.num_key_value_heads == 8


def test_shape_from_a_hugging_face_config(tmp_path: Path) -> None:
    shape = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672}
    shape |= {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "rope_theta": 500000.0}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    content = with_changes(
        NXDT, model_source="hf", model__model_config=str(tmp_path / "config.json"), model__num_layers=16
    )
    for key in ("ffn_hidden_size", "num_attention_heads", "num_kv_heads"):
        del content["model"][key]
    model = load_converted(tmp_path, import_dict(tmp_path, content)).model
    assert (model.vocab_size, model.intermediate_size, model.num_key_value_heads) == (128256, 28672, 8)
    assert (model.num_hidden_layers, model.rms_norm_eps) == (16, 1e-6), (
        "the YAML has precedence over the JSON and its defaults"
    )
    with pytest.raises(ConfigError, match=r"cannot\s+be\s+read") as error:
        import_dict(tmp_path, content, "model.model_config=/gone/config.json")
    assert len(error.value.problems) == 1


def test_vocab_size_of_a_sentencepiece_model(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"some words {number}" for number in range(200)))
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(tmp_path / "t"), vocab_size=30)
    result = import_dict(tmp_path, NEMO, f"model.tokenizer.model={tmp_path / 't.model'}")
    assert result.settings["model.vocab_size"] == 30 and not any("vocab" in text for text in result.assumed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "cannot be read as YAML"),
        ("- 1\n- 2\n", "theirs.yaml contains a sequence where a mapping is expected"),
        ("3\n", "theirs.yaml contains a number where a mapping"),
        ("2026-01-01\n", "contains a timestamp where"),
        ("'3'\n", "contains a text where"),
        ("!!set {a, b}\n", "contains a set where"),
        ("", "no model section"),
        ("model: llama\n", "no model section"),
        ("a: 1\na: 2\n", "cannot be read as YAML"),
    ],
)
def test_invalid_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        convert(path, ["=3"])
    assert len(error.value.problems) == 2 and words in " ".join(str(error.value).split()), (
        "and the error of the override"
    )


def test_all_missing_keys_are_reported_together(tmp_path: Path) -> None:
    bare = {"model": {"hidden_size": 64, "activations_checkpoint_granularity": "some"}}
    with pytest.raises(ConfigError) as error:
        import_dict(tmp_path, bare)
    fields = {problem.field for problem in error.value.problems}
    assert fields == {
        "model.num_layers",
        "model.num_attention_heads",
        "model.micro_batch_size",
        "model.global_batch_size",
        "trainer.max_steps",
        "model.encoder_seq_length",
        "model.optim.lr",
        "model.activations_checkpoint_granularity",
    }


def test_experiments_in_conf_are_found_by_name(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    (conf / "experiment").mkdir(exist_ok=True)
    (conf / "experiment" / "seven.yaml").write_text(as_yaml(import_dict(tmp_path, NEMO), "theirs.yaml"))
    for override in ("experiment=seven", "+experiment=seven"):
        config = load_config([override, "trainer.steps=5000"], conf)
        assert config.model.hidden_size == 4096 and config.trainer.steps == 5000
    assert config == load_converted(tmp_path, import_dict(tmp_path, NEMO), "trainer.steps=5000")
    with pytest.raises(ConfigError, match=r"write\s+experiment=seven"):
        load_config(["experiment=sevn"], conf)


def test_errors_in_an_experiment_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("trainer:\n  stepz: 3\n")
    with pytest.raises(ConfigError) as error:
        load_config([f"experiment={path}"], CONF)
    assert "trainer.stepz" in str(error.value)
    with pytest.raises(ConfigError, match=r"path\s+of\s+a\s+.yaml\s+file"):
        load_config([f"experiment={tmp_path / 'gone.yaml'}"], CONF)


def run(*arguments: str, where: Path) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "scripts" / "import_config.py")
    return subprocess.run([sys.executable, script, *arguments], cwd=where, capture_output=True, text=True, timeout=150)


def test_the_script(tmp_path: Path) -> None:
    write_source(tmp_path, NEMO)
    done = run("theirs.yaml", "-o", "out/ours.yaml", "model.num_layers=16", where=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    for words in (
        "taken (",
        "renamed (",
        "without meaning here (",
        "experiment=out/ours.yaml",
        "model.num_hidden_layers=16",
    ):
        assert words in done.stdout
    rerun = run("theirs.yaml", "-o", "out/ours.yaml", "model.activation=gelu", where=tmp_path)
    assert rerun.returncode == 1 and "not supported: the training will differ (1)" in rerun.stdout
    dry = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--dry-run", "experiment=out/ours.yaml", "data=mock", "trainer.dp=4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert dry.returncode == 0 and "pp 1 × dp 4 × tp 8 = 32" in dry.stdout, dry.stderr


def test_the_default_output_works_and_stays_out_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long_key = {"model__a_key_that_no_version_of_these_programs_has_and_that_is_long": "x" * 30}
    theirs = write_source(tmp_path, with_changes(NEMO, model__data__data_prefix="???"))
    before = sorted((CONF / "experiment").iterdir())
    assert main([str(theirs)]) == 0, "a missing dataset is a note"
    assert sorted((CONF / "experiment").iterdir()) == before
    printed = capsys.readouterr().out
    assert "note: no dataset is given" in printed and "can't work" not in printed
    commands = re.findall(r"python train\.py ((?:.*\\\n)*.*)", printed)
    short, equivalent = (shlex.split(command.replace("\\\n", " ")) for command in commands)
    assert short[0] == f"experiment={tmp_path / 'theirs_imported.yaml'}" and short[-1] == "data=mock"
    of_file, of_command = load_config(short, CONF).model, load_config(equivalent, CONF).model
    assert of_file == replace(of_command, name=of_file.name)
    write_source(tmp_path, with_changes(NEMO, **long_key, another_section={"key": list(range(60))}))
    monkeypatch.chdir(tmp_path)
    assert main(["theirs.yaml"]) == 1, "written over its own output, with an unsupported key"
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 79 and len(line.rstrip(" \\").split()) > 1] == [], "but for paths"


# Arguments of the original training script, with variables expanded.
THEIR_COMMAND = """--config-path=conf --config-name=theirs trainer.devices=32 trainer.num_nodes=1
trainer.max_epochs=null trainer.max_steps=20000 trainer.val_check_interval=20000
trainer.limit_val_batches=1 trainer.precision=32
model.megatron_amp_O2=false model.tokenizer.type=/root/llamav2_weights/7b-hf model.layernorm_epsilon=1e-5
model.data.data_prefix=[1.0,/root/examples_datasets/llama_7b/book.jsonl-processed_text_document]
model.data.splits_string='980,10,10' model.optim.lr=3.0e-4 model.optim.betas=[0.9,0.95] +model.save_xser=True
++model.load_xser=True model.wrap_with_zero=false model.zero_use_fp32_grad_accum= ~model.data.train_ds
exp_manager.explicit_log_dir=null +exp_manager.checkpoint_callback_params.train_time_interval=36000
~exp_manager.checkpoint_callback_params.every_n_train_steps"""


def test_the_script_accepts_the_original_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf").mkdir()
    write_source(tmp_path / "conf", NEMO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_USE_BF16", "1")
    assert main([*THEIR_COMMAND.split(), "-o", "ours.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "model.save_xser=true" in printed and "train_ds" not in printed and "XLA_USE_BF16=1 is set" in printed
    config = load_config(["experiment=ours.yaml"], CONF)
    assert (config.trainer.steps, config.trainer.val_every_steps, config.trainer.val_steps) == (20000, 20000, 1)
    assert (config.trainer.precision, config.trainer.zero, config.optim.lr) == ("bf16SR", 0, 3e-4)
    assert config.data.prefixes[1].endswith("/book.jsonl-processed_text_document") and config.data.split == "980,10,10"
    assert config.checkpoint.every_steps is None, "the source saves by time"
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2 and "give the YAML" in capsys.readouterr().err


def test_precision_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = with_changes(NEMO, model__wrap_with_zero=False)
    for value, precision in (("1", "bf16SR"), ("0", "fp32")):
        monkeypatch.setenv("XLA_USE_BF16", value)
        result = import_dict(tmp_path, content)
        assert result.settings["trainer.precision"] == precision and "train_setup.sh" not in " ".join(result.assumed)
    assert import_dict(tmp_path, content, "trainer.precision=bf16SR").settings["trainer.precision"] == "bf16SR"


@pytest.mark.parametrize("override", ["~model.gone", "~gone.key", "~model.num_layers.x"])
def test_deleting_a_missing_key_is_an_error(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"no\s+key\s+\S+\s+to\s+delete"):
        import_dict(tmp_path, NEMO, override)


def test_the_script_rejects_bad_paths(tmp_path: Path) -> None:
    theirs = write_source(tmp_path, NEMO)
    before = theirs.read_text()
    over = run("theirs.yaml", "-o", "theirs.yaml", where=tmp_path)
    assert over.returncode == 2 and "not made by this script" in over.stderr and theirs.read_text() == before
    gone = run("gone.yaml", "-o", "x.yaml", where=tmp_path)
    assert gone.returncode == 2 and "No such file" in gone.stderr and "Traceback" not in gone.stderr
    assert not (tmp_path / "x.yaml").exists()


def test_text_of_a_config_does_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the listing nor the written comments have the control characters of the source."""
    source = write_source(tmp_path, with_changes(NEMO, model__unknown="\x1b[2J\u202e"))
    main([str(source), "-o", str(tmp_path / "ours.yaml")])
    written = capsys.readouterr().out + (tmp_path / "ours.yaml").read_text(encoding="utf-8")
    assert written.count("\\x1b[2J\\u202e") == 2 and not set("\x1b\u202e") & set(written)
