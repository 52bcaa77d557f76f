"""What an import leaves open, refuses and writes; scripts/import_config.py; experiments by name and by path."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_llama.config import ConfigError, load_config
from megatron_llama.tools.import_nemo.convert import convert
from megatron_llama.tools.import_nemo.write_yaml import as_yaml, check
from tests.paths import CONF, ROOT
from tests.tools.import_nemo.nemo_files import NEMO, NXDT, changed, converted, experiment, written


def test_what_is_left_open_is_said(tmp_path: Path) -> None:
    bare = changed(NEMO, model__optim__weight_decay=..., model__optim__betas=..., model__data__data_prefix="???")
    result = converted(tmp_path, bare)
    text = " ".join(result.assumed)
    for words in (
        "model.vocab_size=32000",
        "optim.weight_decay=0.01",
        "optim.betas=[0.9,0.999]",
        "no dataset is named",
    ):
        assert words in text
    assert "train_setup.sh" in text, "their files don't tell bf16SR from fp32"
    experiment(tmp_path, result)
    (problem,) = check(tmp_path / "ours.yaml", CONF, result.world_size)
    assert problem.field == "data.prefixes"
    assert check(tmp_path / "ours.yaml", CONF, 20) == [problem], "20 devices are no whole number of tp * pp"


def test_nxdt_may_say_num_key_value_heads(tmp_path: Path) -> None:
    content = changed(NXDT)
    content["model"]["num_key_value_heads"] = content["model"].pop("num_kv_heads")
    assert experiment(tmp_path, converted(tmp_path, content)).model.num_key_value_heads == 8


def test_a_shape_in_hugging_faces_config(tmp_path: Path) -> None:
    shape = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672}
    shape |= {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "rope_theta": 500000.0}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    content = changed(NXDT, model_source="hf", model__model_config=str(tmp_path / "config.json"), model__num_layers=16)
    for key in ("ffn_hidden_size", "num_attention_heads", "num_kv_heads"):
        del content["model"][key]
    model = experiment(tmp_path, converted(tmp_path, content)).model
    assert (model.vocab_size, model.intermediate_size, model.num_key_value_heads) == (128256, 28672, 8)
    assert (model.num_hidden_layers, model.rms_norm_eps) == (16, 1e-6), "their file over the json, the json's defaults"
    with pytest.raises(ConfigError, match=r"can't\s+be\s+read\s+here") as error:
        converted(tmp_path, content, "model.model_config=/gone/config.json")
    assert len(error.value.problems) == 1


def test_sentencepieces_count_is_read_where_the_model_is_here(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"some words {number}" for number in range(200)))
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(tmp_path / "t"), vocab_size=30)
    result = converted(tmp_path, NEMO, f"model.tokenizer.model={tmp_path / 't.model'}")
    assert result.settings["model.vocab_size"] == 30 and not any("vocab" in text for text in result.assumed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "can't be read as YAML"),
        ("- 1\n- 2\n", "theirs.yaml holds a sequence, where names and their values"),
        ("3\n", "theirs.yaml holds a number, where names"),
        ("2026-01-01\n", "holds a timestamp, where"),
        ("'3'\n", "holds a text, where"),
        ("!!set {a, b}\n", "holds a set, where"),
        ("", "no model section"),
        ("model: llama\n", "no model section"),
        ("a: 1\na: 2\n", "can't be read as YAML"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        convert(path, ["=3"])
    assert len(error.value.problems) == 2 and words in " ".join(str(error.value).split()), (
        "and the override's mistake with it"
    )


def test_everything_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    bare = {"model": {"hidden_size": 64, "activations_checkpoint_granularity": "some"}}
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, bare)
    wrong = {problem.field for problem in error.value.problems}
    assert wrong == {
        "model.num_layers",
        "model.num_attention_heads",
        "model.micro_batch_size",
        "model.global_batch_size",
        "trainer.max_steps",
        "model.encoder_seq_length",
        "model.optim.lr",
        "model.activations_checkpoint_granularity",
    }


def test_an_experiment_in_conf_goes_by_its_name(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    (conf / "experiment").mkdir(exist_ok=True)
    (conf / "experiment" / "seven.yaml").write_text(as_yaml(converted(tmp_path, NEMO), "theirs.yaml"))
    for written_so in ("experiment=seven", "+experiment=seven"):
        config = load_config([written_so, "trainer.steps=5000"], conf)
        assert config.model.hidden_size == 4096 and config.trainer.steps == 5000
    assert config == experiment(tmp_path, converted(tmp_path, NEMO), "trainer.steps=5000")
    with pytest.raises(ConfigError, match=r"write\s+experiment=seven"):
        load_config(["experiment=sevn"], conf)


def test_a_mistake_in_an_experiment_is_wrong(tmp_path: Path) -> None:
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
    written(tmp_path, NEMO)
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
    again = run("theirs.yaml", "-o", "out/ours.yaml", "model.activation=gelu", where=tmp_path)
    assert again.returncode == 1 and "not supported: the training will differ (1)" in again.stdout
    dry = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--dry-run", "experiment=out/ours.yaml", "data=mock", "trainer.dp=4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert dry.returncode == 0 and "pp 1 × dp 4 × tp 8 = 32" in dry.stdout, dry.stderr


def test_the_script_refuses(tmp_path: Path) -> None:
    theirs = written(tmp_path, NEMO)
    before = theirs.read_text()
    over = run("theirs.yaml", "-o", "theirs.yaml", where=tmp_path)
    assert over.returncode == 2 and "not made by this script" in over.stderr and theirs.read_text() == before
    gone = run("gone.yaml", "-o", "x.yaml", where=tmp_path)
    assert gone.returncode == 2 and "No such file" in gone.stderr and "Traceback" not in gone.stderr
    assert not (tmp_path / "x.yaml").exists()
