"""A run of megatron-core's GPTModel on forked gloo ranks: it trains, saves by dist_checkpointing, and trains on.

megatron-core's writer and its optimizer wrapper call CUDA, which the ranks replace.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from torch.overrides import TorchFunctionMode

from megatron_llama.data.megatron_order import build_megatron
from megatron_llama.devices.mcore_patches import patch_mcore
from megatron_llama.plan import Plan
from tests.checkpoint.source_settings import BATCH, BETAS, DECAY, EPS, LENGTH, LR, TOKENS, VOCAB, Trained
from tests.checkpoint.source_settings import SETTINGS as COMMON
from tests.ranks import run_ranks

SHAPE = {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
ADAM = {"adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_eps": EPS, "weight_decay": DECAY, "clip_grad": 0.0}
LLAMA = {"normalization": "RMSNorm", "norm_epsilon": 1e-5, "rotary_base": 10000, "swiglu": True}
PROGRESS = dict.fromkeys("do_train do_valid do_test curr_iteration num_floating_point_operations_so_far".split(), 3)
"""Arguments that Megatron-LM's training loop sets."""
OFF = """add_bias_linear bias_activation_fusion bias_dropout_fusion apply_rope_fusion masked_softmax_fusion
    gradient_accumulation_fusion batch_p2p_comm""".split()
SETTINGS = (*COMMON, "trainer.seed=5")
"""The settings of our run that continues the source's."""


@dataclass(frozen=True)
class Source:
    """A run of the source program."""

    tp: int
    pp: int
    folder: Path
    steps: int = 3
    further: int = 5
    iterations: int = 150
    """Length of the run: three epochs of the dataset, which Megatron shuffles together."""
    plan: Plan | None = None
    """A plan with the dataset; None: random tokens."""
    files: str = "torch_dist"
    """torch_dist, or ranks: the older files."""
    dp: int = 1
    sharding: str | None = None
    """Layout of the distributed optimizer's states; None: torch's AdamW without it."""


def train_source(source: Source) -> Trained:
    """Train, save, and train on."""
    last = [result for result in run_ranks(_rank, source.tp * source.pp * source.dp, source) if result[1] is not None]
    return Trained(last[0][0], torch.cat([logits for _, logits in last], dim=-1)[..., :VOCAB])


def batch_at(step: int, samples: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels [batch, s] of a step, 0 for the first."""
    if samples is None:
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        return tokens[:, :-1], tokens[:, 1:]
    rows = [samples[step * BATCH + i] for i in range(BATCH)]
    tokens, labels = (torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in ("tokens", "labels"))
    return tokens, labels


def build_source(source: Source) -> GPTModel:
    """Replace CUDA calls in this rank, and build the model."""
    patch_mcore(torch.device("cpu"))
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # type: ignore[method-assign]
    parallel_state.initialize_model_parallel(source.tp, source.pp)
    torch.manual_seed(7)
    return _model(source)


Step = Callable[[torch.Tensor, torch.Tensor], float]
"""Trains on tokens and labels [batch, s]; returns the loss."""


def _rank(rank: int, source: Source) -> tuple[list[float], torch.Tensor | None]:
    model = build_source(source)
    samples = None if source.plan is None else build_megatron(source.plan, source.iterations * BATCH, 0)[0]
    with nullcontext() if source.sharding is None else _OnHost():
        optimizer, step = (_plain if source.sharding is None else _distributed)(model, source)
        for at in range(source.steps):
            step(*batch_at(at, samples))
        logits = logits_of(model)
        _save(model, optimizer, source)
        losses = [step(*batch_at(source.steps + n, samples)) for n in range(source.further)]
    return losses, logits if parallel_state.get_data_parallel_rank() == 0 else None


def _plain(model: GPTModel, source: Source) -> tuple[Any, Step]:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, betas=BETAS, eps=EPS)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        outputs: list[torch.Tensor] = []
        _forward(model, tokens, labels, 4, outputs)
        optimizer.step()
        return float(torch.stack([o.mean() for o in outputs]).mean()) if outputs else 0.0

    return optimizer, step


class _OnHost(TorchFunctionMode):
    """Stand-in of a GPU: tensors for CUDA are on the host, and host tensors have CUDA's type names."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.type and len(args) == 1:
            return str(function(*args)).replace("torch.", "torch.cuda.", 1)
        return args[0] if function is torch.Tensor.cuda else function(*args, **kwargs)


def _distributed(model: GPTModel, source: Source) -> tuple[Any, Step]:
    """Train with megatron-core's DistributedDataParallel and DistributedOptimizer."""
    stream = SimpleNamespace(wait_stream=lambda *_: None, wait_event=lambda *_: None)
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: stream  # type: ignore[assignment]
    common: Any = {"optimizer": "adam", "lr": LR, "min_lr": LR, "params_dtype": torch.float32}
    config = OptimizerConfig(**common, **ADAM, use_distributed_optimizer=True)
    number = parallel_state.get_data_parallel_rank()
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
    wrapped = DistributedDataParallel(model.config, settings, model)
    optimizer = get_megatron_optimizer(config, [wrapped])
    for group in optimizer.param_groups:  # as Megatron's scheduler does
        group["weight_decay"] = DECAY * group["wd_mult"]

    def step(*batch: torch.Tensor) -> float:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        tokens, labels = (part.chunk(source.dp)[number] for part in batch)
        outputs: list[torch.Tensor] = []
        _forward(wrapped, tokens, labels, 4, outputs)
        wrapped.finish_grad_sync()
        optimizer.step()
        loss = torch.stack([output.mean() for output in outputs]).mean()
        torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        return float(loss) / source.dp

    return optimizer, step


def _model(source: Source) -> GPTModel:
    config = TransformerConfig(
        **SHAPE,  # type: ignore[arg-type]
        **dict.fromkeys(OFF, False),  # type: ignore[arg-type]
        tensor_model_parallel_size=source.tp,
        pipeline_model_parallel_size=source.pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.1,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=False,
    )


def _forward(model: Any, tokens: torch.Tensor, labels: torch.Tensor | None, count: int, keep: list) -> Any:
    """Run megatron-core's schedule on ``count`` micro batches; ``keep`` gets the outputs of the last stage."""
    parts = iter(zip(tokens.chunk(count), (tokens if labels is None else labels).chunk(count), strict=True))
    positions = torch.arange(LENGTH)[None].expand(len(tokens) // count, LENGTH)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]

    def forward(data: Iterator, model: Any) -> Any:
        ids, targets = next(data)
        output = model(ids, positions, mask, labels=None if labels is None else targets)

        def loss_of(output: torch.Tensor) -> Any:
            keep.append(output.detach())
            return output.mean(), {"loss": output.mean().detach()}

        return output, loss_of

    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=parts,
        model=[model],
        num_microbatches=count,
        seq_length=LENGTH,
        micro_batch_size=len(tokens) // count,
        forward_only=labels is None,
    )


@torch.no_grad()
def logits_of(model: GPTModel) -> torch.Tensor | None:
    """Return the logits of TOKENS, on the last stage, for the vocabulary of this rank."""
    outputs: list[torch.Tensor] = []
    _forward(model, TOKENS, None, 1, outputs)
    return outputs[0] if outputs else None


def _save(model: GPTModel, optimizer: Any, source: Source) -> None:
    rank_of = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    arguments = argparse.Namespace(
        **SHAPE,
        **ADAM,
        **LLAMA,
        **PROGRESS,
        group_query_attention=True,
        seed=5,
        seq_length=LENGTH,
        split="969,30,1",
        global_batch_size=BATCH,
        train_iters=source.iterations,
        consumed_train_samples=source.steps * BATCH,
    )
    state = {"iteration": source.steps, "args": arguments, "checkpoint_version": 3.0}
    folder = source.folder / f"iter_{source.steps:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    (source.folder / "latest_checkpointed_iteration.txt").write_text(str(source.steps))
    if source.files == "ranks":
        name = f"mp_rank_{rank_of[0]:02d}" + (f"_{rank_of[1]:03d}" if source.pp > 1 else "")
        (folder / name).mkdir()
        torch.save({**state, "model": model.state_dict_for_save_checkpoint()}, folder / name / "model_optim_rng.pt")
        return
    weights = model.sharded_state_dict(prefix="")
    if source.sharding is None:
        wrapped: Any = object.__new__(FP32Optimizer)  # its __init__ allocates on CUDA
        wrapped.optimizer, wrapped.config, wrapped.is_stub_optimizer = optimizer, OptimizerConfig(), False
        states = wrapped.sharded_state_dict(weights)
    else:
        states = optimizer.sharded_state_dict(weights, metadata={"distrib_optim_sharding_type": source.sharding})
    with _manager():
        dist_checkpointing.save({**state, "model": weights, "optimizer": states}, str(folder), ("torch_dist", 1))


@contextmanager
def _manager() -> Iterator[None]:
    """Let megatron-core's writer start a process in a daemon."""
    multiprocessing.current_process()._config["daemon"] = False
    manager = multiprocessing.get_context("fork").Manager()
    filesystem_async._results_queue = manager.Queue()
    try:
        yield
    finally:
        manager.shutdown()
