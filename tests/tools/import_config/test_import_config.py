"""scripts/import_config.py: configs of NeMo, neuronx-nemo-megatron, NxDT, Megatron-LM and torchtitan."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_llama.config import Config, ConfigError, load_config
from megatron_llama.config.precision import PRECISIONS
from megatron_llama.config.problems import format_value
from megatron_llama.tools.import_config.cli import as_yaml, check, convert_source, format_listing, main
from megatron_llama.tools.import_config.conversion import Conversion
from megatron_llama.tools.import_config.nemo import PRESETS, convert
from megatron_llama.tools.import_config.read_script import ScriptError, read_script
from tests.data.files import train_tokenizer
from tests.golden import GoldenFiles
from tests.paths import CONF

FOLDER = Path(__file__).parent
NEMO, NXDT, LAUNCHER = (FOLDER / f"{name}.yaml" for name in ("nemo_7b", "nxdt_70b", "launcher_8b"))


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_USE_BF16", raising=False)


def convert_with(source: Path, overrides: str = "") -> Conversion:
    return convert(source, overrides.split())


def load_converted(result: Conversion, *overrides: str) -> Config:
    """Load the written config as train.py does."""
    Path("ours.yaml").write_text(as_yaml(result, "theirs.yaml"))
    return load_config(["experiment=ours.yaml", *overrides], CONF)


SOURCES = {
    "nemo_7b.yaml": (['model.tokenizer.model="/a b/t,k.model"'], 0),
    "nxdt_70b.yaml": ([], 0),
    "launcher_8b.yaml": ([], 0),
    "megatron_8b.sh": (["1=/ckpt", "2=/d", "RUN_SEED=5", "--log-interval=10"], 1),
    "megatron_2m.args": ([], 1),
    "titan_8b.toml": ([], 1),
    "titan_old.toml": (["training.global_batch_size=8"], 0),
}
"""{source: (overrides, status)}; status 1 for keys that are not supported."""


@pytest.mark.parametrize("source", SOURCES)
def test_listing_config_and_command(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every key is listed once, the printed commands load, and the written config has a plan."""
    shutil.copy(FOLDER / source, ".")
    overrides, status = SOURCES[source]
    assert main([source, "-o", "out/ours.yaml", *overrides]) == status
    printed = capsys.readouterr().out
    page = printed + "\n" + Path("out/ours.yaml").read_text()
    GoldenFiles.check(f"tools/import_config/{Path(source).stem}.txt", page)
    commands = re.findall(r"python train\.py ((?:.*\\\n)*.*)", printed)
    short, equivalent = (load_config(shlex.split(text.replace("\\\n", " ")), CONF) for text in commands)
    equivalent.model.name, equivalent.data.name = short.model.name, short.data.name  # labels
    assert short == equivalent
    assert "can't work" not in printed, "the written config has a plan on the devices of the source"


@pytest.mark.parametrize(("ratio", "warmup", "expected"), [(0.8, 6, (6, 4)), (0.5, 20, (10, 0)), (None, 200, (10, 0))])
def test_torchtitan_shortens_warmup_and_decay(ratio: float | None, warmup: int, expected: tuple[int, int]) -> None:
    """Together, warm-up and decay have at most the 10 steps of the run."""
    given = ["training.global_batch_size=8", f"training.warmup_steps={warmup}"]
    given += [] if ratio is None else [f"lr_scheduler.decay_ratio={ratio}"]
    settings = convert_source(FOLDER / "titan_old.toml", given, []).settings
    assert (settings["optim.warmup_steps"], settings["optim.constant_steps"]) == expected
    with pytest.raises(ConfigError) as missing:
        convert_source(FOLDER / "titan_old.toml", given[1:], [])
    assert [problem.field for problem in missing.value.problems] == ["training.global_batch_size"]


def test_bash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command has the words that bash would pass, without being run."""
    for name in ("N", "M", "GONE"):
        monkeypatch.delenv(name, raising=False)
    page = ""
    for script in GoldenFiles.commands("tools/import_config/bash.txt"):
        Path("a.sh").write_text(json.loads(script))
        page += f"$ {script}\n{json.dumps(read_script(Path('a.sh'), {}).words)}\n"
    GoldenFiles.check("tools/import_config/bash.txt", page)


@pytest.mark.parametrize(
    "script",
    [
        "A=xxxxxxxxxxxxxxxx\n" + "A=$A$A\n" * 60 + "run --seq-length $A",
        "A=(1)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60 + "run --seq-length 1",
        "A=${Z:-}\n" + "A=$A$A\n" * 60 + "run --seq-length $A",
        "A+=x\n" * 100_000 + "run --seq-length $A",
        "A=1;run --seq-length " + "$A" * 300_000,
        "cat <<EOF\n" + "x\n" * 400_000,
        "f() { f; f; }\nf\nrun --seq-length 1",
        "{ " * 5000 + "run --seq-length 1",
        "run --seq-length " + "${A:-" * 5000,
        "run --seq-length $((" + "(" * 5000,
        "run --seq-length $((9**9**9**9))\nexit",
        "if [[ " * 5000,
        '"$(' * 5000,
        "case x in " * 5000,
        'if unknown; then N=1; elif [ -z "$N" ]; then N=2; fi\n[ -n "$N" ] || N=3\nrun --seq-length $N',
        "",
    ],
)
def test_hostile_scripts_end_with_a_message(script: str) -> None:
    Path("a.sh").write_text(script)
    with contextlib.suppress(ScriptError):
        read_script(Path("a.sh"), {})


_FLAGS = "--num-layers 100000000000 --num-attention-heads 4 --seq-length 8 --hidden-size 64 --lr 1 --vocab-size 64 "
_FLAGS += "--micro-batch-size 1 --global-batch-size 8 --train-iters 1 "


@pytest.mark.parametrize(
    ("name", "text", "overrides"),
    [
        ("a.sh", _FLAGS + "--decoder-first-pipeline-num-layers 1 --pipeline-model-parallel-size 10000000000", []),
        ("a.sh", _FLAGS + "--num-layers-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 0", []),
        ("a.sh", _FLAGS + "--lr-decay-style linear cosine", []),
        ("a.sh", _FLAGS + "--lr-warmup-fraction 1e999", []),
        ("a.toml", "lr_scheduler.decay_type = ['linear']", []),
        ("a.toml", "optimizer.lr = 07:32:00\nparallelism.data_parallel_shard_degree = 1", []),
        ("a.toml", "model.converters = 3", []),
        ("a.toml", ".".join("a" * 49_000) + " = 1", []),
        ("a.toml", "", ["training.steps=["]),
    ],
)
def test_values_of_wrong_types_and_sizes(name: str, text: str, overrides: list[str]) -> None:
    Path(name).write_text(text)
    assert main([name, *overrides]) in (1, 2)


def test_flags_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags after pretrain_gpt.py are read as its command line; the last of repeated flags counts."""
    flags = (FOLDER / "megatron_2m.args").read_text().split("\n", 1)[1].split()
    assert main(["-o", "ours.yaml", "pretrain_gpt.py", *flags, "--num-layers", "2"]) == 1
    assert "--num-layers is given several times" in capsys.readouterr().out
    assert load_config(["experiment=ours.yaml"], CONF).model.num_hidden_layers == 2
    with pytest.raises(SystemExit):
        main([str(NEMO), "--num-layers", "2"])


def differences(base: Conversion, result: Conversion) -> Iterator[str]:
    """Yield the lines of settings, keys and assumptions that differ from the file without overrides."""
    for name in {**base.settings, **result.settings}:
        old, new = (format_value(each.settings.get(name, "missing")) for each in (base, result))
        if old != new:
            yield f"{name}: {old} → {new}"
    for item in result.conversions:
        if item not in base.conversions:
            yield f"{item.kind}: {item.key}={format_value(item.value)} {item.setting} {item.why}"
    for sign, one, other in (("-", base, result), ("+", result, base)):
        yield from (f"{sign} assumed: {text}" for text in one.assumed if text not in other.assumed)
    for name in ("schedule", "world_size"):
        if getattr(result, name) != getattr(base, name):
            yield f"{name}: {getattr(base, name)} → {getattr(result, name)}"


def test_overrides() -> None:
    bases = {p.stem: (p, convert_source(p, [], [])) for p in (NEMO, NXDT, LAUNCHER, FOLDER / "megatron_2m.args")}
    page = list[str]()
    for line in re.findall(r"^[^#\n].*", FOLDER.joinpath("overrides.txt").read_text(), re.MULTILINE):
        name, *overrides = line.split()
        source, base = bases[name]
        words = ([], overrides) if overrides[0].startswith("--") else (overrides, [])
        page += ["", line, *(f"    {text}" for text in differences(base, convert_source(source, *words)))]
    GoldenFiles.check("tools/import_config/overrides.txt", "\n".join(page[1:]))


def test_unsupported_keys_are_in_the_file() -> None:
    result = convert_with(NEMO, "model.activation=gelu")
    assert "NOT SUPPORTED model.activation=gelu" in as_yaml(result, "theirs.yaml")
    assert load_converted(result).model.hidden_size == 4096 and set(PRESETS) <= set(PRECISIONS)
    listing = format_listing(convert_source(FOLDER / "megatron_8b.sh", [], []), "theirs.sh")
    assert "refers to a variable that the script does not set" in listing and "another file" not in listing
    many = convert_source(FOLDER / "megatron_8b.sh", [], [f"--unknown-{number}" for number in range(1000)] * 2)
    for text in (as_yaml(many, "theirs.sh"), format_listing(many, "theirs.sh")):
        assert "981 more unknown keys" in text and len(text) < 20_000


def test_secrets_stay_unresolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    monkeypatch.setenv("SCRATCH", "/scratch")
    for name, shown in (("WANDB_API_KEY", "${oc.env:WANDB_API_KEY}"), ("SCRATCH", "/scratch/runs")):
        result = convert_with(NEMO, f"exp_manager.explicit_log_dir=${{oc.env:{name}}}/runs")
        written = format_listing(result, "theirs.yaml") + as_yaml(result, "theirs.yaml") + str(result)
        assert shown in written and "hunter2" not in written


def test_shape_of_a_hugging_face_config() -> None:
    shape = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "rope_theta": 500000.0,
    }  # fmt: skip
    Path("config.json").write_text(json.dumps(shape))
    named = "model_source=hf model.model_config=config.json model.num_layers=16 ~model.ffn_hidden_size "
    named += "~model.num_attention_heads ~model.num_kv_heads"
    result = convert_with(NXDT, named)
    (differs,) = result.unsupported
    assert differs.key == "model_source" and "o_proj and down_proj" in differs.why
    model = load_converted(result).model
    assert (model.vocab_size, model.intermediate_size, model.num_key_value_heads) == (128256, 28672, 8)
    assert (model.num_hidden_layers, model.rms_norm_eps) == (16, 1e-6), "the YAML has precedence"


def test_vocab_size_of_a_sentencepiece_model() -> None:
    train_tokenizer(Path("t.model"), 280)
    assert convert_with(NEMO, "model.tokenizer.model=t.model").settings["model.vocab_size"] == 280


SHAPELESS = "~model.num_layers ~model.hidden_size ~model.num_attention_heads ~model.ffn_hidden_size"
NO_MAPPING = ("a: [1", "- 1\n- 2", "3", "2026-01-01", "'3'", "!!set {a, b}", "", "model: llama", "a: 1\na: 2")
REFUSED: list[tuple[str, str | None]] = [
    *(("theirs.yaml =3", text) for text in NO_MAPPING),  # and the error of the override
    ("theirs.yaml", "model: {hidden_size: 64, activations_checkpoint_granularity: some}"),
    (f"theirs.yaml {SHAPELESS} model.restore_from_path='???'", None),
    ("theirs.yaml trainer.max_steps=-1", None),
    *((f"theirs.yaml ~{key}", None) for key in ("model.gone", "gone.key", "model.num_layers.x")),
    ("theirs.yaml model_source=hf model.model_config=/gone/config.json", None),
    *((f"theirs.yaml -o {name}", None) for name in ("theirs.yaml", "theirs.yaml/ours.yaml", "ours.txt")),
    *(("theirs.toml", text) for text in ("a = ", "a = 1", "model.name = 'deepseek_v3'")),
    *((f"gone.{end} -o x.yaml", None) for end in ("yaml", "sh")),
]
"""(command line, content of its file); None: NeMo's."""


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    page, theirs = "", NEMO.read_text()
    for line, content in REFUSED:
        name, *words = line.split()
        if not name.startswith("gone"):
            Path(name).write_text(theirs if content is None else content)
        before = {path.name: path.read_text() for path in Path().iterdir()}
        assert main([name, *words]) == 2, line
        page += f"$ {line}{'' if content is None else f' {content!r}'}\n{capsys.readouterr().err}\n"
        assert {path.name: path.read_text() for path in Path().iterdir()} == before, "nothing is written"
    GoldenFiles.check("tools/import_config/refused.txt", page, {r"while construct[^$]+column 1\n": "duplicate key\n"})


def test_experiments_by_name_and_by_path() -> None:
    shutil.copytree(CONF, "conf")
    Path("conf/experiment/seven.yaml").write_text(as_yaml(convert_with(NEMO), "theirs.yaml"))
    for override in ("experiment=seven", "+experiment=seven"):
        config = load_config([override, "trainer.steps=5000"], Path("conf").absolute())
        assert config == load_converted(convert_with(NEMO), "trainer.steps=5000")
        assert config.model.hidden_size == 4096 and config.trainer.steps == 5000
    Path("own.yaml").write_text("trainer:\n  stepz: 3\n")
    with pytest.raises(ConfigError, match=r"trainer\.stepz"):
        load_config(["experiment=own.yaml"], CONF)
    with pytest.raises(ConfigError, match=r"path\s+of\s+a\s+.yaml\s+file"):
        load_config(["experiment=gone.yaml"], CONF)
    other = load_converted(convert_with(NEMO), "optim=linear", "data=mock")
    assert other.optim.schedule["_target_"].endswith(".LinearDecay") and other.data.mock


def test_written_config_is_checked_on_the_devices_of_the_source() -> None:
    load_converted(convert_with(NEMO, "model.data.data_prefix='???'"))
    (problem,) = check(Path("ours.yaml"), 32)
    assert problem.field == "data.prefixes"
    assert check(Path("ours.yaml"), 20) == [problem], "20 devices are not a multiple of tp * pp"


def test_default_output(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(NEMO, "theirs.yaml")
    assert main(["theirs.yaml", "model.data.data_prefix='???'"]) == 0, "a missing dataset is a note"
    printed = capsys.readouterr().out
    assert "note: no dataset is given" in printed and "can't work" not in printed
    commands = re.findall(r"python train\.py ((?:.*\\\n)*.*)", printed)
    short, equivalent = (shlex.split(command.replace("\\\n", " ")) for command in commands)
    assert short == ["experiment=theirs_imported.yaml", "data=mock"]
    of_file, of_command = load_config(short, CONF).model, load_config(equivalent, CONF).model
    assert of_file == replace(of_command, name=of_file.name)
    long_key = "model.a_key_that_no_version_of_these_programs_has_and_that_is_long"
    assert main(["theirs.yaml", f"{long_key}={'x' * 30}", f"other.key={[*range(60)]}"]) == 1, (
        "overwrites its own output"
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 79 and len(line.rstrip(" \\").split()) > 1] == [], "except paths"


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


def test_original_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("conf").mkdir()
    shutil.copy(NEMO, "conf/theirs.yaml")
    monkeypatch.setenv("XLA_USE_BF16", "1")
    assert main([*THEIR_COMMAND.split(), "-o", "a b.yaml"]) == 0
    GoldenFiles.check("tools/import_config/their_command.txt", capsys.readouterr().out + Path("a b.yaml").read_text())
    monkeypatch.setenv("XLA_USE_BF16", "0")
    assert convert_with(NEMO, "model.wrap_with_zero=false").settings["trainer.precision"] == "fp32"
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2 and "give the file" in capsys.readouterr().err


def test_text_of_a_config_does_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the listing nor the written comments have the control characters of the source."""
    Path("theirs.yaml").write_text(NEMO.read_text() + '  unknown: "\\e[2J\\u202e"\n')
    main(["theirs.yaml", "-o", "ours.yaml"])
    written = capsys.readouterr().out + Path("ours.yaml").read_text()
    assert written.count("\\x1b[2J\\u202e") == 2 and not set("\x1b\u202e") & set(written)
