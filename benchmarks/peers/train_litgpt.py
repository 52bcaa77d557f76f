"""litgpt's GPT on Lightning Fabric, with the loss, optimizer and clipping of its `pretrain` command."""

from __future__ import annotations

from importlib.metadata import version

import lightning
import torch
from litgpt import GPT, Config
from litgpt.pretrain import initialize_weights
from litgpt.utils import chunked_cross_entropy, instantiate_torch_optimizer

from benchmarks.harness.task import TrainingTask, collect_facts, matmul_dtype
from benchmarks.harness.worker import read_task, serve


class LitgptTrainer:
    """The model and its optimizer."""

    def __init__(self, task: TrainingTask) -> None:
        self.task = task
        precision = "bf16-mixed" if task.precision == "bf16" else "32-true"
        self.fabric = lightning.Fabric(accelerator=task.device, devices=1, precision=precision)
        self.fabric.launch()
        self.fabric.seed_everything(task.seed, verbose=False)
        config = litgpt_config(task)
        with self.fabric.init_module(empty_init=True):
            model = GPT(config)
        initialize_weights(self.fabric, model, n_layer=config.n_layer, n_embd=config.n_embd)
        if task.model["tie_word_embeddings"]:
            model.transformer.wte.weight = model.lm_head.weight
        model.max_seq_length = task.seq_length
        self.plain = model
        self.model = self.fabric.setup(torch.compile(model) if task.mode == "compiled" else model)
        options = {name: task.optimizer[name] for name in ("lr", "betas", "eps", "weight_decay")}
        fused = self.fabric.device.type != "cpu"  # the default of litgpt's pretrain command
        optimizer = instantiate_torch_optimizer(
            {"class_path": "torch.optim.AdamW", "init_args": options}, self.model.parameters(), fused=fused
        )
        self.optimizer = self.fabric.setup_optimizers(optimizer)
        tokens, _ = task.batch(1)
        self.facts = collect_facts(
            task,
            model,
            compute_dtype=lambda: self._compute_dtype(tokens[:1, :8]),
            optimizer=f"AdamW, {'fused' if fused else 'not fused: the default on CPU'}",
            attention="scaled_dot_product_attention",
            versions={"litgpt": version("litgpt"), "lightning": version("lightning")},
        )

    def _compute_dtype(self, tokens: torch.Tensor) -> str:
        """Return the matmul dtype of the eager model, which shares its weights with the compiled one."""

        def forward() -> None:
            with self.fabric.autocast():
                self.plain(tokens)

        return matmul_dtype(self.plain, "transformer.h.0.mlp.proj", forward)

    def step(self, number: int) -> float:
        tokens, labels = self.task.batch(number)
        loss = chunked_cross_entropy(self.model(tokens), labels)
        self.fabric.backward(loss)
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.task.optimizer["clip"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def litgpt_config(task: TrainingTask) -> Config:
    """Return litgpt's Config of the task's model."""
    model = task.model
    return Config(
        name=task.preset,
        block_size=task.seq_length,
        n_layer=model["num_hidden_layers"],
        n_embd=model["hidden_size"],
        vocab_size=model["vocab_size"],
        padded_vocab_size=model["vocab_size"],
        n_head=model["num_attention_heads"],
        n_query_groups=model["num_key_value_heads"],
        head_size=model["head_dim"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=model["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
        intermediate_size=model["intermediate_size"],
        rope_base=int(model["rope_theta"]),
    )


if __name__ == "__main__":
    task = read_task()
    serve(task, lambda: LitgptTrainer(task))
