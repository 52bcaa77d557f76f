"""Hugging Face transformers' LlamaForCausalLM with the Trainer's default settings, in a plain loop.

The loop equals the Trainer's without callbacks and logging: autocast for bf16, fused AdamW, clipped gradients.
"""

from __future__ import annotations

import torch
import transformers

from benchmarks.harness.task import TrainingTask, collect_facts, fused_adamw, matmul_dtype
from benchmarks.harness.worker import read_task, serve

# Fields of both ModelConfig and LlamaConfig.
_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings"),
)


class TransformersTrainer:
    """The model and its optimizer."""

    def __init__(self, task: TrainingTask) -> None:
        self.task = task
        torch.manual_seed(task.seed)
        config = transformers.LlamaConfig(use_cache=False, **{name: task.model[name] for name in _SHARED})
        with torch.device(task.device):
            self.model = transformers.LlamaForCausalLM(config).train()
        self.optimizer = fused_adamw(task, self.model)
        tokens, _ = task.batch(1)
        self.facts = collect_facts(
            task,
            self.model,
            compute_dtype=lambda: matmul_dtype(
                self.model, "model.layers.0.mlp.down_proj", lambda: self._forward(tokens[:1, :8], tokens[:1, :8])
            ),
            optimizer="AdamW, fused",
            attention=str(config._attn_implementation),
            versions={"transformers": transformers.__version__},
        )
        self.run = torch.compile(self.model) if task.mode == "compiled" else self.model

    def _forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss; ``labels`` are already shifted."""
        dtype = self.task.autocast_dtype
        with torch.autocast(self.task.device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            model = getattr(self, "run", self.model)
            return model(input_ids=tokens, labels=labels, shift_labels=labels).loss

    def step(self, number: int) -> float:
        loss = self._forward(*self.task.batch(number))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.optimizer["clip"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


if __name__ == "__main__":
    task = read_task()
    serve(task, lambda: TransformersTrainer(task))
