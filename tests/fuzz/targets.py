"""Fuzz targets: code that reads untrusted files. ``runner.py`` defines findings, ``good_files.py`` the cases."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_safetensors

from data_prep.lib.block_encoders import BlockEncoder, ExampleEncoder, TextEncoder
from data_prep.lib.blocks import START, cut_blocks
from data_prep.lib.find_inputs import find_sources
from data_prep.lib.input_readers import with_array
from data_prep.lib.run_options import ChatFormat, PrepareJob
from data_prep.lib.tokenizer_backends import load_encoder
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.foreign.describe import describe
from megatron_llama.checkpoint.foreign.detect import open_foreign
from megatron_llama.checkpoint.hf_folder import open_hf_folder
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.checkpoint.tensor_source import CorruptFile
from megatron_llama.config import ConfigError, load_config
from megatron_llama.config.hf_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megatron_llama.config.hub import INDEX
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.data.checks import check_data
from megatron_llama.data.epoch_index import make_epoch
from megatron_llama.launch.world import find_world
from megatron_llama.plan import format_plan
from megatron_llama.text import sandbox
from megatron_llama.text.chat_template import NAMED_TEMPLATES, Jinja, load_own_template
from megatron_llama.text.conversation import NO_CONTEXT, TemplateContext, Turn, parse_calls, parse_tools
from megatron_llama.text.tokenizer import open_tokenizer, vocabulary_size
from megatron_llama.tools.compare.logs import read_log
from megatron_llama.tools.import_config.cli import as_yaml, command_line, convert_source, format_listing
from megatron_llama.tools.import_config.nemo import convert
from megatron_llama.tools.inference.saved_model import open_saved_model
from megatron_llama.train.metrics_file import METRICS_FILE, MetricsFile, read_metrics, read_run_records
from tests.fuzz import good_files as good
from tests.fuzz.runner import Target, json_files
from tests.paths import CONF

MOCK = ("data=mock", "device=cpu", "dry_run=true")


def plan_of(*overrides: str) -> None:
    """Build and format a plan as ``train.py --dry-run`` does."""
    try:
        config = load_config([*MOCK, *overrides], CONF)
    except ConfigError as error:
        if error.config is not None:
            find_world(error.config, None).plan(known=error.problems)
        raise
    format_plan(find_world(config, None).plan())


def read_nemo(case: Path) -> None:
    convert(case / "nemo.yaml")


def read_source(case: Path) -> None:
    """Convert a script of Megatron-LM or a TOML of torchtitan, and format the result."""
    (source,) = case.iterdir()
    converted = convert_source(source, [], [])
    command_line(converted)
    as_yaml(converted, source.name).encode()
    format_listing(converted, "a").encode()


def read_config_json(case: Path) -> None:
    plan_of("model=from_hf", f"init_from={case}")


def read_weights(case: Path) -> None:
    for name, content in good.HF_FILES.items():
        if not (case / name).exists() and not (case / INDEX).exists():
            (case / name).write_bytes(content)
    store_pipe = open_hf_folder(case, good.MODEL)
    for name in store_pipe.tensors:
        store_pipe.rows(name)


def read_adapter(case: Path) -> None:
    (case / ADAPTER_WEIGHTS).write_bytes(save_safetensors({"x": torch.zeros(1)}))
    plan_of("model=llama_2m", "finetune=lora", f"finetune.adapter={case}", f"init_from={case}")


def read_checkpoint(case: Path) -> None:
    read_manifest(find_checkpoint(case)).check_sizes()
    saved = open_saved_model(case)
    for name in saved.stored.tensors:
        saved.stored.rows(name)


def read_foreign(case: Path) -> None:
    """Describe a checkpoint of another program, open it, and read its tensors."""
    with suppress(ConfigError, CorruptFile):
        describe(case)
    tensors = open_foreign(case, good.MODEL, resumes=True).tensors
    for name in tensors.tensors:
        tensors.rows(name)


def read_megatron(case: Path) -> None:
    for name, content in {**good.DCP_FILES, "common.pt": good.MEGATRON_COMMON}.items():
        if not (case / name).exists():
            (case / name).write_bytes(content)
    read_foreign(case)


def read_trainer(case: Path) -> None:
    for name, content in {**good.HF_FILES, "trainer_state.json": b'{"global_step": 3}'}.items():
        if not (case / name).exists():
            (case / name).write_bytes(content)
    read_foreign(case)


def read_rank(case: Path) -> None:
    (case / "mp_rank_00").mkdir()
    (case / "model_optim_rng.pt").rename(case / "mp_rank_00" / "model_optim_rng.pt")
    read_foreign(case)


def read_dataset(case: Path) -> None:
    """Read a dataset as training, planning and inspect.py do."""
    from data_prep.inspect import counts, decoded, histogram
    from data_prep.lib import output_files

    prefix = str(case / "set")
    config = load_config(
        ["data.mock=false", f"data.prefixes=[{prefix}]", "data.tokenizer=null", "model.vocab_size=32", "device=cpu",
         "data.seq_length=4", "trainer.epochs=1", "trainer.global_batch_size=1", "data.prepare=null"], CONF,
    )  # fmt: skip
    problems = check_data(config)
    if not problems:
        find_world(config, None).plan()
        index = IndexedDataset(prefix).index
        make_epoch(np.asarray(index.lengths), 0, len(index), 4, 1, 0)
    dataset = IndexedDataset(prefix)
    manifest = output_files.read_manifest(prefix)
    for line in [*counts(dataset, manifest), *histogram(dataset)]:
        line.encode()
    if not list(output_files.find_problems(dataset, manifest, check_hashes=True)):
        for number in range(len(dataset)):
            list(decoded(dataset, manifest, number, None, 100))


CALLS = "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
SOURCE = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }}" + CALLS + "\n{% endfor %}"
TOOL_TEMPLATE = Jinja(SOURCE, {}, ["\n"], "test")


def read_jsonl(case: Path) -> None:
    """Read raw data as preprocess.py and sft.py do, without worker processes."""
    (case / "tokenizer.model").write_bytes(good.TOKENIZER)
    encoder = load_encoder("sentencepiece", str(case / "tokenizer.model"), "sentencepiece")
    sources = [with_array(source) for source in find_sources([str(case / "a.*")], arrays=True).sources]
    text = PrepareJob(sources, ["text"], 1 << 16)
    tokenizer = open_tokenizer(case / "tokenizer.model")
    workers: list[BlockEncoder[Any]] = [TextEncoder(text, encoder)]
    for render in (NAMED_TEMPLATES["plain"].render_spans, TOOL_TEMPLATE.render_spans):
        chat = ChatFormat(tokenizer, render, "auto", None, {}, 64, True, False, False, False, {})
        workers.append(ExampleEncoder(PrepareJob(sources, ["input", "mask"], 1 << 16, chat=chat), encoder, chat))
    for worker in workers:
        for block in cut_blocks(sources, START, 1 << 16, 1 << 16):
            result = worker.run(block)
            assert result.documents_read == len(result.bad) + len(result.lengths[0]) // 4, "a record vanished"


def read_recipe(case: Path) -> None:
    plan_of(f"experiment={case}/recipe.yaml")


def read_command_line(case: Path) -> None:
    plan_of(*json.loads((case / "overrides.json").read_bytes()))


TOOLS = parse_tools([{"name": "f", "parameters": {"properties": {"x": {}}}}])
CALL = Turn("assistant", "", extra={"tool_calls": parse_calls({"name": "f", "arguments": {"x": 1}})})
TURNS = [Turn("system", "s"), Turn("user", "question"), Turn("assistant", "answer"), Turn("user", "and?")]


def read_template(case: Path) -> None:
    sandbox.MOST_SECONDS = 0.3  # endless loops are frequent
    template = load_own_template(case, ["</s>"])
    assert isinstance(template, Jinja)
    for turns, context in ((TURNS, NO_CONTEXT), ([*TURNS, CALL], TemplateContext(TOOLS, {"enable_thinking": False}))):
        template.render_spans(turns, context)
        template.ask(turns, context)


def read_tokenizer(case: Path) -> None:
    vocabulary_size(case)
    tokenizer = open_tokenizer(case)
    tokenizer.encode("ab x </s>")
    tokenizer.spans("ab x </s>", True)
    tokenizer.control("</s>")
    load_own_template(case, tokenizer.control_tokens).ask(TURNS)


def read_metrics_file(case: Path) -> None:
    """Read metrics as a resumed run and compare.py do; no line may be lost."""
    path = case / METRICS_FILE
    before = path.read_bytes()
    MetricsFile(path, 10).close()
    after = read_metrics(path)
    backups = [other.read_bytes() for other in case.iterdir() if other != path]
    assert backups in ([], [before]) and all(record["step"] <= 10 for record in after)
    whole = [line for line in before.splitlines() if line.startswith(b'{"step": 1,') and line.endswith(b"}")]
    assert backups or len(after) >= len([line for line in whole[:-1] if json.loads(line)]), "a line vanished"
    read_run_records(path)
    read_log(case)


TARGETS = (
    Target("config.json", json_files("config.json", good.HF_CONFIG, [good.LLAMA3]), read_config_json),
    Target("safetensors", good.WEIGHT_CASES, read_weights),
    Target("safetensors index", good.INDEX_CASES, read_weights),
    Target("adapter_config.json", json_files(ADAPTER_CONFIG, good.ADAPTER, [["q_proj"], "all-linear"]), read_adapter),
    Target("torch_dist", good.DCP_CASES, read_megatron),
    Target("Trainer's checkpoint", good.TRAINER_CASES, read_trainer),
    Target("file of a Megatron rank", good.RANK_CASES, read_rank),
    Target("files of Meta, litgpt and DeepSpeed", good.TORCH_FILE_CASES, read_foreign),
    Target("checkpoint.json", good.CHECKPOINT_CASES, read_checkpoint),
    Target("idx", good.IDX_CASES, read_dataset),
    Target("dataset manifest", good.MANIFEST_CASES, read_dataset),
    Target("jsonl", good.JSONL_CASES, read_jsonl),
    Target("recipe", good.RECIPE_CASES, read_recipe),
    Target("command line", good.COMMAND_CASES, read_command_line),
    Target("NeMo config", good.NEMO_CASES, read_nemo),
    Target("Megatron script or TOML", good.SOURCE_CASES, read_source),
    Target("chat template", good.TEMPLATE_CASES, read_template),
    Target("tokenizer", good.TOKENIZER_CASES, read_tokenizer),
    Target("metrics.jsonl", good.METRICS_CASES, read_metrics_file),
    Target("trainer_state.json", json_files("trainer_state.json", good.TRAINER_STATE), read_log),
    Target("TensorBoard", good.EVENT_CASES, read_log),
)
