"""Memory forecast against rehearsals: each layout's peak within 10 % (exact mode: 13 %), its states exactly."""

from __future__ import annotations

import pytest

from megatron_llama.plan.memory import stage_footprints
from megatron_llama.tools.rehearse.cli import plan_rehearsal
from megatron_llama.tools.rehearse.rehearsal import rehearse
from megatron_llama.tools.rehearse.report import GATHERED, HOST, OPTIMIZER, WEIGHTS

WITHIN = 0.10
MODEL = {
    "model.hidden_size": 256,
    "model.num_hidden_layers": 4,
    "model.num_attention_heads": 8,
    "model.num_key_value_heads": 4,
    "model.intermediate_size": 704,
    "model.vocab_size": 8000,
    "data.seq_length": 512,
    "trainer.micro_batch_size": 2,
    "trainer.global_batch_size": 8,
    "trainer.precision": "bf16",
}
TP2, PP2, FULL, SELECTIVE = "trainer.tp=2", "trainer.pp=2", "trainer.recompute=full", "trainer.recompute=selective"
CP2, ULYSSES = "trainer.cp=2", "trainer.cp_comm=ulysses"
TWO = "model.num_hidden_layers=2"
ELEMENTWISE = "trainer.recompute=elementwise"
LORA, ALL = "finetune=lora", "finetune.lora_target_modules=all-linear"
CHUNKS = "trainer.mlp_chunks=8"
LONG = ("data.seq_length=4096", "trainer.micro_batch_size=1", "model.vocab_size=512")
FAST = {
    "tp2 pp2, zero 2": (0, TP2, PP2, TWO, "trainer.dp=2", "trainer.zero=2"),
    "zero 3, full recompute": (0, TWO, "trainer.dp=2", "trainer.zero=3", FULL),
    "elementwise": (0, TWO, ELEMENTWISE, "data.seq_length=2048", "model.vocab_size=512"),
    "offload": (0, "trainer.offload=[activations,optimizer]", "data.seq_length=2048", "model.vocab_size=512"),
}
EXACT = "trainer.exact=true"
WITHIN_EXACT = 0.13
SLOW = {
    "exact": (0, EXACT),
    "exact, fp32": (0, EXACT, "trainer.precision=fp32"),
    "exact, tp2": (0, EXACT, TP2),
    "exact, zero 1": (0, EXACT, "trainer.dp=4"),
    "exact, zero 3": (0, EXACT, "trainer.dp=2", "trainer.zero=3"),
    "exact, tp2 pp2, zero 2": (0, EXACT, TP2, PP2, "trainer.dp=2", "trainer.zero=2"),
    "exact, cp2": (0, EXACT, CP2, ULYSSES, "data.seq_length=2048"),
    "fp32": (0, "trainer.precision=fp32"),
    "bf16": (0,),
    "bf16_sr": (0, "trainer.precision=bf16_sr"),
    "one micro batch": (0, "trainer.global_batch_size=2"),
    "one micro batch, full": (0, "trainer.global_batch_size=2", FULL),
    "one micro batch, tied": (0, "trainer.global_batch_size=2", "model.tie_word_embeddings=true"),
    "one micro batch, tp2, large vocabulary": (0, "trainer.global_batch_size=2", TP2, "model.vocab_size=32000"),
    "tp2": (0, TP2),
    "tp2 without sp": (0, TP2, "trainer.sp=false"),
    "tp8, copied kv heads": (0, "trainer.tp=8"),
    "zero 0": (0, "trainer.dp=2", "trainer.zero=0"),
    "zero 1": (0, "trainer.dp=4"),
    "zero 2": (0, "trainer.dp=4", "trainer.zero=2"),
    "zero 3": (0, "trainer.dp=2", "trainer.zero=3"),
    "second copy": (0, "trainer.dp=4", "trainer.zero=3", "trainer.secondary_group=2"),
    "zero 1, exchanged in int8": (0, "trainer.dp=4", "trainer.grad_reduce=int8"),
    "zero 3, all in int8": (
        0,
        "trainer.dp=4",
        "trainer.zero=3",
        "trainer.grad_reduce=int8",
        "trainer.param_gather=int8",
    ),
    "hybrid": (0, "trainer.dp=4", "trainer.zero=3", "trainer.shard_group=2"),
    "selective": (0, SELECTIVE),
    "elementwise, fp32": (0, ELEMENTWISE, "trainer.precision=fp32"),
    "offload": (0, "trainer.offload=[activations]"),
    "offload, long": (0, "trainer.offload=[activations]", "data.seq_length=2048", "model.vocab_size=512"),
    "offload, full": (0, "trainer.offload=[activations,optimizer]", FULL),
    "tp2 elementwise": (0, TP2, ELEMENTWISE),
    "lora elementwise": (0, LORA, ALL, ELEMENTWISE),
    "full in every 3rd block": (0, FULL, "trainer.recompute_every=3"),
    "full": (0, FULL),
    "tp2 full": (0, TP2, FULL),
    "mlp chunks": (0, CHUNKS),
    "mlp chunks, long": (0, CHUNKS, *LONG),
    "mlp chunks, full, long": (0, CHUNKS, FULL, *LONG),
    "mlp chunks, full, tp2, long": (0, CHUNKS, FULL, TP2, *LONG),
    "mlp chunks, elementwise, fp32": (0, CHUNKS, ELEMENTWISE, "trainer.precision=fp32"),
    "mlp chunks, full, offload, cp2, long": (0, CHUNKS, FULL, CP2, "trainer.offload=[activations]", *LONG),
    "mlp chunks, full, LoRA": (0, CHUNKS, FULL, LORA, ALL, *LONG),
    "pp2, first": (0, PP2),
    "pp2, last": (1, PP2),
    "pp4, third": (2, "trainer.pp=4"),
    "pp2 vpp2, first": (0, PP2, "trainer.vpp=2"),
    "pp2 vpp2, last": (1, PP2, "trainer.vpp=2"),
    "pp2 full": (0, PP2, FULL),
    "pp2 zero 3": (0, PP2, "trainer.dp=2", "trainer.zero=3"),
    "uneven": (1, PP2, "trainer.pipeline_layers=[1,3]"),
    "tied": (0, "model.tie_word_embeddings=true"),
    "lora": (0, LORA),
    "lora on all": (0, LORA, ALL),
    "lora zero 3": (0, LORA, "trainer.dp=2", "trainer.zero=3"),
    "lora full": (0, LORA, FULL),
    "lora nf4": (0, LORA, "finetune.frozen_dtype=nf4"),
    "documents": (0, "data.document_mask=true"),
    "long": (0, "data.seq_length=4096", "trainer.micro_batch_size=1"),
    "small vocabulary": (0, "model.vocab_size=512"),
    "cp2": (0, CP2),
    "cp4 tp2, long": (0, "trainer.cp=4", TP2, "data.seq_length=2048", "model.vocab_size=512"),
    "cp4 full, long": (0, "trainer.cp=4", FULL, "data.seq_length=4096", "trainer.micro_batch_size=1"),
    "cp2 full, fp32, long": (
        0,
        CP2,
        FULL,
        "trainer.precision=fp32",
        "data.seq_length=4096",
        "trainer.micro_batch_size=1",
        "model.vocab_size=512",
    ),
    "cp2 ulysses": (0, CP2, ULYSSES),
    "cp4 ulysses, long": (0, "trainer.cp=4", ULYSSES, "data.seq_length=2048", "model.vocab_size=512"),
    "cp2 ulysses, full": (0, CP2, ULYSSES, FULL),
    "qwen2, tp2": (0, TP2, "model.model_type=qwen2"),
    "qwen3": (0, "model.model_type=qwen3"),
    "qwen3, elementwise": (0, ELEMENTWISE, "model.model_type=qwen3"),
    "qwen3, full": (0, FULL, "model.model_type=qwen3"),
    "qwen2, lora nf4": (0, LORA, ALL, "finetune.frozen_dtype=nf4", "model.model_type=qwen2"),
    "qwen3, lora int8": (0, LORA, ALL, "finetune.frozen_dtype=int8", "model.model_type=qwen3"),
    "olmo2": (0, "model.model_type=olmo2"),
    "olmo2, tp2": (0, TP2, "model.model_type=olmo2"),
    "olmo2, elementwise": (0, ELEMENTWISE, "model.model_type=olmo2"),
    "olmo2, elementwise, long": (
        *(0, ELEMENTWISE, "model.model_type=olmo2"),
        *("data.seq_length=2048", "model.vocab_size=512"),
    ),
    "olmo2, full": (0, FULL, "model.model_type=olmo2"),
    "olmo2, lora nf4": (0, LORA, ALL, "finetune.frozen_dtype=nf4", "model.model_type=olmo2"),
    "biases": (0, TP2, "model.attention_bias=true", "model.mlp_bias=true"),
    "QK-Clip, full": (0, FULL, "optim.qk_clip=100", "data.seq_length=2048", "model.vocab_size=512"),
    "QK-Clip, cp2": (0, CP2, "optim.qk_clip=100", "data.seq_length=2048", "model.vocab_size=512"),
    "sgd": (0, "optim.name=sgd"),
    "8-bit states on the host": (0, "trainer.offload=[optimizer]", "optim.state_bits=8"),
    "8-bit states, zero 2": (0, TP2, "trainer.dp=2", "trainer.zero=2", "optim.state_bits=8"),
}


def check(stage: int, *overrides: str) -> None:
    """Compare the forecast of a stage's first rank with its rehearsal."""
    settings = {name: value for name, value in MODEL.items() if not any(o.startswith(f"{name}=") for o in overrides)}
    plan, _ = plan_rehearsal([*(f"{name}={value}" for name, value in settings.items()), *overrides])
    forecast = stage_footprints(plan)[stage]
    rehearsed = rehearse(plan, plan.grid.rank(pp=stage))
    within = WITHIN_EXACT if EXACT in overrides else WITHIN
    assert forecast.total == pytest.approx(rehearsed.peak, rel=within), (forecast, rehearsed.at_peak, rehearsed.moment)
    # Adam's step counts are 4-byte tensors. Weights gathered by ZeRO 3 are buffers in the forecast.
    states = rehearsed.at_rest.get(OPTIMIZER, 0)
    assert forecast.optimizer == pytest.approx(states, abs=4096), "optimizer states"
    assert forecast.host == pytest.approx(rehearsed.most.get(HOST, 0), rel=WITHIN), "host memory"
    if plan.config.trainer.zero < 3 and plan.num_microbatches > 1:
        most = rehearsed.most[WEIGHTS] + rehearsed.most.get(GATHERED, 0)
        assert forecast.weights == pytest.approx(most, rel=2e-3), "shards and compute-dtype copies"


@pytest.mark.parametrize("name", FAST)
def test_forecast_is_within_10_percent_of_the_rehearsal(name: str) -> None:
    check(*FAST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_forecast_of_each_layout(name: str) -> None:
    check(*SLOW[name])
