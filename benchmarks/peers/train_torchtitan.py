"""torchtitan's Llama 3 with fully_shard over one rank, chunked loss, clipping and the fused AdamW of its configs.

In compiled mode, blocks and loss are compiled.
"""

from __future__ import annotations

import os
from functools import partial
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model
from torchtitan.models.llama3.model import Llama3TransformerBlock

from benchmarks.harness.task import TrainingTask, collect_facts, fused_adamw, matmul_dtype
from benchmarks.harness.worker import read_task, serve


class TorchtitanTrainer:
    """The model and its optimizer."""

    def __init__(self, task: TrainingTask) -> None:
        self.task = task
        if not dist.is_initialized():
            os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0"))
            os.environ.update(WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
            dist.init_process_group()
        torch.manual_seed(task.seed)
        model = torchtitan_config(task).build()
        model.to(task.device)
        model.init_states(buffer_device=torch.device(task.device))
        compiling = CompileConfig(enable=task.mode == "compiled")
        if compiling.enable:
            one_rank = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1)
            apply_compile(model, compile_config=compiling, parallel_dims=one_rank)
        apply_fsdp_to_decoder(
            model,
            init_device_mesh(task.device, (1,), mesh_dim_names=("fsdp",)),
            param_dtype=task.autocast_dtype or torch.float32,
            reduce_dtype=torch.float32,
            pp_enabled=False,
        )
        self.model = model
        self.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()).build(compile_config=compiling)
        self.loss.set_lm_head(model.lm_head)
        model._skip_lm_head = True
        self.optimizer = fused_adamw(task, model)
        tokens, _ = task.batch(1)
        self.facts = collect_facts(
            task,
            model,
            compute_dtype=lambda: self._compute_dtype(tokens[:1, :8]),
            optimizer="AdamW, fused",
            attention="scaled_dot_product_attention",
            versions={"torchtitan": version("torchtitan")},
        )

    def _compute_dtype(self, tokens: torch.Tensor) -> str:
        with torch.compiler.set_stance("force_eager"):  # shapes differ from a step's
            return matmul_dtype(self.model, "layers.0.feed_forward.w2", lambda: self.model(tokens))

    def step(self, number: int) -> float:
        tokens, labels = self.task.batch(number)
        counted = torch.tensor(float(labels.numel()), device=labels.device)
        loss, _ = self.loss(self.model(tokens), labels, counted)
        loss.backward()
        clip_grad_norm_(list(self.model.parameters()), self.task.optimizer["clip"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def torchtitan_config(task: TrainingTask) -> Llama3Model.Config:
    """Return torchtitan's Config of the task's model. Initial weights have std 0.02, as in the other programs."""
    model = task.model
    dim, vocabulary, eps = model["hidden_size"], model["vocab_size"], model["rms_norm_eps"]
    normal = {"weight": partial(nn.init.normal_, std=0.02)}
    norm = RMSNorm.Config(normalized_shape=dim, eps=eps, param_init={"weight": nn.init.ones_})
    rope = ComplexRoPE.Config(dim=model["head_dim"], max_seq_len=task.seq_length, theta=model["rope_theta"])

    def block() -> Llama3TransformerBlock.Config:
        return Llama3TransformerBlock.Config(
            attention_norm=norm,
            ffn_norm=norm,
            attention=make_gqa_config(
                dim=dim,
                n_heads=model["num_attention_heads"],
                n_kv_heads=model["num_key_value_heads"],
                head_dim=model["head_dim"],
                wqkv_param_init=normal,
                wo_param_init=normal,
                inner_attention=ScaledDotProductAttention.Config(),
                fuse_qkv=True,
                rope=rope,
            ),
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=model["intermediate_size"], w1_param_init=normal, w2w3_param_init=normal
            ),
        )

    return Llama3Model.Config(
        dim=dim,
        vocab_size=vocabulary,
        enable_weight_tying=model["tie_word_embeddings"],
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim, param_init=normal),
        norm=norm,
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=normal),
        layers=[block() for _ in range(model["num_hidden_layers"])],
    )


if __name__ == "__main__":
    task = read_task()
    serve(task, lambda: TorchtitanTrainer(task))
