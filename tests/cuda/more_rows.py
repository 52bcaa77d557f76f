"""Settings without a row in the layout table, which run on the runtime as well: name, ranks, overrides."""

from __future__ import annotations

TP, CP, ZERO_3 = "trainer.tp=2", "trainer.cp=2", "trainer.zero=3"
LORA, DORA = "finetune=lora", "finetune.use_dora=true"
TENSORWISE, ROWWISE = "trainer.float8=tensorwise", "trainer.float8=rowwise"
QUANTIZED = ["model.hidden_size=128", "model.intermediate_size=128"]
YARN = "model.rope_scaling={rope_type: yarn, factor: 4.0, original_max_position_embeddings: 8}"
LONG = [YARN, "model.max_position_embeddings=32", "data.seq_length=32", "trainer.mlp_chunks=2"]
ROWS: list[tuple[str, int, list[str]]] = [
    ("LoRA, tp2·pp2+sp", 4, [LORA, TP, "trainer.pp=2"]),
    ("LoRA, int8, zero 3", 2, [LORA, "finetune.frozen_dtype=int8", ZERO_3, *QUANTIZED]),
    ("LoRA, nf4, tp2+sp", 2, [LORA, "finetune.frozen_dtype=nf4", TP, *QUANTIZED]),
    ("DoRA, tp2+sp", 2, [LORA, DORA, TP]),
    ("DoRA, dp2, zero 3, full recompute", 2, [LORA, DORA, ZERO_3, "trainer.recompute=full"]),
    ("float8, tensorwise, tp2+sp", 2, [TENSORWISE, TP]),
    ("float8, rowwise, pp2·dp2, zero 3", 4, [ROWWISE, "trainer.pp=2", ZERO_3]),
    ("float8, tensorwise, cp2, ulysses", 2, [TENSORWISE, CP, "trainer.cp_comm=ulysses"]),
    ("float8, rowwise, LoRA, tp2+sp", 2, [ROWWISE, LORA, TP]),
    ("float8, tensorwise, LoRA, dp2, zero 3", 2, [TENSORWISE, LORA, ZERO_3]),
    ("long context, cp2, full recompute", 2, [CP, "trainer.recompute=full", *LONG]),
    ("long context, cp2, ulysses, documents", 2, [CP, "trainer.cp_comm=ulysses", "data.document_mask=true", *LONG]),
    ("spike guard, dp2, zero 1", 2, ["trainer.spike_guard=skip"]),
    ("spike guard, rewind, tp2+sp", 2, ["trainer.spike_guard=rewind", TP]),
    ("bf16_sr, tp2+sp", 2, ["trainer.precision=bf16_sr", TP]),
    ("bf16_pure, dp2, zero 2", 2, ["trainer.precision=bf16_pure", "trainer.zero=2"]),
    ("fp32_OptStates", 1, ["trainer.precision=fp32_OptStates"]),
    ("SGD, dp2, zero 1", 2, ["optim.name=sgd"]),
    ("1-bit Adam, dp2", 2, ["optim.name=onebit_adam", "trainer.zero=0", "optim.freeze_step=1"]),
    ("gradients in int8, dp2, zero 2", 2, ["trainer.grad_reduce=int8", "trainer.zero=2"]),
    ("weights in int8, dp2, zero 3", 2, ["trainer.param_gather=int8", ZERO_3]),
    ("secondary group, dp4, zero 3", 4, ["trainer.secondary_group=2", ZERO_3, "trainer.micro_batch_size=1"]),
]
COPIES = ("trainer.check_copies_every=1", "trainer.tp=2", "trainer.zero=1")
"""Four ranks that compare their copies after each step."""
