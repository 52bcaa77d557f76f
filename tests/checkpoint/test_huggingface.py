"""From Hugging Face's folders and back: transformers' logits are ours, and export(import(x)) is x."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_llama.checkpoint import hf_folder
from megatron_llama.checkpoint.export import export, write_companions
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.hf_folder import open_hf_folder
from megatron_llama.config import ConfigError, load_config
from megatron_llama.plan import Plan, resolve
from tests.checkpoint.runner import CONF, resumed, run
from tests.messages import raises_with_message, unwrap
from tests.ranks import run_ranks
from tests.tools.inference.models import train_sentencepiece, write_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
transformers = pytest.importorskip("transformers", reason="transformers is a dev dependency: the oracle of these tests")
tokenizers_package = pytest.importorskip("tokenizers")
safetensors_torch = pytest.importorskip("safetensors.torch")

TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
LLAMA_2: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0}
LLAMA_3: dict[str, Any] = {
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@dataclass
class Case:
    """A folder that transformers saves."""

    shape: dict[str, Any]
    tied: bool = False
    dtype: torch.dtype = torch.float32
    shard_size: str = "5GB"
    vocab_size: int = 64
    model_type: str = "llama"
    old_spelling: bool = False
    """rope_theta and rope_scaling as transformers 4 wrote them, instead of rope_parameters."""
    extra: dict[str, Any] = field(default_factory=dict)


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
CASES = {
    "llama 2, fp32, one file": Case(LLAMA_2),
    "llama 2, bf16, sharded, old spelling": Case(LLAMA_2, dtype=torch.bfloat16, shard_size="40KB", old_spelling=True),
    "llama 3, bf16, one file, wide heads": Case(LLAMA_3, dtype=torch.bfloat16, extra={"head_dim": 16}),
    "llama 3, fp32, sharded, tied": Case(LLAMA_3, tied=True, shard_size="40KB"),
    "mistral, window of 5": Case({**LLAMA_2, "num_key_value_heads": 2, "sliding_window": 5}, model_type="mistral"),
    "qwen2, tied, odd vocabulary": Case(
        {**LLAMA_2, "num_key_value_heads": 4}, tied=True, vocab_size=61, model_type="qwen2"
    ),
    "qwen2, bf16, sharded, window of 5": Case(
        {**LLAMA_2, "num_key_value_heads": 1, **QWEN_WINDOW},
        dtype=torch.bfloat16,
        shard_size="40KB",
        model_type="qwen2",
    ),
    "qwen3, bf16, wide heads": Case(
        LLAMA_2, dtype=torch.bfloat16, model_type="qwen3", extra={"num_key_value_heads": 2, "head_dim": 16}
    ),
    "olmo2, biases, wide heads, sharded": Case(
        LLAMA_2,
        shard_size="40KB",
        model_type="olmo2",
        extra={"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
    ),
    "llama with all biases": Case(LLAMA_2, extra={"attention_bias": True, "mlp_bias": True}),
    "llama 3, old spelling, odd vocabulary": Case(LLAMA_3, old_spelling=True, vocab_size=61, dtype=torch.bfloat16),
}


def save_with_transformers(case: Case, folder: Path) -> torch.Tensor:
    """Save a random Llama; returns its logits [b, s, v] in fp32."""
    (logits,) = run_ranks(_save, 1, case, folder)
    return logits


def _save(rank: int, case: Case, folder: Path) -> torch.Tensor:
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(
        case.model_type,
        vocab_size=case.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=case.tied,
        initializer_range=0.2,
        **{**case.shape, **case.extra},
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(case.dtype)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif name.endswith(".bias"):
            torch.nn.init.uniform_(weight, -0.5, 0.5)
    model.save_pretrained(folder, max_shard_size=case.shard_size)
    if case.old_spelling:
        path = folder / "config.json"
        content = json.loads(path.read_text())
        rope = content.pop("rope_parameters", None)
        if rope is not None:
            content["rope_theta"] = rope.pop("rope_theta")
            content["rope_scaling"] = rope if rope.get("rope_type") == "llama3" else None
        path.write_text(json.dumps(content))
    # Loaded again, not model.float(): the conversion to bf16 has rounded the rotary frequencies too.
    return _load_with_transformers(rank, folder)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS % model.config.vocab_size).logits


def import_plan(world_size: int, folder: Path, run_dir: Path, *overrides: str) -> Plan:
    """A run of no steps that starts from ``folder``."""
    common = ("model=from_hf", f"init_from={folder}", f"run.dir={run_dir}", "data=mock", "data.seq_length=16")
    return resolve(load_config([*common, "device=cpu", "trainer.steps=0", *overrides], CONF), world_size)


def our_logits(plan: Plan) -> torch.Tensor:
    """Import, save step 0, and give the logits [b, s, v]."""
    parts = [part for part in run_ranks(_import, plan.world_size, plan) if part is not None]
    return torch.cat(parts[: plan.config.trainer.tp], dim=-1)[..., : plan.model.vocab_size].transpose(0, 1)


def _import(rank: int, plan: Plan) -> torch.Tensor | None:
    with resumed(rank, plan) as (model, checkpointer, batches):
        assert batches.start.step == 0
        checkpointer.finish(0)
        logits = model.logits(TOKENS % plan.model.vocab_size)
        return None if logits is None else logits.detach()


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files, read by safetensors itself."""
    return {n: t for f in folder.glob("*.safetensors") for n, t in safetensors_torch.load_file(f).items()}


@pytest.mark.parametrize("case", CASES.values(), ids=[name.replace(" ", "_") for name in CASES])
def test_transformers_folder_gives_its_logits_and_comes_back(case: Case, tmp_path: Path) -> None:
    theirs = save_with_transformers(case, tmp_path / "hf")
    assert (len(list((tmp_path / "hf").glob("*.safetensors"))) > 1) == (case.shard_size == "40KB")
    plan = import_plan(4, tmp_path / "hf", tmp_path / "run", "trainer.tp=2", "trainer.pp=2")
    ours = our_logits(plan)
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), (ours - theirs).abs().max()
    assert theirs.abs().max() > 0.5  # or equal logits would say little
    shown = list[tuple[int, int]]()
    source, out = find_checkpoint(tmp_path / "run"), tmp_path / "back"
    made = export(source, out, max_shard_bytes=40_000, progress=lambda *bytes_of: shown.append(bytes_of))
    assert len(shown) > 5 and shown[-1] == (made.bytes, made.bytes)
    before, after = tensors_in(tmp_path / "hf"), tensors_in(tmp_path / "back")
    assert before.keys() == after.keys() and len(made.files) > 1
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype == case.dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    (second,) = run_ranks(_load_with_transformers, 1, tmp_path / "back")
    assert torch.equal(second, theirs)
    kinds = [json.loads((tmp_path / name / "config.json").read_text())["model_type"] for name in ("hf", "back")]
    assert kinds[0] == kinds[1] and plan.model.sliding_window == case.shape.get("sliding_window")


def _load_with_transformers(rank: int, folder: Path) -> torch.Tensor:
    return _logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def _trained_logits(rank: int, plan: Plan) -> torch.Tensor | None:
    with resumed(rank, plan) as (model, _, batches):
        assert batches.start.step == 3
        return model.logits(TOKENS % plan.model.vocab_size)


def test_transformers_loads_what_was_trained_here(tmp_path: Path) -> None:
    llama_3 = ["model.vocab_size=61", "model.rope_theta=500000"]
    llama_3.append("model.rope_scaling={rope_type: llama3, original_max_position_embeddings: 16}")
    run(2, tmp_path / "run", "trainer.tp=2", *llama_3, until=3)
    ours = None
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 2e-2)):  # bf16 keeps 8 bits of each weight
        hf = tmp_path / dtype
        assert export(find_checkpoint(tmp_path / "run"), hf, dtype=dtype).dtype == dtype
        (theirs,) = run_ranks(_load_with_transformers, 1, hf)
        if ours is None:
            plan = import_plan(1, hf, tmp_path / "run", "optim.lr=0.003", "trainer.steps=5")
            (ours,) = run_ranks(_trained_logits, 1, plan)
        assert torch.allclose(ours.transpose(0, 1)[..., :61], theirs, rtol=1e-4, atol=tolerance)


def test_blocks_have_no_folder(tmp_path: Path) -> None:
    """Sparse attention is not exported, because Hugging Face's Llama attends to all tokens; the run continues."""
    blocks = "model.sparse_attention={block: 2, num_local_blocks: 2}"
    run(1, tmp_path / "run", blocks, until=1)
    with raises_with_message(ConfigError, "model.sparse_attention"):
        export(find_checkpoint(tmp_path / "run"), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    run(1, tmp_path / "run", blocks, until=2)
    assert find_checkpoint(tmp_path / "run").name == "step_00000002"


def test_each_rank_reads_only_its_own_slices(tmp_path: Path) -> None:
    save_with_transformers(CASES["llama 2, fp32, one file"], tmp_path / "hf")
    for layout, ranks in ((["trainer.tp=4"], 4), (["trainer.tp=2", "trainer.pp=2"], 4)):
        plan = import_plan(ranks, tmp_path / "hf", tmp_path / f"run{len(layout)}", *layout)
        for requested, share in run_ranks(_bytes_read, ranks, plan):
            assert requested == share


def _bytes_read(rank: int, plan: Plan) -> tuple[int, int]:
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_folder, "check_finite", lambda where, name, values, offset: read.append(values.nbytes))
        with resumed(rank, plan) as (model, _, _):
            assert ".safetensors" not in Path("/proc/self/maps").read_text(), "mapped pages count as this rank's memory"
            rectangles = [(shard, rectangle) for shard in model.shards for rectangle in shard.rectangles]
            return sum(read), 4 * sum(shard.local[rectangle.local_slices].numel() for shard, rectangle in rectangles)


def _refused(folder: Path, run_dir: Path, *overrides: str) -> str:
    """Return the error message about a folder."""
    try:
        plan = import_plan(1, folder, run_dir, *overrides)
    except ConfigError as error:
        return unwrap(str(error))
    return run_ranks(_refusal, 1, plan)[0]


def _refusal(rank: int, plan: Plan) -> str:
    with pytest.raises(ConfigError) as raised:
        _import(rank, plan)
    return unwrap(str(raised.value))


def test_what_is_no_such_llama_is_refused(tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    save_with_transformers(CASES["llama 2, fp32, one file"], hf)
    config = json.loads((hf / "config.json").read_text())
    tensors = tensors_in(hf)
    (hf / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    assert "q_proj.bias (16 of 55 tensors are missing)" in _refused(hf, tmp_path / "run")
    (hf / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    assert "correct its config.json" in _refused(hf, tmp_path / "run")
    (hf / "config.json").write_text(json.dumps(config))
    bias = {**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
    safetensors_torch.save_file(bias, hf / "model.safetensors")
    assert "q_proj.bias" in _refused(hf, tmp_path / "run")
    safetensors_torch.save_file({n: t for n, t in tensors.items() if n != "lm_head.weight"}, hf / "model.safetensors")
    assert "lm_head.weight" in _refused(hf, tmp_path / "run")
    assert _refused(hf, tmp_path / "run", "trainer.tp=1", "model.vocab_size=32") != ""
    (hf / "model.safetensors").unlink()
    torch.save(tensors, hf / "pytorch_model.bin")
    message = _refused(hf, tmp_path / "run")
    assert "pickle" in message
    exec(message.partition("with transformers: ")[2], {"AutoModelForCausalLM": transformers.AutoModelForCausalLM})
    assert open_hf_folder(hf, load_config(["model=from_hf", f"init_from={hf}", "data=mock"], CONF).model)


def test_a_folder_with_both_layouts_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """A folder saved twice has shards, their index and one file; transformers reads the one file."""
    hf = tmp_path / "hf"
    save_with_transformers(CASES["llama 2, bf16, sharded, old spelling"], tmp_path / "hf")
    changed = {name: tensor * 2 for name, tensor in tensors_in(hf).items()}
    safetensors_torch.save_file(changed, hf / "model.safetensors", metadata={"format": "pt"})
    (theirs,) = run_ranks(_load_with_transformers, 1, hf)
    assert torch.allclose(our_logits(import_plan(1, hf, tmp_path / "run")), theirs, rtol=1e-4, atol=1e-5)


def test_a_tied_folder_with_another_head(tmp_path: Path) -> None:
    """transformers keeps both tables, and so does model.tie_word_embeddings=false; the default names the conflict."""
    hf = tmp_path / "hf"
    save_with_transformers(CASES["llama 3, fp32, sharded, tied"], hf)
    for file in hf.glob("*.safetensors*"):
        file.unlink()
    save_with_transformers(CASES["llama 2, fp32, one file"], tmp_path / "untied")
    tensors = tensors_in(tmp_path / "untied")
    tied = {n: t[:16] if n.endswith(("k_proj.weight", "v_proj.weight")) else t for n, t in tensors.items()}
    safetensors_torch.save_file({n: t.contiguous() for n, t in tied.items()}, hf / "model.safetensors")
    message = _refused(hf, tmp_path / "run")
    assert "lm_head.weight differs" in message and "model.tie_word_embeddings=false" in message
    (theirs,) = run_ranks(_load_with_transformers, 1, hf)
    ours = our_logits(import_plan(1, hf, tmp_path / "run", "model.tie_word_embeddings=false"))
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    tied["lm_head.weight"] = tied["model.embed_tokens.weight"].clone()
    safetensors_torch.save_file(tied, hf / "model.safetensors")
    our_logits(import_plan(1, hf, tmp_path / "tied"))


def test_an_export_never_writes_infinite_weights(tmp_path: Path) -> None:
    """A weight above 65,504 does not become inf in float16."""
    hf = tmp_path / "hf"
    save_with_transformers(CASES["llama 2, fp32, one file"], hf)
    tensors = tensors_in(hf)
    tensors["lm_head.weight"][5, 3] = 1e6
    safetensors_torch.save_file(tensors, hf / "model.safetensors")
    our_logits(import_plan(1, hf, tmp_path / "run"))
    checkpoint = find_checkpoint(tmp_path / "run")
    for write in (export, partial(export, kind="dcp"), partial(export, kind="torch_dist")):
        with raises_with_message(ConfigError, "lm_head.weight has the magnitude 1e.06"):
            write(checkpoint, tmp_path / "out", dtype="float16")
        assert not (tmp_path / "out").exists()
    assert export(checkpoint, tmp_path / "wide", dtype="bfloat16").dtype == "bfloat16"


def test_from_hf_needs_a_folder(tmp_path: Path) -> None:
    with raises_with_message(ConfigError, "init_from"):
        load_config(["model=from_hf", "data=mock"], CONF)
    with raises_with_message(ConfigError, "model=NAME if another program wrote it"):
        load_config(["model=from_hf", f"init_from={tmp_path}", "data=mock"], CONF)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with tokenizers: ``llama``, ``qwen`` (turns end with another token than eos), ``template`` (qwen with
    another template), ``bare`` (qwen's tokenizer.json alone)."""
    root = tmp_path_factory.mktemp("tokenizers")
    for name in ("llama", "qwen"):
        write_tokenizer(root / name, template=True)
    qwen = root / "qwen"
    tokenizer = tokenizers_package.Tokenizer.from_file(str(qwen / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(qwen / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": CHATML}
    (qwen / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copytree(qwen, root / "template")
    other = settings | {"chat_template": CHATML.replace("assistant\\n", "assistant: ")}
    (root / "template" / "tokenizer_config.json").write_text(json.dumps(other))
    (root / "bare").mkdir()
    shutil.copy(qwen / "tokenizer.json", root / "bare")
    for name in ("llama", "qwen", "bare"):
        eos = tokenizer.token_to_id("<|end|>" if name == "llama" else "<|endoftext|>")
        (root / name / "config.json").write_text(json.dumps({"eos_token_id": eos}))
        (root / name / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "top_p": 0.9}))
    return root


OWN: dict[str, Any] = {"kind": "sft", "prefixes": [], "chat_template": "own"}
NAMED = OWN | {"chat_template": "chatml"}


@pytest.mark.parametrize(
    "row",  # base model, tokenizer, data, whose tokenizer is exported, end tokens, top_p
    [
        (None, "qwen", {}, "qwen", ["<|endoftext|>"], None),
        ("llama", "qwen", {}, "qwen", ["<|endoftext|>"], None),
        ("llama", "qwen", OWN, "qwen", ["<|endoftext|>", "<|im_end|>"], None),
        ("qwen", None, OWN, "qwen", ["<|endoftext|>", "<|im_end|>"], 0.9),
        ("qwen", "template", OWN, "template", ["<|endoftext|>", "<|im_end|>"], 0.9),
        ("bare", None, NAMED, "qwen", ["<|endoftext|>", "<|im_end|>"], 0.9),
        ("bare", "bare/tokenizer.json", {}, "bare", ["<|endoftext|>"], 0.9),
    ],
)
def test_an_export_has_the_runs_tokenizer(row: tuple, tokenizers: Path, tmp_path: Path) -> None:
    """Ids, template and stop ids are of the run's data; sampling settings are the base model's if its ids are equal."""
    base, tokenizer, data, source, ends, top_p = row
    settings = {"data": {**data, "tokenizer": tokenizer and str(tokenizers / tokenizer)}}
    state = SimpleNamespace(hf_folder=base and str(tokenizers / base), settings=settings)
    manifest: Any = SimpleNamespace(state=state, locate=lambda path: path)
    token_ids, has_tokenizer = write_companions(manifest, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    stops = generation["eos_token_id"]
    assert has_tokenizer and theirs.convert_ids_to_tokens(stops if isinstance(stops, list) else [stops]) == ends
    assert theirs.convert_ids_to_tokens([token_ids["eos_token_id"]]) == ends[:1] and generation.get("top_p") == top_p
    assert (tmp_path / "tokenizer.json").read_bytes() == (tokenizers / source / "tokenizer.json").read_bytes()
    if source != "bare":
        expected = json.loads((tokenizers / source / "tokenizer_config.json").read_text())["chat_template"]
        question = [{"role": "user", "content": "Hello"}]
        shown = theirs.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        theirs.chat_template = expected
        assert shown == theirs.apply_chat_template(question, tokenize=False, add_generation_prompt=True)


def test_a_sentencepiece_model_becomes_the_tokenizer(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    tokenizer = train_sentencepiece(tmp_path / "tok", **plain)
    run(1, tmp_path / "run", f"data.tokenizer={tokenizer}", "model.vocab_size=320", until=1)
    assert export(find_checkpoint(tmp_path / "run"), tmp_path / "hf").tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    for sample in ("the cat and a mat", "two  spaces, \ttab, ünï 漢字 🙂\n\nlines", "on the"):
        assert theirs(sample)["input_ids"] == ours.encode(sample)
    assert theirs.eos_token_id == ours.eos_id()
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == ours.eos_id()


def test_ctranslate2_continues_as_transformers(tmp_path: Path) -> None:
    """A program that serves such folders writes the greedy continuation of an exported run."""
    pytest.importorskip("ctranslate2", reason="ctranslate2 is a dev dependency")
    tokenizer = train_sentencepiece(tmp_path / "tok")
    shape = ["model.vocab_size=320", "model.hidden_size=64", "model.initializer_range=0.3"]
    run(1, tmp_path / "run", f"data.tokenizer={tokenizer}", *shape, until=1)
    export(find_checkpoint(tmp_path / "run"), tmp_path / "hf")
    ((ours, theirs),) = run_ranks(_greedy_tokens, 1, tmp_path / "hf", "on the mat")
    assert len(ours) == 12 and theirs == ours


def _greedy_tokens(rank: int, folder: Path, prompt: str) -> tuple[list[int], list[int]]:
    """Return 12 tokens by transformers, and by CTranslate2 from the converted folder."""
    import ctranslate2

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = model.generate(torch.tensor([ids]), max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, len(ids) :]
    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(folder / "converted"))
    generator = ctranslate2.Generator(str(folder / "converted"), compute_type="float32", intra_threads=1)
    start = [tokenizer.convert_ids_to_tokens(ids)]
    settings = {"max_length": 12, "min_length": 12, "sampling_topk": 1, "include_prompt_in_result": False}
    return ours.tolist(), generator.generate_batch(start, **settings)[0].sequences_ids[0]


def test_a_mean_of_checkpoints_is_the_mean_in_fp64(tmp_path: Path) -> None:
    run(2, tmp_path / "run", "trainer.tp=2", "checkpoint.every_steps=1", "checkpoint.keep=4", until=4)
    newest = find_checkpoint(tmp_path / "run")
    singles = [
        tensors_in(export(newest.with_name(f"step_{4 - age:08d}"), tmp_path / str(age)).folder) for age in range(3)
    ]
    for decay in (1.0, 0.5):
        made = export(newest, tmp_path / f"mean {decay}", average=3, decay=decay).folder
        for name, tensor in tensors_in(made).items():
            total = sum(single[name].double() * decay**age for age, single in enumerate(singles))
            assert torch.equal(tensor, (total / sum(decay**age for age in range(3))).float()), name
            assert not torch.equal(tensor, singles[0][name])
    assert "mean of the checkpoints of steps 2, 3, 4" in (made / "README.md").read_text()
    with raises_with_message(ConfigError, "is above the number of checkpoints up to step_00000004, 4"):
        export(newest, tmp_path / "more", average=6)
    run(1, tmp_path / "wide", "checkpoint.every_steps=1", "model.intermediate_size=128", until=3)
    shutil.rmtree(newest.with_name("step_00000003"))
    find_checkpoint(tmp_path / "wide").rename(newest.with_name("step_00000003"))
    with raises_with_message(ConfigError, "step_00000003 has other tensors or shapes than step_00000004"):
        export(newest, tmp_path / "more", average=2)
    assert not (tmp_path / "more").exists()
