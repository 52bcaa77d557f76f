"""The layouts that are compared with one process, and the rows that exact mode accepts."""

from __future__ import annotations

TP2, TP4, NO_SP = "trainer.tp=2", "trainer.tp=4", "trainer.sp=false"
PP2, PP4, VPP2 = "trainer.pp=2", "trainer.pp=4", "trainer.vpp=2"
ZERO0, ZERO1, ZERO2, ZERO3 = (f"trainer.zero={stage}" for stage in range(4))
HYBRID = "trainer.shard_group=2"
ODD, ONE_KV_HEAD = "model.vocab_size=61", "model.num_key_value_heads=1"
MUON = "optim.name=muon"
TIED = "model.tie_word_embeddings=true"
WINDOW = "model.sliding_window=5"
QWEN2, QWEN3 = "model.model_type=qwen2", "model.model_type=qwen3"  # biases of q, k, v; norms of q's and k's heads
OLMO2 = "model.model_type=olmo2"  # norms of q and k over all heads; norms after attention and feed-forward
BIASES = ["model.attention_bias=true", "model.mlp_bias=true"]
BIAS_EPS = "optim.eps=1e-3"  # gradients of k biases are near 0: Adam would divide rounding by rounding
BLOCKS = "model.sparse_attention={block: 2, num_local_blocks: 3, num_global_blocks: 1}"
DROPPING = "trainer.random_ltd={min_value: 4, require_steps: 3, seq_per_step: 4}"  # 4, 8 and 12 tokens of 16
OFFLOAD = "trainer.offload=[activations,optimizer]"
# Sequences split into two, then split with a remainder, then full: each step has another shape.
STEPS = "schedule_type: fixed_discrete, difficulty: [8, 12, 16], max_step: [1, 2]"
PIECES = f"data.curriculum=[{{metric: seqlen_reshape, {STEPS}}}]"
SHORT = PIECES.replace("reshape", "truncate")
# Rows of two blocks, so that tensor-parallel ranks get one each. Another summation order
# moves one value in 10,000 to an adjacent level, an error of 1 to 30 %; the learning rate limits its effect on weights.
# tests/optim/test_layouts.py compares bitwise with equal gradients.
EIGHT_BITS = ["optim.state_bits=8", "model.hidden_size=64", "model.num_hidden_layers=2", "optim.lr=0.0001"]
# Gathers and scatters inside matmuls, on a CPU with tests/parallel/symmetric_memory.py.
ASYNC_TP = [TP2, "trainer.compile=true", "trainer.compile_strict=true", "trainer.async_tp=true"]
# Through the kernel of compiled blocks (devices/cpu/attention.py): heads of 32, blocks of 128 tokens.
COMPILED, WIDE = ["trainer.compile=true", "trainer.compile_strict=true"], ["model.head_dim=32", "data.seq_length=144"]
CP, CP4, ULYSSES, DOCUMENTS = "trainer.cp=2", "trainer.cp=4", "trainer.cp_comm=ulysses", "data.document_mask=true"
# Frequencies depend on the length of whole sequences, 16 tokens.
DYNAMIC = ["model.rope_scaling={rope_type: dynamic, factor: 4.0}", "model.max_position_embeddings=8"]
MLP_CHUNKS = "trainer.mlp_chunks=2"
Z_LOSS = "trainer.z_loss=0.05"
QK_CLIP = "optim.qk_clip=1.0"  # below the largest logit of some heads, above others
ORIGINAL = ["optim.adjust_lr=original", "optim.matrix_lr=0.005"]
SIX_SAMPLES, EVERY_2ND = "trainer.global_batch_size=6", "trainer.recompute_every=2"
DETERMINISTIC = "trainer.deterministic=true"
FULL, ELEMENTWISE, SELECTIVE = (f"trainer.recompute={kind}" for kind in ("full", "elementwise", "selective"))
SIX_LAYERS = "model.num_hidden_layers=6"
# Of a global batch of 8; without either it is 2. Ranks that meet at each matrix are slow on two cores, so theirs are
# larger; each layout accumulates over two micro batches or more.
MICRO_1, MICRO_4 = "trainer.micro_batch_size=1", "trainer.micro_batch_size=4"
ONE_MICRO_BATCH = "trainer.micro_batch_size=8"
# The rows that run with every `make test`: together they cover each axis, each option and the hardest combinations.
QUICK = {
    "tp2+sp",
    "tp4+sp, kv heads < tp",
    "tp4, olmo2, kv heads < tp",
    "tp4+sp, biases, kv heads < tp",
    "tp2·dp2+sp, qwen3, zero 3, elementwise recompute",
    "pp2, tied",
    "pp2·vpp2, uneven",
    "pp2·vpp2·dp2, zero 3",
    "dp2, zero 0",
    "dp2, zero 1",
    "dp2, zero 2",
    "dp4, hybrid, zero 3",
    "tp2·pp2·dp2+sp, zero 3, tied, odd",
    "tp2·dp2+sp, zero 3, mlp chunks, full recompute",
    "tp2·pp2+sp, window",
    "pp2·dp2, random-LTD, zero 3",
    "tp2·pp2+sp, shorter sequences",
    "tp2·dp2+sp, zero 2, 8-bit states",
    "cp2·tp2+sp, documents",
    "cp4, ulysses, kv heads < cp",
    "micro batches of 8",
    "tp2·pp2+sp, odd vocabulary, z-loss",
    "tp2·dp2+sp, muon, QK-Clip, zero 3, full recompute",
    "deterministic",
}
# name, ranks, overrides of the layout, overrides of the model (the oracle gets these too)
LAYOUTS: list[tuple[str, int, list[str], list[str]]] = [
    ("tp2", 2, [TP2, NO_SP], []),
    ("tp2+sp", 2, [TP2], []),
    ("tp4+sp, kv heads < tp", 4, [TP4, MICRO_4], []),
    ("tp4, one kv head", 4, [TP4, NO_SP, MICRO_4], [ONE_KV_HEAD]),
    ("tp2+sp, qwen2", 2, [TP2], [QWEN2, BIAS_EPS]),
    ("tp4+sp, qwen2, kv heads < tp", 4, [TP4, MICRO_4], [QWEN2, BIAS_EPS]),
    ("tp2·dp2+sp, qwen2, zero 3, full recompute", 4, [TP2, ZERO3, FULL], [QWEN2, BIAS_EPS]),
    ("pp2, qwen2, elementwise recompute", 2, [PP2, ELEMENTWISE], [QWEN2, BIAS_EPS]),
    ("cp2, qwen2", 2, [CP], [QWEN2, BIAS_EPS]),
    ("tp2, qwen3", 2, [TP2, NO_SP], [QWEN3]),
    ("tp2+sp, qwen3", 2, [TP2], [QWEN3]),
    ("tp4, qwen3, kv heads < tp", 4, [TP4, NO_SP, MICRO_4], [QWEN3]),
    ("tp2·dp2+sp, qwen3, zero 3, elementwise recompute", 4, [TP2, ZERO3, ELEMENTWISE], [QWEN3]),
    ("pp2·vpp2·dp2, qwen3, selective recompute", 4, [PP2, VPP2, SELECTIVE], [QWEN3]),
    ("cp2, qwen3, ulysses", 2, [CP, ULYSSES], [QWEN3]),
    ("tp2, olmo2", 2, [TP2, NO_SP], [OLMO2]),
    ("tp2·pp2+sp, olmo2", 4, [TP2, PP2], [OLMO2]),
    ("tp4, olmo2, kv heads < tp", 4, [TP4, NO_SP, MICRO_4], [OLMO2]),
    ("tp4+sp, olmo2, one kv head", 4, [TP4, MICRO_4], [OLMO2, ONE_KV_HEAD]),
    ("tp2·dp2+sp, olmo2, zero 3, elementwise recompute", 4, [TP2, ZERO3, ELEMENTWISE], [OLMO2]),
    ("tp2·dp2+sp, olmo2, zero 2, full recompute", 4, [TP2, ZERO2, FULL], [OLMO2]),
    ("tp2·dp2, olmo2, zero 0", 4, [TP2, ZERO0], [OLMO2]),
    ("tp2·dp2+sp, olmo2, zero 1, offloaded", 4, [TP2, OFFLOAD], [OLMO2]),
    ("tp2·pp2·vpp2+sp, olmo2, selective recompute", 4, [TP2, PP2, VPP2, SELECTIVE], [OLMO2]),
    ("cp2·tp2+sp, olmo2", 4, [CP, TP2], [OLMO2]),
    ("cp2·tp2+sp, olmo2, ulysses, tied", 4, [CP, TP2, ULYSSES], [OLMO2, TIED]),
    ("tp2+sp, olmo2, random-LTD, biases", 2, [TP2], [OLMO2, BIASES[0], DROPPING, BIAS_EPS]),
    ("tp2·dp2+sp, olmo2, zero 3, selective recompute, compiled", 4, [*COMPILED, TP2, ZERO3, SELECTIVE], [*WIDE, OLMO2]),
    ("tp2+sp, olmo2, async_tp", 2, ASYNC_TP, [OLMO2]),
    ("tp4+sp, biases, kv heads < tp", 4, [TP4, MICRO_4], [*BIASES, BIAS_EPS]),
    ("tp2·pp2, biases", 4, [TP2, PP2, NO_SP], [*BIASES, BIAS_EPS]),
    ("tp2·dp2+sp, biases, zero 3, full recompute", 4, [TP2, ZERO3, FULL], [*BIASES, BIAS_EPS]),
    ("tp2+sp, qwen3, biases", 2, [TP2], [QWEN3, BIASES[0], BIAS_EPS]),
    ("tp2+sp, biases, async_tp", 2, ASYNC_TP, [*BIASES, BIAS_EPS]),
    ("tp2+sp, qwen2, async_tp", 2, ASYNC_TP, [QWEN2, BIAS_EPS]),
    ("tp2+sp, qwen3, async_tp", 2, ASYNC_TP, [QWEN3]),
    ("tp2+sp, odd vocabulary", 2, [TP2], [ODD]),
    ("tp4, odd vocabulary, a rank of padding", 4, [TP4, MICRO_4], ["model.vocab_size=5"]),
    ("tp2+sp, tied", 2, [TP2], [TIED]),
    ("pp2", 2, [PP2], []),
    ("pp4", 4, [PP4], []),
    ("pp2, uneven", 2, [PP2, "trainer.pipeline_layers=[3,1]"], []),
    ("pp2, tied", 2, [PP2], [TIED]),
    ("pp2·vpp2", 2, [PP2, VPP2], []),
    ("pp2·vpp2, uneven", 2, [PP2, VPP2, "trainer.pipeline_layers=[4,2]"], [SIX_LAYERS]),
    ("tp2·pp2·vpp2+sp", 4, [TP2, PP2, VPP2], []),
    ("pp2·vpp2·dp2, zero 1", 4, [PP2, VPP2, ZERO1], []),
    ("pp2·vpp2·dp2, zero 2", 4, [PP2, VPP2, ZERO2], []),
    ("pp2·vpp2·dp2, zero 3", 4, [PP2, VPP2, ZERO3], []),
    ("dp2, zero 0", 2, [ZERO0], []),
    ("dp2, zero 1", 2, [ZERO1], []),
    ("dp2, zero 2", 2, [ZERO2], []),
    ("dp2, zero 3", 2, [ZERO3], []),
    ("dp4, hybrid, zero 3", 4, [ZERO3, HYBRID, MICRO_1], []),
    ("dp4, hybrid, zero 1", 4, [ZERO1, HYBRID, MICRO_1], []),
    ("tp2·pp2+sp", 4, [TP2, PP2], []),
    ("tp2·dp2+sp, zero 2", 4, [TP2, ZERO2], []),
    ("pp2·dp2, zero 3, tied", 4, [PP2, ZERO3], [TIED]),
    ("tp2·pp2·dp2+sp, zero 1", 8, [TP2, PP2], []),
    ("tp2·pp2·dp2+sp, zero 3, tied, odd", 8, [TP2, PP2, ZERO3], [TIED, ODD]),
    ("tp2·dp3+sp, one kv head, shards without its rows", 6, [TP2, MICRO_1], [ONE_KV_HEAD, SIX_SAMPLES]),
    ("mlp chunks", 1, ["trainer.mlp_chunks=3"], []),
    ("tp2+sp, olmo2, mlp chunks, full recompute", 2, [TP2, MLP_CHUNKS, FULL], [OLMO2]),
    ("tp2, mlp chunks", 2, [TP2, NO_SP, "trainer.mlp_chunks=4"], []),
    ("tp2·dp2+sp, zero 3, mlp chunks, full recompute", 4, [TP2, ZERO3, "trainer.mlp_chunks=3", FULL], []),
    ("tp2·pp2+sp, mlp chunks, elementwise recompute", 4, [TP2, PP2, MLP_CHUNKS, ELEMENTWISE], []),
    ("pp2·vpp2, mlp chunks, offloaded", 2, [PP2, VPP2, MLP_CHUNKS, OFFLOAD], []),
    ("cp2·dp2, zero 3, mlp chunks, full recompute, window", 4, [CP, ZERO3, MLP_CHUNKS, FULL], [WINDOW]),
    ("selective recompute", 1, [SELECTIVE], []),
    ("elementwise recompute", 1, [ELEMENTWISE], []),
    ("tp2·dp2+sp, zero 3, elementwise recompute", 4, [TP2, ZERO3, ELEMENTWISE], []),
    ("pp2·dp2, window, elementwise recompute", 4, [PP2, ELEMENTWISE], [WINDOW]),
    ("full recompute", 1, [FULL], []),
    ("pp2, full recompute of every 2nd block", 2, [PP2, FULL, EVERY_2ND], []),
    ("tp2·pp2+sp, selective recompute", 4, [TP2, PP2, SELECTIVE], []),
    ("tp2·dp2+sp, zero 3, full recompute", 4, [TP2, ZERO3, FULL], []),
    ("pp2·vpp2·dp2, zero 3, offloaded, full recompute", 4, [PP2, VPP2, ZERO3, FULL, OFFLOAD], []),
    ("tp2·dp2+sp, zero 2, window, offloaded", 4, [TP2, ZERO2, OFFLOAD], [WINDOW]),
    ("tp2·pp2+sp, window", 4, [TP2, PP2], [WINDOW]),
    ("pp2·dp2, window, selective recompute", 4, [PP2, SELECTIVE], [WINDOW]),
    ("tp2·dp2+sp, blocks, zero 3, full recompute", 4, [TP2, ZERO3, FULL], [BLOCKS]),
    ("tp4+sp, blocks, kv heads < tp", 4, [TP4, MICRO_4], [BLOCKS]),
    ("tp2+sp, random-LTD", 2, [TP2], [DROPPING]),
    ("tp2, random-LTD, window", 2, [TP2, NO_SP], [DROPPING, WINDOW]),
    ("pp2·dp2, random-LTD, zero 3", 4, [PP2, ZERO3], [DROPPING]),
    ("tp2·pp2·vpp2+sp, random-LTD, full recompute", 4, [TP2, PP2, VPP2, FULL], [DROPPING]),
    ("tp2·pp2·dp2+sp, random-LTD, zero 3, selective recompute", 8, [TP2, PP2, ZERO3, SELECTIVE], [DROPPING]),
    ("tp2+sp, async_tp", 2, ASYNC_TP, []),
    ("tp2·dp2+sp, zero 3, full recompute, async_tp", 4, [*ASYNC_TP, ZERO3, FULL], []),
    ("dp2, zero 3, full recompute, compiled", 2, [*COMPILED, ZERO3, FULL], WIDE),
    ("tp2·pp2+sp, window, compiled", 4, [*COMPILED, TP2, PP2], [*WIDE, WINDOW]),
    ("tp2·pp2+sp, shorter sequences", 4, [TP2, PP2], [PIECES]),
    ("pp2·vpp2·dp2, zero 3, short sequences first", 4, [PP2, VPP2, ZERO3], [SHORT]),
    ("tp2·dp2+sp, zero 2, 8-bit states", 4, [TP2, ZERO2], EIGHT_BITS),
    ("tp2·pp2·dp2+sp, zero 3, 8-bit states, offloaded", 8, [TP2, PP2, ZERO3, OFFLOAD], EIGHT_BITS),
    ("tp2+sp, 8-bit states, compiled", 2, [TP2, *COMPILED], EIGHT_BITS),
    ("cp2", 2, [CP], []),
    ("cp4", 4, [CP4], []),
    ("cp2·tp2+sp", 4, [CP, TP2], []),
    ("cp2·tp2, odd vocabulary", 4, [CP, TP2, NO_SP], [ODD]),
    ("cp2·pp2, tied", 4, [CP, PP2], [TIED]),
    ("cp2·pp2·vpp2", 4, [CP, PP2, VPP2], []),
    ("cp2·dp2, zero 0", 4, [CP, ZERO0], []),
    ("cp2·dp2, zero 1", 4, [CP], []),
    ("cp2·dp2, zero 2", 4, [CP, ZERO2], []),
    ("cp2·dp2, zero 3, window", 4, [CP, ZERO3], [WINDOW]),
    ("cp2·dp2, hybrid, zero 3", 4, [CP, ZERO3, HYBRID], []),
    ("cp2·tp2·pp2+sp", 8, [CP, TP2, PP2], []),
    ("cp2, documents", 2, [CP], [DOCUMENTS]),
    ("cp2·tp2+sp, documents", 4, [CP, TP2], [DOCUMENTS]),
    ("cp2·pp2, documents, window", 4, [CP, PP2], [DOCUMENTS, WINDOW]),
    ("cp4, blocks", 4, [CP4], [BLOCKS]),
    ("cp4, documents, blocks, full recompute", 4, [CP4, FULL], [DOCUMENTS, BLOCKS]),
    ("cp2, selective recompute", 2, [CP, SELECTIVE], []),
    ("cp2, elementwise recompute", 2, [CP, ELEMENTWISE], []),
    ("cp2·dp2, zero 3, full recompute of every 2nd block, offloaded", 4, [CP, ZERO3, FULL, EVERY_2ND, OFFLOAD], []),
    ("cp2·tp2+sp, 8-bit states", 4, [CP, TP2], EIGHT_BITS),
    ("cp2, dynamic RoPE", 2, [CP], DYNAMIC),
    ("cp2, shorter sequences", 2, [CP], [PIECES]),
    ("cp2·tp2+sp, short sequences first", 4, [CP, TP2], [SHORT]),
    ("cp2, 1-bit Adam before its exchange", 2, [CP], ["optim.name=onebit_adam", ZERO0, "optim.freeze_step=10"]),
    ("cp2, compiled", 2, [CP, *COMPILED], WIDE),
    ("cp2·dp2, zero 3, documents, full recompute, compiled", 4, [CP, ZERO3, FULL, *COMPILED], [*WIDE, DOCUMENTS]),
    ("cp2, ulysses", 2, [CP, ULYSSES], []),
    ("cp4, ulysses, kv heads < cp", 4, [CP4, ULYSSES], []),
    ("cp2·tp2+sp, ulysses, one kv head", 4, [CP, TP2, ULYSSES], [ONE_KV_HEAD]),
    ("cp2·pp2·dp2, ulysses, zero 3, documents", 8, [CP, PP2, ZERO3, ULYSSES], [DOCUMENTS]),
    ("cp2, ulysses, window, full recompute", 2, [CP, ULYSSES, FULL], [WINDOW]),
    ("cp2, ulysses, blocks, selective recompute", 2, [CP, ULYSSES, SELECTIVE], [BLOCKS]),
    ("cp2, ulysses, elementwise recompute", 2, [CP, ULYSSES, ELEMENTWISE], []),
    ("cp2, ulysses, offloaded", 2, [CP, ULYSSES, OFFLOAD], []),
    ("cp2, ulysses, compiled", 2, [CP, ULYSSES, *COMPILED], WIDE),
    ("cp2·pp2, uneven stages", 4, [CP, PP2], ["model.num_hidden_layers=5"]),
    ("micro batches of 1", 1, [MICRO_1], []),
    ("micro batches of 8", 1, [ONE_MICRO_BATCH], []),
    ("pp2·dp2, micro batches of 1", 4, [PP2, MICRO_1], []),
    ("tp2·pp2+sp, odd vocabulary, z-loss", 4, [TP2, PP2], [ODD, Z_LOSS]),
    ("tp2·cp2, tied, compiled, z-loss", 4, [TP2, CP, *COMPILED], [*WIDE, TIED, Z_LOSS]),
    ("tp4+sp, muon, kv heads < tp", 4, [TP4, MICRO_4], [MUON]),
    ("tp2·dp2+sp, muon, zero 3", 4, [TP2, ZERO3], [MUON]),
    ("tp2·dp2+sp, muon, zero 0, split heads", 4, [TP2, ZERO0], [MUON, "optim.split_heads=true"]),
    ("pp2·vpp2·dp2, muon, zero 1, original scale", 4, [PP2, VPP2, ZERO1], [MUON, *ORIGINAL]),
    ("dp4, muon, hybrid, zero 2", 4, [ZERO2, HYBRID, MICRO_1], [MUON]),
    ("tp2·cp2+sp, muon, qwen2", 4, [TP2, CP], [MUON, QWEN2, BIAS_EPS]),
    ("pp2·dp3, muon, uneven shards", 6, [PP2, MICRO_1], [MUON, SIX_SAMPLES]),
    ("tp2+sp, QK-Clip", 2, [TP2], [QK_CLIP]),
    ("tp4+sp, QK-Clip, kv heads < tp", 4, [TP4, MICRO_4], [QK_CLIP]),
    ("dp2, QK-Clip, zero 0", 2, [ZERO0], [QK_CLIP]),
    ("tp2·dp2+sp, muon, QK-Clip, zero 3, full recompute", 4, [TP2, ZERO3, FULL], [MUON, QK_CLIP]),
    ("dp4, muon, QK-Clip, hybrid, zero 2, biases", 4, [ZERO2, HYBRID, MICRO_1], [MUON, QK_CLIP, QWEN2, BIAS_EPS]),
    ("pp2·vpp2·dp2, QK-Clip, window, selective recompute", 4, [PP2, VPP2, SELECTIVE], [QK_CLIP, WINDOW]),
    ("tp2·pp2+sp, muon, QK-Clip, documents", 4, [TP2, PP2], [MUON, QK_CLIP, DOCUMENTS]),
    ("cp2, QK-Clip, documents", 2, [CP], [QK_CLIP, DOCUMENTS]),
    ("cp2·dp2, QK-Clip, zero 1, window", 4, [CP], [QK_CLIP, WINDOW]),
    ("cp4, muon, QK-Clip, ulysses, kv heads < cp", 4, [CP4, ULYSSES], [MUON, QK_CLIP]),
    ("cp2·tp2, QK-Clip, ulysses, documents, blocks", 4, [CP, TP2, ULYSSES], [QK_CLIP, DOCUMENTS, BLOCKS]),
    ("tp2+sp, QK-Clip, random-LTD, window, offloaded", 2, [TP2, OFFLOAD], [QK_CLIP, DROPPING, WINDOW]),
    ("deterministic", 1, [DETERMINISTIC], []),
    ("tp2·pp2+sp, odd vocabulary, deterministic", 4, [DETERMINISTIC, TP2, PP2], [ODD]),
    ("cp2·dp2, zero 3, full recompute, deterministic", 4, [DETERMINISTIC, CP, ZERO3, FULL], []),
]

EXACT = "trainer.exact=true"
REJECTED = {
    COMPILED[0]: "compiled",
    "trainer.mlp_chunks": "MLP chunks",
    "trainer.grad_reduce": "rounded messages",
    "trainer.param_gather": "rounded messages",
    "trainer.float8": "float8",
    "optim.qk_clip": "logits by other matmuls",
    "optim.name=onebit_adam": "exchanged signs",
}
"""Overrides, or their beginnings, that exact mode rejects (plan/rules/numerics.py)."""
# Context-parallel ranks have whole spans of sequences from 1,024 tokens on.
LONG = {"data.seq_length": "1024", "trainer.global_batch_size": "4", "model.max_position_embeddings": "256"}
"""Settings of rows with context parallelism; the last one, a quarter of the length, with dynamic RoPE only."""
EXACT_QUICK = {
    "pp2·vpp2·dp2, zero 3",
    "tp2·pp2+sp, olmo2",
    "tp2·dp2+sp, muon, zero 3",
}


def rejection(layout: list[str], model: list[str]) -> str | None:
    """Return why exact mode rejects a row; None if it does not."""
    overrides = [*layout, *model]
    for override in overrides:
        for beginning, reason in REJECTED.items():
            if override.startswith(beginning):
                return reason
    divided = CP in layout or CP4 in layout
    if divided and any(override.startswith(("data.curriculum", "trainer.random_ltd")) for override in overrides):
        return "lengths vary"
    return None


def exact_rows() -> list[tuple[str, int, list[str], list[str]]]:
    """Return (name, ranks, overrides of the layout, overrides of the model) of the accepted rows.

    Rows with context parallelism have longer sequences and exchange heads.
    """
    accepted = []
    for name, ranks, layout, model in LAYOUTS:
        if rejection(layout, model) is not None:
            continue
        if CP in layout or CP4 in layout:
            names = [name for name in LONG if not name.startswith("model") or any(name in x for x in model)]
            layout, model = ([x for x in part if x.split("=")[0] not in LONG] for part in (layout, model))
            layout, model = [*layout, ULYSSES], [*model, *(f"{name}={LONG[name]}" for name in names)]
        accepted.append((name, ranks, layout, model))
    return accepted
