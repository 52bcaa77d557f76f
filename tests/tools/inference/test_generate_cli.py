"""scripts/generate.py as a user starts it, in a process forked from this one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models.auto.tokenization_auto  # noqa: F401  imported before the fork
from safetensors.torch import load_file, save_file

import megatron_llama.tools.inference.chat  # noqa: F401  the same
from megatron_llama.checkpoint.export import export, model_of
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.lora_adapter import open_base
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.config import ConfigError
from megatron_llama.tools.inference.arguments import inference_plan
from megatron_llama.tools.inference.generator import Generator
from megatron_llama.tools.inference.saved_model import open_saved_model
from tests.checkpoint.runner import Job, run_job
from tests.messages import unwrap
from tests.oracle import distance
from tests.ranks import run_ranks
from tests.tools.inference.models import (
    CPU,
    NOTHING,
    PROMPTS,
    check_refusals,
    command,
    evaluate,
    generate,
    in_generator,
    make_folder,
    with_generator,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "hf", tie_word_embeddings=True)


def test_prompts(folder: Path) -> None:
    arguments = [folder, *CPU, "--prompt", "the cat", "a dog and a", "--max-new-tokens", 12, "--greedy"]
    one = command(generate, *arguments)
    assert one.status == 0, one.err
    assert one.out.startswith("the cat") and "\n\na dog and a" in one.out
    assert "tokens/s" in one.err
    two = command(generate, *arguments, "--tp", 2)
    assert (two.status, two.out) == (0, one.out), two.err
    first, _, second = one.out.removeprefix("the cat").removesuffix("\n").partition("\n\na dog and a")
    stop = [first[5:7], second[-4:-1]]
    stopped = command(generate, *arguments, "--tp", 2, "--stop", *stop)
    cut = [answer[: min(at for text in stop if (at := answer.find(text)) >= 0)] for answer in (first, second)]
    assert (stopped.status, stopped.out) == (0, f"the cat{cut[0]}\n\na dog and a{cut[1]}\n"), stopped.err


def test_defaults_of_the_folder(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "hf")
    arguments = [tmp_path / "hf", *CPU, "--prompt", "the cat", "--max-new-tokens", 20]
    greedy = command(generate, *arguments, "--greedy").out
    content = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.5, "num_beams": 4}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(content))
    done = command(generate, *arguments)
    assert "generation_config.json: repetition-penalty 1.5, greedy; not supported: num_beams\n" in done.err, done.err
    assert done.out == command(generate, *arguments, "--greedy", "--repetition-penalty", 1.5).out != greedy
    assert command(generate, *arguments, "--greedy", "--repetition-penalty", 1).out == greedy
    for content, status, message in (
        ('{"top_p": 7}', 2, "top_p must be"),
        ("{", 1, "generation_config.json: not JSON"),
    ):
        (tmp_path / "hf" / "generation_config.json").write_text(content)
        done = command(generate, *arguments)
        assert done.status == status and message in done.err, done.err


def test_infinite_weights_end_with_their_name(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "hf")
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = torch.inf
    save_file(tensors, file, {"format": "pt"})
    done = command(generate, tmp_path / "hf", *CPU, "--prompt", "the cat")
    assert done.status == 1 and "model.norm.weight has inf at [3]" in unwrap(done.err), done.err
    assert "Traceback" not in done.err


def test_chat(folder: Path) -> None:
    arguments = [folder, *CPU, "--chat", "--system", "answer", "--max-new-tokens", 8, "--greedy"]
    done = command(generate, *arguments, stdin="Hello cat\nHello cat\n\n/reset\nHello cat\n")
    assert done.status == 0, done.err
    single = command(generate, *arguments, stdin="Hello cat").out
    # After a reset the same question has the same answer; as a second question it has another.
    assert len(single) > 4 and done.out.startswith(single) and done.out.endswith(single)
    middle = done.out[len(single) : -len(single)]
    assert middle and middle != single
    assert "[new conversation]" in done.err
    assert command(generate, *arguments, "--tp", 2, stdin="Hello cat").out == single


def test_a_conversation_that_is_full(folder: Path) -> None:
    arguments = [folder, *CPU, "--chat", "--max-new-tokens", 4]
    done = command(generate, *arguments, stdin="cat " * 200 + "\nHello\n")
    assert done.status == 0 and "the model 128 positions; type /reset" in done.err
    assert done.out  # the message that did not fit was dropped


def test_a_checkpoint_of_any_layout_is_read_as_it_is(folder: Path, tmp_path: Path) -> None:
    # A separate job: forked processes would lack torch's threads once they are used here.
    shape = ["model.vocab_size=290", "model.num_hidden_layers=3", "model.tie_word_embeddings=true"]
    layout = ["trainer.steps=0", "trainer.tp=2", "trainer.pp=2"]
    run_job(tmp_path / "run", "model=from_hf", f"init_from={folder}", *shape, *layout)
    arguments = [*CPU, "--prompt", "the cat sat", "--greedy", "--max-new-tokens", 16]
    theirs = command(generate, folder, *arguments)
    assert theirs.status == 0
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_00000000"):
        ours = command(generate, path, *arguments)
        assert (ours.status, ours.out) == (0, theirs.out), ours.err
    weights = next((tmp_path / "run" / "checkpoints" / "step_00000000").glob("rank_00001.*"))
    content = bytearray(weights.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1  # the first value
    weights.write_bytes(content)
    broken = command(generate, tmp_path / "run", *arguments)
    assert broken.status == 1 and "wrong hash of" in broken.err


REFUSALS = [
    f"hf --tp 3 --chat --prompt x --temperature 1e-310 --top-p 1.5 --max-new-tokens 0 --seed {2**64}",
    "nothing --greedy --seed 4 --system x",
    ". --prompt x",
    f"hf --prompt '{'cat ' * 300}' ''",
    "hf --prompt the --top-k -1 --min-p 1.5 --repetition-penalty 0 --stop ''",
    "hf --prompt the caf\udce9",  # the argument's byte is 0xe9
    "bare --chat",
    """hf --chat --chat-template-kwargs '{"tools": []}' --tools none.json""",
    "hf --chat --chat-template bad.jinja",
]


def test_refusals(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(folder.with_name("bare"), template=False)
    folder.with_name("none.json").write_text("[]")
    folder.with_name("bad.jinja").write_text("\n{{ messages }")
    check_refusals("generate", generate, REFUSALS, folder.parent, monkeypatch, capsys)


def test_a_message_that_is_not_utf8_is_refused_and_the_chat_goes_on(folder: Path) -> None:
    arguments = [folder, *CPU, "--chat", "--max-new-tokens", 8, "--greedy"]
    done = command(generate, *arguments, stdin="caf\udce9\nHello cat\n")
    assert done.status == 0 and "[the message is not UTF-8: byte 0xe9 after 'caf']" in done.err
    assert done.out == command(generate, *arguments, stdin="Hello cat\n").out


def test_a_reader_that_has_gone_is_silent(folder: Path) -> None:
    assert command(generate, folder, *CPU, "--prompt", "the cat", "--max-new-tokens", 8, reader=False) == (141, "", "")


# LoRA checkpoints generate like their merged export, in any layout, and only with their base.
TARGETS = "finetune.lora_target_modules=[q_proj,v_proj,o_proj,up_proj,down_proj]"  # parts of stacked matrices too
LORA = ("finetune=lora", "finetune.lora_rank=3", "finetune.lora_alpha=7", TARGETS)
ARGUMENTS = (*CPU, "--prompt", "the cat sat", "a", "--greedy", "--max-new-tokens", 16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``, a LoRA ``run`` on it (tp 2) that trained norms and head whole, its ``merged`` model, fp32, and
    its ``adapter``."""
    folder = tmp_path_factory.mktemp("lora")
    base = make_folder(folder / "base")
    job = Job(
        folder / "run", "model=from_hf", f"init_from={base}", "model.vocab_size=290", "model.num_hidden_layers=3",
        "model.tie_word_embeddings=false", *LORA, "finetune.modules_to_save=[norm,lm_head]", "trainer.tp=2",
        "trainer.steps=2", "optim=constant", "optim.lr=0.05", "optim.warmup_steps=0",
    )  # fmt: skip
    assert job.wait() == 0, job.output
    checkpoint = find_checkpoint(folder / "run")
    export(checkpoint, folder / "merged", "float32", merge=True)
    export(checkpoint, folder / "adapter")
    return folder


def logits(made: Generator) -> torch.Tensor:
    tokens = torch.tensor(PROMPTS[0])[None]
    zero = torch.zeros(1, dtype=torch.int64)
    return made.logits(tokens, made.cache(1, 16).at(zero, tokens.shape[1]))


def test_logits_are_those_of_the_merged_export(folders: Path) -> None:
    (expected,), (base,) = (with_generator(logits, folders / name) for name in ("merged", "base"))
    assert distance(base, expected) > 0.1, "else there would be nothing to see"
    for name, tp in (("run", 1), ("run", 2), ("adapter", 2)):
        for model in with_generator(logits, folders / name, tp):
            assert distance(model, expected) <= 1e-5


def test_bf16_weights_are_rounded_once(folders: Path) -> None:
    source = open_saved_model(folders / "run")
    plan = inference_plan(source.model, 1, "cpu", "bfloat16")
    (ours,) = run_ranks(in_generator, 1, lambda made: dict(made.llama.state_dict()), source, plan, NOTHING)
    merged = load_file(folders / "merged" / "model.safetensors")
    down = "layers.1.mlp.down_proj.weight"
    assert torch.equal(ours[down], merged[f"model.{down}"].bfloat16())
    assert torch.equal(ours["lm_head.weight"][:290], merged["lm_head.weight"].bfloat16())


def refused(path: Path, base: Path | None = None) -> str:
    """Return the single problem of a model that cannot be opened."""
    with pytest.raises(ConfigError) as error:
        open_saved_model(path, base)
    assert len(error.value.problems) == 1
    return " ".join(str(error.value).split())


def test_the_base_may_move(folders: Path, tmp_path: Path) -> None:
    base, moved = folders / "base", tmp_path / "moved"
    assert (
        open_saved_model(folders / "run").stored.folder == base and open_saved_model(folders / "run").tokenizer == base
    )
    base.rename(moved)
    try:
        for name, rule in (("run", "no such folder"), ("adapter", "is not a model folder")):
            assert rule in refused(folders / name) and "write --base FOLDER" in refused(folders / name)
            model = open_saved_model(folders / name, moved)
            tokenizer = moved if name == "run" else folders / name  # exported with the adapter
            assert (model.stored.folder, model.tokenizer, model.token_ids) == (moved, tokenizer, {"eos_token_id": 0})
        for main, arguments in ((generate, ARGUMENTS), (evaluate, (*CPU, "--dataset", tmp_path / "none"))):
            done = command(main, folders / "run", *arguments)
            assert done.status == 2 and "no such folder" in " ".join(done.err.split()) and "Traceback" not in done.err
    finally:
        moved.rename(base)


def test_another_base_is_refused(folders: Path) -> None:
    run, merged = folders / "run", folders / "merged"
    for main, arguments in ((generate, ARGUMENTS), (evaluate, (*CPU, "--dataset", "none"))):
        done = command(main, run, *arguments, "--base", merged)
        assert done.status == 2 and "has other weights than the base model" in " ".join(done.err.split())
    assert "this model has complete weights" in refused(merged, folders / "base")
    manifest = read_manifest(find_checkpoint(run))
    manifest.state.hf_folder = None  # as a run from random weights has it
    with pytest.raises(ConfigError, match=r"started\s+from\s+random\s+weights"):
        open_base(manifest, model_of(manifest), None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_bias": True}, "lora_bias is True"),
        ({"r": 2}, "has shape"),
        ({"r": 64}, "lora_rank 64: exceeds the rank"),
        ({"lora_alpha": -1}, "lora_alpha -1"),
        ({"target_modules": ["q_proj"]}, "this run has no such tensor"),
        ({"base_model_name_or_path": "missing/model"}, "'missing/model' is not a model folder"),
    ],
)
def test_adapters_that_do_not_fit(folders: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    other = shutil.copytree(folders / "adapter", tmp_path / "other")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | settings))
    assert message in refused(other)
