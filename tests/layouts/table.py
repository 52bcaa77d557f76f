"""The layouts that are compared with one process, and the rows that exact mode accepts."""

from __future__ import annotations

from pathlib import Path

TP2, TP4, NO_SP = "trainer.tp=2", "trainer.tp=4", "trainer.sp=false"
PP2, VPP2 = "trainer.pp=2", "trainer.vpp=2"
ZERO0, ZERO1, ZERO2, ZERO3 = (f"trainer.zero={stage}" for stage in range(4))
ODD = "model.vocab_size=61"
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
ORIGINAL = ["optim.adjust_lr=original", "optim.matrix_lr=0.005"]
FULL, ELEMENTWISE, SELECTIVE = (f"trainer.recompute={kind}" for kind in ("full", "elementwise", "selective"))
# Of a global batch of 8; without either it is 2. Ranks that meet at each matrix are slow on two cores, so theirs are
# larger; each layout accumulates over two micro batches or more.
MICRO_1, MICRO_4 = "trainer.micro_batch_size=1", "trainer.micro_batch_size=4"
ONE_MICRO_BATCH = "trainer.micro_batch_size=8"

Row = tuple[str, int, list[str], list[str]]
"""Name, ranks, overrides of the layout, overrides of the model."""


def settings(text: str) -> list[str]:
    """Return settings, of which words in capitals are constants of this file."""
    values = [word if "=" in word else globals()[word] for word in text.split()]
    return [setting for item in values for setting in ([item] if isinstance(item, str) else item)]


def read_rows(name: str) -> tuple[list[Row], list[bool]]:
    """Return the rows of a file of this folder, which layouts.txt explains, and whether they have stars."""
    lines = [line for line in Path(__file__).with_name(name).read_text("utf-8").splitlines() if line[0] != "#"]
    rows = []
    for line in lines:
        title, _, row = line.removeprefix("* ").partition(": ")
        layout, _, model = row[1:].partition("|")
        rows.append((title, int(row[0]), settings(layout), settings(model)))
    return rows, [line.startswith("* ") for line in lines]


LAYOUTS, STARS = read_rows("layouts.txt")
QUICK = {row[0] for row, star in zip(LAYOUTS, STARS, strict=True) if star}

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
EXACT_QUICK = {"pp2·vpp2·dp2, zero 3", "tp2·pp2+sp, olmo2", "tp2·dp2+sp, muon, zero 3"}


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
