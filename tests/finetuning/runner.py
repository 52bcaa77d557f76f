"""Fine-tune a small Llama with this project in any layout, and with transformers and peft, on the same batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.export import Exported, export
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.config import load_config
from megatron_llama.data.batches import Data
from megatron_llama.optim import build_optimizer
from megatron_llama.plan import Plan, resolve
from megatron_llama.train.reference_logps import add_reference
from tests.checkpoint.runner import resumed
from tests.model.llamas import LossOfStep, hf_config, loss_of_batch, train_plain, whole_batch
from tests.oracle import (
    SHAPE,
    Tensors,
    assemble,
    distance,
    rank_batches,
    rank_data,
    rank_groups,
    rank_model,
    rectangles,
)
from tests.paths import CONF
from tests.ranks import run_ranks

STEPS = 8
SETTINGS = (
    *(setting for setting in SHAPE if "global_batch_size" not in setting),
    "trainer.global_batch_size=4",
    "model.num_hidden_layers=2",
    "model.initializer_range=0.1",  # at 0.02 so small a model is almost linear and would hide errors
    "optim=constant",
    "optim.lr=0.003",
    "optim.warmup_steps=0",
    # A gradient of 1e-5 among gradients of 0.1 is rounded in its second digit; a smaller eps shows that in the weight.
    "optim.eps=1e-3",
)
EVERY_MATRIX = "finetune.lora_target_modules=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
RANK = ("finetune=lora", "finetune.lora_rank=4", "finetune.lora_alpha=12.5")
LORA = (*RANK, EVERY_MATRIX)
# Ranks differ inside a fused matrix, and between layers; layer 0 has no adapter of up_proj.
PATTERNS = (
    *LORA,
    r"finetune.rank_pattern={layers.0.self_attn.q_proj: 8, \(k|down\)_proj: 2}",
    "finetune.alpha_pattern={mlp.*: 5, q_proj: 7}",
    "finetune.exclude_modules=[layers.0.mlp.up_proj]",
)
LAYER_1 = (*LORA, "finetune.layers_to_transform=[1]")
BIASES = ("model.model_type=qwen2", *LORA, "finetune.bias=all")
# Of a global batch of 4; without it, 2.
MICRO_1 = "trainer.micro_batch_size=1"
TOLERANCE = 1e-5  # fp32; sums in another order

# New tokens. Two of them take spare rows of the base.
TOKENS = ["<think>", "</think>", "<|call|>"]
NEW = PLAIN, SPECIAL = 'data.add_tokens=["<think>","</think>"]', 'data.add_special_tokens=["<|call|>"]'
OLD, SPARE, ROWS = 64, 2, 65
"""Rows of the base, of them without a token, and with the new tokens."""
GROWN = (*NEW, f"model.vocab_size={ROWS}")
TABLES = {False: ["model.embed_tokens.weight", "lm_head.weight"], True: ["model.embed_tokens.weight"]}
TIED = "model.tie_word_embeddings=true"
# Settings of tied and untied embeddings. The rows are in no order, on both tp ranks, and not only of new tokens.
IN_FULL = {
    True: ["finetune.modules_to_save=[embed_tokens]"],
    False: ["finetune.modules_to_save=[embed_tokens,lm_head]"],
}
TOKEN_ROWS = ["finetune.trainable_token_indices=[64,3,62,63]"]
BY_ROWS = {True: TOKEN_ROWS, False: [*TOKEN_ROWS, "finetune.modules_to_save=[lm_head]"]}


@dataclass
class Tuned:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: list[list[float]] = field(default_factory=list)
    """``finetune.metrics`` of each step."""
    first_grads: Tensors = field(default_factory=dict)
    trained: Tensors = field(default_factory=dict)
    frozen: Tensors = field(default_factory=dict)
    dtypes: tuple[set[torch.dtype], set[torch.dtype]] = (set(), set())
    """Dtypes of trained and of frozen weights on the first rank."""


def make_plan(world: int, folder: Path, *overrides: str) -> Plan:
    """Return the plan of the small model in a layout."""
    return resolve(load_config([*SETTINGS, f"run.dir={folder}", *overrides], CONF), world)


def tune(world: int, folder: Path, *overrides: str, steps: int = STEPS) -> Tuned:
    """Start or resume the run in ``folder`` on forked ranks, train until step ``steps``, and save."""
    answers = run_ranks(_tune, world, make_plan(world, folder, *overrides), steps)
    first, *_ = answers[0]
    for tuned, *_ in answers:
        assert (tuned.losses, tuned.norms) == (first.losses, first.norms), "ranks disagree about loss or gradient norm"
    for index, name in enumerate(("first_grads", "trained", "frozen"), start=1):
        setattr(first, name, assemble([answer[index] for answer in answers])[0])
    return first


def _tune(rank: int, plan: Plan, steps: int) -> tuple:
    with rank_groups(plan, rank):
        model = rank_model(plan, rank)
        optimizer = build_optimizer(plan, model)
        data = rank_data(plan) if plan.config.finetune.metrics else Data(rank_batches(plan), {})
        checkpointer = Checkpointer(plan, plan.topology(rank), model, optimizer, data)
        tuned = Tuned()
        grads: list[tuple] = []
        plan = checkpointer.resume()
        add_reference(plan, model, data)
        first, size = plan.start.step, plan.config.trainer.global_batch_size
        for step in range(first, steps):
            loss, *metrics = model.forward_backward(data.train.at(step * size)).view(-1).tolist()
            tuned.losses.append(loss)
            tuned.metrics.append(metrics)
            norm = optimizer.gradient_norm()
            tuned.norms.append(norm.item())
            assert not any(shard.grad is not None for shard in model.shards if not shard.is_trained)
            grads = grads or rectangles(model.trained, lambda shard: shard.grad)
            optimizer.step(norm)
        checkpointer.finish(max(first, steps))
        tuned.dtypes = tuple({s.local.dtype for s in model.shards if s.is_trained is t} for t in (True, False))  # type: ignore[assignment]
        frozen = [shard for shard in model.shards if not shard.is_trained]
        return tuned, grads, *(rectangles(part, lambda shard: shard.values) for part in (model.trained, frozen))


def save_base(rank: int, plan: Plan, folder: Path) -> None:
    """A Hugging Face folder with a random Llama of the plan's shape, its norms no ones and its biases no zeros."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    llama = AutoModelForCausalLM.from_config(hf_config(plan.model))
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    llama.save_pretrained(folder)


def make_bases(folder: Path, tied: bool) -> tuple[Path, Path]:
    """Write a base model with a tokenizer, and the same model that transformers resized for new tokens."""
    base, grown = folder / "base", folder / "grown"
    run_ranks(_save_bases, 1, make_plan(1, folder, *([TIED] if tied else [])), base, grown)
    return base, grown


def _save_bases(rank: int, plan: Any, base: Path, grown: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    save_base(rank, plan, base)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(OLD - SPARE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(base / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    model = their_base(base)
    before = {name: tensor.double().mean(0) for name, tensor in model.state_dict().items()}
    model.resize_token_embeddings(ROWS, mean_resizing=True)
    for name in TABLES[plan.model.tie_word_embeddings]:
        table, mean = model.state_dict()[name], before[name].float()
        assert all(distance(row, mean) <= 1e-3 for row in table[OLD:]), "a normal distribution of small variance"
        table[OLD:] = mean
    model.save_pretrained(grown)


def their_base(folder: Path, attention: str = "sdpa") -> Any:
    """The folder's model as transformers has it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)


def their_lora(base: Any, plan: Plan) -> Any:
    """peft's model of the plan's settings, with an adapter of peft's own initial values."""
    import peft

    finetune = plan.config.finetune
    config = peft.LoraConfig(
        r=finetune.lora_rank,
        lora_alpha=finetune.lora_alpha,  # type: ignore[arg-type]  # PEFT takes floats too
        use_rslora=finetune.use_rslora,
        use_dora=finetune.use_dora,
        lora_dropout=finetune.lora_dropout,
        target_modules=finetune.lora_target_modules,
        exclude_modules=finetune.exclude_modules or None,
        layers_to_transform=finetune.layers_to_transform or None,
        rank_pattern=finetune.rank_pattern,
        alpha_pattern=finetune.alpha_pattern,
        bias=finetune.bias,  # type: ignore[arg-type]
        modules_to_save=finetune.modules_to_save or None,
        trainable_token_indices=finetune.trainable_token_indices or None,
        ensure_weight_tying=plan.model.tie_word_embeddings and "embed_tokens" in finetune.modules_to_save,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(base, config)


def save_adapter(rank: int, plan: Plan, base: Path, folder: Path) -> None:
    """A PEFT adapter, written by peft, no longer at its start: B is not zero. Saves the base too if it is missing."""
    if not base.exists():
        save_base(rank, plan, base)
    torch.manual_seed(11)
    model = their_lora(their_base(base), plan)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
            elif parameter.requires_grad and "lora_A" not in name:  # magnitudes, biases and whole modules
                parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def train_theirs(model: Any, plan: Plan, steps: int, loss_of: LossOfStep = loss_of_batch) -> Tuned:
    """Train transformers' model in a plain loop over the same batches. To be called in a forked rank."""
    losses, norms = train_plain(model, plan, steps, loss_of)
    trained = {_plain(name): p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return Tuned(losses, norms, trained=trained)


def _plain(name: str) -> str:
    """A parameter's name in a file: peft's without the adapter's, whole modules under Hugging Face's."""
    name = name.replace(".default", "").replace(".modules_to_save", "").replace(".base_layer", "")
    name = name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
    return name if ".lora_" in name or ".token_adapter." in name else name.removeprefix("base_model.model.")


def run_full(rank: int, plan: Plan, base: Path, steps: int) -> Tuned:
    """Full fine-tuning by transformers and torch.optim."""
    return train_theirs(their_base(base), plan, steps)


def run_lora(rank: int, plan: Plan, base: Path, adapter: Path, steps: int) -> Tuned:
    """LoRA by peft, from an adapter in a folder."""
    import peft

    return train_theirs(peft.PeftModel.from_pretrained(their_base(base), adapter, is_trainable=True), plan, steps)


def our_logits(rank: int, plan: Plan) -> torch.Tensor:
    """Return the logits of a resumed run on its first batch."""
    with resumed(rank, plan) as (model, *_):
        logits = model.logits(whole_batch(plan, 0)[0])
        assert logits is not None
        return logits.transpose(0, 1)


def their_logits(rank: int, plan: Plan, base: Path, adapter: Path | None) -> tuple[torch.Tensor, Any]:
    """Logits, and the weights once peft has merged them."""
    import peft

    model = their_base(base)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        logits = model(whole_batch(plan, 0)[0]).logits
    return logits, None if adapter is None else dict(model.merge_and_unload().state_dict())


def assert_exchanged(
    run: Path, out: Path, start: Sequence[str], plan: Plan, base: Path, restart: Sequence[str]
) -> tuple[Exported, Path, torch.Tensor]:
    """Export the adapter of a run and merge it: peft and a new run have its logits, and peft merges the same weights.

    Return the exported adapter, the folder of the merged weights, and the logits.
    """
    made = export(find_checkpoint(run), out / "adapter")
    merged = export(find_checkpoint(run), out / "merged", merge=True).folder
    (logits,) = run_ranks(our_logits, 1, make_plan(1, run, *start))
    of_peft, by_peft = run_ranks(their_logits, 1, plan, base, made.folder)[0]
    assert distance(logits, of_peft) <= 1e-6
    ours = load_file(merged / "model.safetensors")
    assert all(distance(ours[name], by_peft[name]) <= 1e-6 for name in ours)
    chosen = ["finetune=lora", f"finetune.adapter={made.folder}", *restart]
    (reloaded,) = run_ranks(our_logits, 1, make_plan(1, out / "new", *chosen))
    assert torch.equal(reloaded, logits)
    return made, merged, logits


@dataclass
class World:
    """Folders, and the oracle's answers."""

    base: Path
    """A Hugging Face folder."""
    adapter: Path
    """A PEFT adapter to it, B not zero."""
    plan: Plan
    """LoRA in one process."""

    @property
    def full(self) -> list[str]:
        """Full fine-tuning of the base."""
        return ["finetune=full", f"init_from={self.base}"]

    @property
    def lora(self) -> list[str]:
        """LoRA from the adapter on."""
        return ["finetune=lora", f"finetune.adapter={self.adapter}", f"init_from={self.base}"]

    @property
    def fresh(self) -> list[str]:
        """LoRA from its own start."""
        return [*LORA, f"init_from={self.base}"]


def make_world(folder: Path) -> World:
    """Write the base and the adapter."""
    made = World(folder / "base", folder / "adapter", make_plan(1, folder, *LORA))
    run_ranks(save_adapter, 1, made.plan, made.base, made.adapter)
    return made


def worst(ours: Tuned, theirs: Tuned) -> dict[str, float]:
    """Return the largest relative differences."""
    steps = len(ours.losses)
    assert steps and ours.trained.keys() == theirs.trained.keys()
    differences = {
        kind: max(abs(a / b - 1) for a, b in zip(getattr(ours, kind), getattr(theirs, kind)[:steps], strict=True))
        for kind in ("losses", "norms")
    }
    return differences | {name: distance(tensor, theirs.trained[name]) for name, tensor in ours.trained.items()}


def assert_near(ours: Tuned, theirs: Tuned) -> None:
    """Check losses, gradient norms and trained weights."""
    differences = worst(ours, theirs)
    assert max(differences.values()) <= TOLERANCE, differences
