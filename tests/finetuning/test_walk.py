"""Fine-tuning by the commands of docs/guides/data, from a base model to a repository that transformers opens."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.train.metrics_file import read_metrics
from tests.data_prep.helpers import QWEN25, SPECIAL, folder  # noqa: F401  a fixture
from tests.hub_server import hub_server
from tests.paths import ROOT
from tests.processes import run_command
from tests.tools.inference.models import make_folder

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "sky", "description": "Weather", "parameters": PARAMETERS}}]
# The questions differ by more than the city, so that a small model learns all answers.
TALKS = [("How is Rome?", "Rome", "sun"), ("Is it cold in Oslo?", "Oslo", "snow"), ("Bonn please", "Bonn", "rain")]
NEW = ["<tool_call>", "</tool_call>", "<|call|>"]
TEMPLATE = QWEN25.replace("'\\n<tool_call>", "'\\n<|call|><tool_call>")
SIZES = "device=cpu data.seq_length=400 trainer.global_batch_size=2 trainer.micro_batch_size=2"


def talk(question: str, city: str, sky: str) -> dict[str, Any]:
    """Return a conversation in which the assistant calls the tool and reports its result."""
    call = {"type": "function", "function": {"name": "sky", "arguments": json.dumps({"city": city})}}
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": sky},
        {"role": "assistant", "content": f"{city} has {sky}."},
    ]
    return {"tools": TOOLS, "messages": turns}


def write_files(work: Path, tokenizer: Path) -> None:
    """Write a base model without the new tokens, conversations, pairs of answers, and the tools."""
    base, rows = work / "models/base", len(json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"])
    make_folder(base, vocab_size=rows, hidden_size=64, num_hidden_layers=2, max_position_embeddings=512)
    shutil.copy(tokenizer / "tokenizer.json", base)
    (base / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}))
    (base / "chat_template.jinja").write_text(TEMPLATE)
    pairs = [{"prompt": f"Like {sky}?", "chosen": "Yes.", "rejected": f"No, no {sky}."} for *_, sky in TALKS]
    for name, records in (("chat", [talk(*row) for row in TALKS]), ("pairs", pairs)):
        (work / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (work / "tools.json").write_text(json.dumps(TOOLS))


@pytest.mark.slow
def test_from_a_base_model_to_the_hub(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    def run(line: str, typed: str = "", **variables: str) -> str:
        _, program, *words = shlex.split(line)
        homes = {"HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = run_command(sys.executable, ROOT / program, *words, cwd=tmp_path, typed=typed, **homes, **variables)
        assert done.returncode == 0 and "Traceback" not in done.stderr, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    write_files(tmp_path, folder)
    run(
        "python train.py model=from_hf init_from=models/base data=chat 'data.prefixes=[chat.jsonl]' finetune=lora "
        """'data.add_tokens=["<tool_call>","</tool_call>"]' 'data.add_special_tokens=["<|call|>"]' """
        "'finetune.modules_to_save=[embed_tokens,lm_head]' trainer.tp=2 trainer.epochs=60 optim.lr=0.01 "
        f"run.dir=runs/lora {SIZES}"
    )
    answers = run(
        "python scripts/generate.py runs/lora --chat --tools tools.json --greedy --device cpu",
        "Is it cold in Oslo?\n/tool snow\n/reset\nBonn please\n",
    )
    assert '[call sky {"city": "Oslo"}]\nOslo has snow.\n' in answers and '[call sky {"city": "Bonn"}]\n' in answers
    run("python scripts/export_hf.py runs/lora models/chat --merge")
    run(
        "python train.py data=chat 'data.prefixes=[pairs.jsonl]' model=from_hf init_from=models/chat finetune=full "
        f"finetune.objective=dpo run.dir=runs/dpo trainer.epochs=16 optim.lr=0.0001 {SIZES}"
    )
    margins = [record["rewards/margins"] for record in read_metrics(tmp_path / "runs/dpo/metrics.jsonl")]
    assert len(margins) == 8 and abs(margins[0]) < 0.01 and min(margins[4:]) > 0.2, margins
    with hub_server() as hub:
        hub.token = "t"
        online = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "t", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        run("python scripts/export_hf.py runs/dpo models/dpo --push-to-hub org/name", **online)
    assert hub.private and hub.commits == ["Upload org/name"]
    (uploaded := tmp_path / "uploaded").mkdir()
    for name, content in hub.files["models/org/name"].items():
        (uploaded / name).write_bytes(content)
    assert (uploaded / "README.md").exists() and (uploaded / "chat_template.jinja").read_text() == TEMPLATE
    compare_with_transformers(uploaded, run)


def compare_with_transformers(uploaded: Path, run: Callable[[str], str]) -> None:
    """Compare new tokens, template and the greedy answer of the uploaded files with generate.py's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(uploaded), AutoTokenizer.from_pretrained(uploaded)
    rows, ids = len(model.get_input_embeddings().weight), tokenizer.convert_tokens_to_ids(NEW)
    assert ids == [rows - 3, rows - 2, rows - 1] == [len(tokenizer) - 3, len(tokenizer) - 2, len(tokenizer) - 1]
    turns, options = [{"role": "user", "content": TALKS[0][0]}], {"tools": TOOLS, "add_generation_prompt": True}
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, **options)
    assert json.dumps(TOOLS[0]) in prompt
    inputs = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True, **options)
    answer = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert answer[:2].tolist() == [ids[2], ids[0]]
    printed = run(f"python scripts/generate.py models/dpo --greedy --device cpu --prompt {shlex.quote(prompt)}")
    assert printed == f"{prompt}{tokenizer.decode(answer, skip_special_tokens=True)}\n"
