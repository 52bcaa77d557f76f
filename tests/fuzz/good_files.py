"""Good files of every kind that is read, and cases made of them: a few things wrong in each."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import struct
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import yaml
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors

from megatron_llama.arch.foreign_tensor_layouts import litgpt_names, megatron_names, torchtitan_names
from megatron_llama.arch.hf_tp_mapping import hf_shapes
from megatron_llama.checkpoint.manifest import NAME, State, merge
from megatron_llama.checkpoint.manifest import _checksum as checksum_of
from megatron_llama.checkpoint.rank_files import save_part
from megatron_llama.checkpoint.tensor_source import Rectangles
from megatron_llama.config import ModelConfig
from megatron_llama.config.hf_config import hf_config
from megatron_llama.config.hub import INDEX, SINGLE
from megatron_llama.config.settings_table import settings_by_name
from megatron_llama.corpus.indexed_format import HEADER, MAGIC
from megatron_llama.train.metrics_file import METRICS_FILE
from tests.fuzz.runner import ODD, Files, as_json, as_yaml, damaged, edited, json_files, named

MODEL = ModelConfig(
    "fuzzed", vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8,
)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
HF_CONFIG = hf_config(MODEL, "float32", {"bos_token_id": 1, "eos_token_id": 2})
TENSORS = {name: torch.full(shape, 0.5) for name, shape in hf_shapes(MODEL).items()}
WEIGHTS = save_safetensors(TENSORS, metadata={"format": "pt"})


# Models: config.json, weights, index, adapters, checkpoints.

HF_FILES: Files = {"config.json": as_json(HF_CONFIG), SINGLE: WEIGHTS}


def with_header(header: bytes) -> bytes:
    """A safetensors file with this header over the values of the good one."""
    (size,) = struct.unpack("<Q", WEIGHTS[:8])
    return struct.pack("<Q", len(header)) + header + WEIGHTS[8 + size :]


HEADER_JSON = json.loads(WEIGHTS[8 : 8 + struct.unpack("<Q", WEIGHTS[:8])[0]])
SIZES = [[0, 64], [64, 0], [1024], [16, 16], [0, 0], [2**40, 2**40], ["F32"], "BF16", "F64", "I64", "BOOL", "F8_E4M3"]
_HEADERS = damaged(edited(HEADER_JSON, SIZES).map(as_json)).map(with_header)
WEIGHT_CASES = named(SINGLE, st.one_of(_HEADERS, damaged(st.just(WEIGHTS))))
INDEX_JSON = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(TENSORS, "model-00001-of-00001.safetensors")}
INDEX_CASES = json_files(INDEX, INDEX_JSON, [SINGLE, "../" + SINGLE, "/etc/passwd", ["a"]]).map(
    lambda files: {**files, "model-00001-of-00001.safetensors": WEIGHTS}
)
ADAPTER = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0,
    "bias": "none", "modules_to_save": None, "base_model_name_or_path": "base", "task_type": "CAUSAL_LM",
    "use_rslora": False, "rank_pattern": {}, "init_lora_weights": True,
}  # fmt: skip


def checkpoint_files() -> dict[str, bytes]:
    """A whole checkpoint by one rank."""
    with tempfile.TemporaryDirectory() as folder:
        parts = {name: Rectangles(tuple(value.shape), [((0,) * value.ndim, value)]) for name, value in TENSORS.items()}
        save_part(parts, Path(folder), 0)
        model = {name: getattr(MODEL, name) for name in MODEL.__dataclass_fields__}
        settings = {"model": model, "data": {"seq_length": 8}, "finetune": {"method": "none"}}
        text = merge(Path(folder), State(3, 24, "adamw", 3, 1, settings, lr=0.1)).text
        return {NAME: text.encode(), "rank_00000.safetensors": (Path(folder) / "rank_00000.safetensors").read_bytes()}


CHECKPOINT = checkpoint_files()


def signed(body: Any) -> bytes:
    """A manifest with the right checksum, which anyone can compute."""
    if isinstance(body, dict):
        body = {**body, "checksum": checksum_of({key: item for key, item in body.items() if key != "checksum"})}
    return as_json(body)


CHECKPOINT_CASES = st.one_of(
    damaged(edited(json.loads(CHECKPOINT[NAME]), ["rank_00001.safetensors", "F16", [0, 0], [32]]).map(signed)),
    damaged(st.just(CHECKPOINT[NAME])),
).map(lambda content: {**CHECKPOINT, NAME: content})


# Datasets: .idx and .bin, their manifests, JSONL.

LENGTHS = [5, 0, 3, 8]


def indexed(lengths: list[int], pointers: list[int], documents: list[int], header: tuple[int, int, int, int]) -> bytes:
    """An .idx file."""
    whole = HEADER.pack(MAGIC, *(number % 2**bits for number, bits in zip(header, (64, 8, 64, 64), strict=True)))
    return whole + b"".join(
        struct.pack("<q", number % 2**64 - (2**64 if number % 2**64 >= 2**63 else 0))[:width]
        for numbers, width in ((lengths, 4), (pointers, 8), (documents, 8))
        for number in numbers
    )


BIN = np.arange(16, dtype="<u2").tobytes()
_NUMBERS = st.one_of(st.integers(-3, 40), st.sampled_from([2**31 - 1, -(2**31), 2**62, -(2**62), 2**63 - 1]))


def _with(numbers: list[int]) -> st.SearchStrategy[list[int]]:
    change = st.lists(st.tuples(st.integers(0, len(numbers) - 1), _NUMBERS), max_size=2)
    return change.map(lambda changes: [dict(changes).get(place, number) for place, number in enumerate(numbers)])


IDX_CASES = st.tuples(
    damaged(
        st.builds(
            indexed,
            _with([5, 3, 8]),
            _with([0, 10, 16]),
            _with([0, 1, 1, 2, 3]),
            st.one_of(
                st.just((1, 8, 3, 5)),
                st.tuples(st.sampled_from([0, 1, 2]), st.integers(0, 20), _NUMBERS, _NUMBERS),
                st.tuples(st.just(1), st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8]), st.just(3), st.just(5)),
            ),
        )
    ),
    damaged(st.just(BIN)),
).map(lambda files: {"set.idx": files[0], "set.bin": files[1]})
MANIFEST = {
    "documents_read": 4, "documents_written": 3, "documents_empty": 1, "documents_skipped": 0, "skipped": {},
    "tokens": 16, "text_bytes": 60, "json_key": "text", "dtype": "uint16", "tokenizer": "/nowhere/tokenizer.model",
    "tokenizer_sha256": "00" * 32, "vocab_size": 32, "eod": None, "encoder": "sentencepiece", "quarantine": None,
    "options": {"tokenizer_library": "sentencepiece", "chat_template": "own", "add_bos": True},
    "sha256": {".bin": "00", ".idx": "00"},
}  # fmt: skip
GOOD_IDX = indexed([5, 3, 8], [0, 10, 16], [0, 1, 1, 2, 3], (1, 8, 3, 5))
MANIFEST_CASES = json_files("set.json", MANIFEST).map(lambda files: {**files, "set.idx": GOOD_IDX, "set.bin": BIN})


def _tokenizer() -> bytes:
    from tests.data.files import train_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        return train_tokenizer(Path(folder) / "tokenizer.model").read_bytes()


TOKENIZER = _tokenizer()
RECORDS: list[Any] = [
    {"text": "walks and talks"},
    {"messages": [{"role": "user", "content": "walk?"}, {"role": "assistant", "content": "talk."}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"prompt": "a", "completion": "b", "history": [["a", "b"]]},
    {"instruction": "a", "input": "", "output": "b"},
    {"question": "a", "answer": "b #### 1"},
    {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}],
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]}],
    },
    {"tools": "[]", "conversations": [{"from": "function_call", "value": '{"name": "f"}'}, {"from": "observation"}]},
    {"conversations": [{"from": "system", "value": '<tools>[{"name": "f"}]</tools>'}, {"from": "gpt", "value": "b"}]},
    {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "c"},
    {"text": "", "meta": {"n": 1}},
]
LINE = damaged(st.sampled_from(RECORDS).flatmap(edited).map(as_json))
TEXT = st.lists(st.one_of(LINE, st.sampled_from([b"", b" ", b"\xef\xbb\xbf{}", b"[" * 10**5, b"1e999"])), max_size=5)
JSONL = TEXT.map(b"\n".join)
JSONL_CASES = st.one_of(
    named("a.jsonl", JSONL),
    st.lists(LINE, max_size=4).map(lambda lines: {"a.json": b"[" + b",\n".join(lines) + b"]"}),
    named("a.jsonl.gz", damaged(JSONL.map(lambda text: gzip.compress(text, 1)))),
    named("a.csv", damaged(JSONL)),
    st.sampled_from([b"PAR1", b"ARROW1\0\0", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"BZh91AY&SY"]).flatmap(
        lambda magic: st.binary(max_size=60).map(lambda rest: {"a.jsonl": magic + rest + magic})
    ),
)


# Checkpoints of other programs.


def _torch_file(content: Any) -> bytes:
    stored = io.BytesIO()
    torch.save(content, stored)
    return stored.getvalue()


def _dcp_files() -> dict[str, bytes]:
    """The files of a torch_dist folder with moments, except common.pt."""
    shapes = megatron_names(MODEL).shapes
    state = {name: torch.full(shape, 0.5) for name, shape in shapes.items()}
    state |= {f"optimizer.state.{kind}.{name}": state[name] for kind in ("exp_avg", "exp_avg_sq") for name in shapes}
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


DCP_FILES = _dcp_files()
MEGATRON_ARGUMENTS = {
    "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 1, "group_query_attention": True,
    "rotary_base": 10000, "norm_epsilon": 1e-6, "swiglu": True, "window_size": [7, 0], "vocab_size": 32, "lr": 0.1,
    "split": "9,1,0", "global_batch_size": 8, "train_iters": 9, "consumed_train_samples": 24, "adam_beta1": 0.9,
    "use_rope_scaling": False, "hidden_dropout": 0.0, "position_embedding_type": "rope", "clip_grad": 0.0,
}  # fmt: skip
COMMON = {
    "iteration": 3, "args": MEGATRON_ARGUMENTS, "sampler": {"consumed_samples": 24},
    "optimizer": {"param_groups": [{"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "step": 3}]},
}  # fmt: skip


def _common(content: Any) -> bytes:
    if isinstance(content, dict) and isinstance(content.get("args"), dict):
        content = {**content, "args": argparse.Namespace(**{str(k): v for k, v in content["args"].items()})}
    return _torch_file(content)


MEGATRON_COMMON = _common(COMMON)
TORCH_GROUP = {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "params": list(range(len(TENSORS)))}
TRAINER_OPTIMIZER = {
    "param_groups": [TORCH_GROUP],
    "state": {
        number: {"step": torch.tensor(3.0), "exp_avg": values, "exp_avg_sq": values}
        for number, values in enumerate(sorted(TENSORS.values(), key=lambda values: values.dim() != 2))
    },
}
RANK = {"iteration": 3, "args": MEGATRON_ARGUMENTS, "model": {"language_model": {"encoder": {"x": torch.zeros(4)}}}}
HOSTILE_PICKLES = [
    b"\x80\x02}(" + b")" + b"2\x86" * 60 + b"Nu.",
    b"\x80\x02Nr\xff\xff\xff\x3f0N.",
    b"\x80\x02" + b"]" * 100_000 + b".",
    b"\x80\x05\x96" + b"\xff" * 8,
    b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R.",
]
RUN_CONFIG = {"model": MEGATRON_ARGUMENTS, "train": {"train_iters": 9}, "dataset": {"random_seed": 5}}
DCP_CASES = st.one_of(
    named(".metadata", damaged(st.just(DCP_FILES[".metadata"]))),
    named(".metadata", st.sampled_from(HOSTILE_PICKLES)),
    named("common.pt", damaged(edited(COMMON).map(_common))),
    named("run_config.yaml", edited(RUN_CONFIG, ["silu", [7, 0]]).map(as_yaml)),
    named("__0_0.distcp", damaged(st.just(DCP_FILES["__0_0.distcp"]))),
)
TRAINER_CASES = st.one_of(
    named("optimizer.pt", damaged(edited(TRAINER_OPTIMIZER).map(_torch_file))),
    json_files("trainer_state.json", {"global_step": 3}),
    json_files("config.json", HF_CONFIG),
    named("scheduler.pt", damaged(edited({"last_epoch": 3, "_last_lr": [0.1]}).map(_torch_file))),
)
RANK_CASES = named("model_optim_rng.pt", damaged(edited(RANK).map(_common)))


def _files(name: str, good: Any, more: Files) -> st.SearchStrategy[Files]:
    """Cases of one file in a folder, whose other files are good."""
    write = {"json": as_json, "yaml": as_yaml}.get(name[-4:], _torch_file)
    return named(name, damaged(edited(good, [[0.5], [9, 0]]).map(write))).map(lambda files: {**more, **files})


META = {name: torch.full(shape, 0.5) for name, shape in torchtitan_names(MODEL).shapes.items()}
META_PARAMS = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "norm_eps": 1e-6, "use_scaled_rope": False}
LITGPT = {name: torch.full(shape, 0.5) for name, shape in litgpt_names(MODEL).shapes.items()}
LITGPT_CONFIG = {"n_layer": 1, "norm_eps": 1e-6, "rope_base": 10000, "rope_adjustments": {"factor": 8.0}, "bias": False}
_VECTOR = torch.cat([tensor.flatten() for tensor in TENSORS.values()])
ZERO_MODEL = {
    "param_shapes": [{name: list(tensor.shape) for name, tensor in TENSORS.items()}], "global_steps": 3,
    "ds_config": {"train_batch_size": 8, "gradient_clipping": 1.0}, "global_samples": 24, "skipped_steps": 1,
}  # fmt: skip
ZERO_STATE = {
    "partition_count": [1], "zero_stage": 2, "single_partition_of_fp32_groups": [_VECTOR], "base_optimizer_state":
    {"state": {0: {"exp_avg": _VECTOR.clone(), "exp_avg_sq": _VECTOR.clone()}}, "param_groups": [TORCH_GROUP]},
}  # fmt: skip
_ZERO_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
TORCH_FILE_CASES = st.one_of(
    _files("consolidated.00.pth", META, {"params.json": as_json(META_PARAMS)}),
    _files("params.json", META_PARAMS, {"consolidated.00.pth": _torch_file(META)}),
    _files("lit_model.pth", LITGPT, {}),
    _files("model_config.yaml", LITGPT_CONFIG, {"lit_model.pth": _torch_file(LITGPT)}),
    _files(_ZERO_FILES[0], ZERO_MODEL, {_ZERO_FILES[1]: _torch_file({"optimizer_state_dict": ZERO_STATE})}),
    _files(_ZERO_FILES[1], {"optimizer_state_dict": ZERO_STATE}, {_ZERO_FILES[0]: _torch_file(ZERO_MODEL)}),
)


# Recipes, and the command line.

RECIPE = {
    "defaults": [{"override /model": "llama_2m"}, {"override /optim": "cosine"}],
    "trainer": {"tp": 2, "pp": 1, "steps": 10, "micro_batch_size": 1, "global_batch_size": 4, "precision": "bf16"},
    "data": {"seq_length": 64, "split": "80,20,0", "prefixes": ["a"], "schedule": []},
    "model": {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "rope_scaling": {"factor": 2.0}},
    "optim": {
        "lr": 0.1, "betas": [0.9, 0.95],
        "schedule": {"_target_": "torch.optim.lr_scheduler.LinearLR", "total_iters": "${trainer.steps}"},
    },
    "run": {"dir": "runs/${model.name}"},
    "finetune": {"method": "none", "lora_target_modules": ["q_proj"]},
    "checkpoint": {"every_steps": 5, "keep": 2},
}  # fmt: skip
CHAIN = {"optim": {"schedule": {"a0": "x" * 9, **{f"a{n}": f"${{.a{n - 1}}}" * 2 for n in range(1, 64)}}}}
RECIPES: list[Any] = [
    "${trainer.steps}", "${optim.schedule}", "${run.dir}${run.dir}", "${oc.env:HOME}", "${oc.decode:[1}", "${", "???",
    "os.system", {"_target_": "os.system", "command": "true"}, [[1, 2], [3, 4]], "${oc.create:${trainer}}", CHAIN,
]  # fmt: skip
RECIPE_CASES = st.one_of(
    damaged(edited(RECIPE, RECIPES).map(as_yaml)),
    st.sampled_from([CHAIN, {"a": {"b": [0] * 60000}}]).map(as_yaml),
    st.binary(max_size=40),
).map(lambda text: {"recipe.yaml": b"# @package _global_\n" + text})
SETTINGS = sorted(name for name in settings_by_name() if name not in ("dry_run", "device.name", "data.prepare"))
VALUES = st.one_of(
    st.sampled_from(
        "1 0 -1 2 3 7 8 1e9 1e17 -1e17 999999999999999999 1000000 1000000000 1000000000000 inf nan null true x '' "
        "[] {} [1] [1,2] [[1,2]] [[1000000000,16]] {a:1} '1' ${trainer.steps} ${run.dir} 0.5 1e-300 1e300 [nan] "
        "[0.5,a] cuda 3,4 ??? [[1,2],[3,1000000000000]]".split()
    ),
    st.integers(-3, 130).map(str),
    st.integers(0, 10**18).map(str),
    st.text(max_size=6),
)
OVERRIDE = st.builds("{}={}".format, st.sampled_from(SETTINGS), VALUES)
COMMAND_CASES = st.lists(st.one_of(OVERRIDE, OVERRIDE, OVERRIDE, st.text(max_size=12)), min_size=1, max_size=4).map(
    lambda overrides: {"overrides.json": as_json(overrides)}
)


_SOURCES = Path(__file__).parents[1] / "tools/import_config"
NEMO = yaml.safe_load((_SOURCES / "nemo_7b.yaml").read_text(encoding="utf-8"))
NEMO_CASES = named("nemo.yaml", damaged(edited(NEMO, RECIPES).map(as_yaml)))
TITAN = tomllib.loads((_SOURCES / "titan_8b.toml").read_text(encoding="utf-8"))
del TITAN["quantize"]  # a section inside of a section, which _toml does not write
SCRIPT = {
    "nproc-per-node": 8, "nnodes": 2, "pretrain_gpt.py": "", "num-layers": 4, "hidden-size": 64, "lr": 0.1,
    "num-attention-heads": 4, "seq-length": 64, "micro-batch-size": 1, "global-batch-size": 8, "train-samples": 800,
    "swiglu": "", "lr-decay-style": "WSD", "lr-warmup-fraction": 0.1, "window-size": "(7,0)", "data-path": [1.0, "a"],
    "pipeline-model-parallel-size": 2, "num-layers-per-virtual-pipeline-stage": 1, "save": "${A:-${B[@]}}",
    "decoder-first-pipeline-num-layers": 1, "eval-interval": 5, "split": "$((8 * 12)),2,2", "vocab-size": 64,
}  # fmt: skip


def _toml(config: Any) -> bytes:
    sections = config.items() if isinstance(config, dict) else [("a", config)]
    parts = [(name, body.items() if isinstance(body, dict) else [("x", body)]) for name, body in sections]
    rows = ([f"[{json.dumps(name)}]", *(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in body)] for name, body in parts)
    text = "\n".join(line for row in rows for line in row)
    return text.replace("Infinity", "inf").replace("NaN", "nan").encode("utf-8", "replace")


def _script(flags: Any) -> bytes:
    listed = flags.items() if isinstance(flags, dict) else [("lr", flags)]
    words = [
        f"{name if '.py' in name else f'--{name}'} {value}".translate({91: None, 93: None}) for name, value in listed
    ]
    return " ".join(["torchrun", *words]).encode("utf-8", "replace")


SOURCE_CASES = st.one_of(
    named("a.toml", damaged(edited(TITAN).map(_toml))),
    named("a.sh", damaged(edited(SCRIPT, ["$((", "$1", "\x1b[2J", "'", "1e999", [2, "b"]]).map(_script))),
)


# Tokenizers and chat templates.

_PIECES = [
    *(Path(__file__).parent / "chat_templates.txt").read_text(encoding="utf-8").splitlines(),
    "{{ " + "(" * 500 + ")" * 500 + " }}",
    "{{ " + "-" * 5000 + "1 }}",
    "{% if true %}" * 200 + "{% endif %}" * 200,
]
"""Good parts of templates, and hostile ones."""
TEMPLATE_CASES = st.one_of(
    st.lists(st.one_of(st.sampled_from(_PIECES), st.text(max_size=5)), max_size=6).map("".join),
    st.sampled_from(_PIECES),
).map(lambda source: {"chat_template.jinja": source.encode("utf-8", "replace")})


TOKENIZER_SETTINGS = {
    "eos_token": {"content": "</s>"}, "bos_token": "<s>", "add_bos_token": True,
    "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
}  # fmt: skip
TOKENIZER_JSON = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
    "added_tokens": [{"id": 2, "content": "</s>", "special": True, "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False}],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": {"a": 0, "b": 1, "</s>": 2, "ab": 3, "x": 4},
              "merges": [["a", "b"]]},
}  # fmt: skip
TOKENIZER_CASES = st.one_of(
    named("tokenizer.model", damaged(st.just(TOKENIZER))),
    st.tuples(
        json_files("tokenizer.json", TOKENIZER_JSON), json_files("tokenizer_config.json", TOKENIZER_SETTINGS)
    ).map(lambda files: {**files[0], **files[1]}),
    json_files("tokenizer_config.json", TOKENIZER_SETTINGS).map(lambda files: {**files, "tokenizer.model": TOKENIZER}),
)


# Logs.

STEP = {"step": 1, "consumed_samples": 8, "reduced_train_loss": 2.5, "lr": 0.1, "throughput": 3.0}
LOG_LINES = st.lists(
    st.one_of(edited(STEP).map(as_json), ODD.map(as_json), damaged(st.just(as_json(STEP)))), max_size=5
)
METRICS_CASES = LOG_LINES.map(lambda lines: {METRICS_FILE: b"".join(line + b"\n" for line in lines)})


def _events() -> bytes:
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder:
        writer = SummaryWriter(folder)
        for step in range(3):
            writer.add_scalar("reduced_train_loss", 3.0 - step, step)
            writer.add_scalar("lr", 0.1, step, new_style=True)
        writer.close()
        return next(Path(folder).iterdir()).read_bytes()


EVENTS = _events()


def _framed(records: list[bytes]) -> bytes:
    """TFRecord frames, checksums right."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    out = b""
    for record in records:
        size = struct.pack("<Q", len(record))
        crc = [struct.pack("<I", masked_crc32c(part)) for part in (size, record)]
        out += size + crc[0] + record + crc[1]
    return out


def _records(events: bytes) -> list[bytes]:
    records, at = [], 0
    while at < len(events):
        (size,) = struct.unpack("<Q", events[at : at + 8])
        records.append(events[at + 12 : at + 12 + size])
        at += 16 + size
    return records


_RECORDS = st.lists(st.one_of(damaged(st.sampled_from(_records(EVENTS))), st.binary(max_size=20)), max_size=6)
EVENT_CASES = named("events.out.tfevents.1.host.1.0", st.one_of(damaged(st.just(EVENTS)), _RECORDS.map(_framed)))
TRAINER_STATE = {"log_history": [{"step": 1, "loss": 2.5, "learning_rate": 0.1}, {"step": 2, "eval_loss": 2.0}]}
