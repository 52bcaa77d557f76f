"""Checkpoints that torch's and Hugging Face's own writers save: torchtitan's names, accelerate, the Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.source_settings import BATCH, BETAS, DECAY, EPS, LENGTH, LR, TOKENS, VOCAB, Trained, llama_config
from tests.checkpoint.source_settings import SETTINGS as COMMON
from tests.ranks import run_ranks

SETTINGS = (*COMMON, "model.tie_word_embeddings=false")
"""The settings of our run that continues the source's."""


def llama(**changes: Any) -> Any:
    """Return transformers' Llama of the tests' shape."""
    import transformers

    torch.manual_seed(7)
    return transformers.LlamaForCausalLM(llama_config(initializer_range=0.1, **changes))


def train_source(kind: str, folder: Path, batches: list[torch.Tensor], ranks: int = 2) -> Trained:
    """Train three steps, save by the program ``kind``, and train on.

    Args:
        kind: torchtitan, accelerate or trainer.
        batches: Tokens [batch, s + 1] of each further step.
    """
    return run_ranks(_rank, ranks if kind != "trainer" else 1, kind, folder, batches)[0]


def _rank(rank: int, kind: str, folder: Path, batches: list[torch.Tensor]) -> Trained:
    model = llama()
    if kind != "trainer":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    if kind == "trainer":
        return _run_trainer(folder, model, batches)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        _step(model, optimizer, torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator))
        scheduler.step()
    with torch.no_grad():
        logits = model(TOKENS).logits
    model.reshard()  # after a forward pass without backward
    folder.mkdir(parents=True, exist_ok=True)
    {"torchtitan": _save_torchtitan, "accelerate": _save_accelerate}[kind](folder, model, optimizer, scheduler)
    return Trained([_step(model, optimizer, batch) for batch in batches], logits)


def _step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def titan_name(name: str) -> str:
    """Return torchtitan's name of a tensor, or of an optimizer state."""
    for ours, theirs in (
        ("model.embed_tokens", "tok_embeddings"),
        ("model.norm", "norm"),
        ("lm_head", "output"),
        ("model.layers.", "layers."),
        ("self_attn.q_proj", "attention.wq"),
        ("self_attn.k_proj", "attention.wk"),
        ("self_attn.v_proj", "attention.wv"),
        ("self_attn.o_proj", "attention.wo"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.down_proj", "feed_forward.w2"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ):
        name = name.replace(ours, theirs)
    return name


def titan_rows(name: str, values: torch.Tensor) -> torch.Tensor:
    """Permute the rows of q and k as Meta's weights have them: the inverse of transformers' conversion of Llama."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if heads is None:
        return values
    rows, columns = values.shape
    return values.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _save_torchtitan(folder: Path, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Save as torchtitan's CheckpointManager: flat names of model and optimizer, sharded over the ranks."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    mesh = next(model.parameters()).device_mesh

    def permuted(name: str, values: Any) -> Any:
        if not isinstance(values, DTensor) or "proj" not in name:
            return values
        return distribute_tensor(titan_rows(name, values.full_tensor()), mesh, [Shard(0)])

    state = {titan_name(name): permuted(name, values) for name, values in model.state_dict().items()}
    moments = {}
    for key, values in flat.items():
        name = key.removeprefix("state.").rpartition(".")[0]
        moments[titan_name(key)] = permuted(name, values)
    state |= {
        "optimizer": moments,
        "lr_scheduler": scheduler.state_dict() | {"lr_lambdas": [None]},
        "train_state": {"step": torch.tensor(3, dtype=torch.int32), "ntokens_seen": torch.tensor(3 * BATCH * LENGTH)},
    }
    dcp.save(state, checkpoint_id=folder / "step-3")


def _save_accelerate(folder: Path, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Save by accelerate's own functions."""
    from types import SimpleNamespace

    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")  # read, but the ranks have met already
    PartialState(cpu=True)  # accelerate's log needs it
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = SimpleNamespace(num_processes=dist.get_world_size(), process_index=dist.get_rank())
    save_fsdp_model(plugin, accelerator, model, str(folder))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
    if dist.get_rank() == 0:
        torch.save(scheduler.state_dict(), folder / "scheduler.bin")


def _run_trainer(folder: Path, model: Any, batches: list[torch.Tensor]) -> Trained:
    """Train three steps by Hugging Face's Trainer, which saves, and train on with its optimizer."""
    import transformers

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # the Trainer would start a process group
        os.environ.pop(name)
    rows = torch.randint(0, VOCAB, (3 * BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=3,
        save_steps=3,
        per_device_train_batch_size=BATCH,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    with torch.no_grad():
        logits = model(TOKENS).logits
    return Trained([_step(model, trainer.optimizer, batch) for batch in batches], logits)
