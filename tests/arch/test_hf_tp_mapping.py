"""The table of names: rectangles cover each tensor once in any layout; parameter counts are the published ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_llama.arch.hf_tp_mapping import Rectangle, TensorParallel, hf_shapes, keep_rows, rectangles
from megatron_llama.arch.parameters import (
    FUSED,
    fused_rows,
    fused_shape,
    kv_copies,
    matrices,
    matrices_per_layer,
    padded_vocab_size,
    parameters,
    parameters_per_layer,
)
from megatron_llama.config import ModelConfig, load_config
from megatron_llama.config.conf_folders import options_of
from megatron_llama.plan import resolve
from tests.paths import CONF

# kv heads, tp, vocabulary, tied, type; with 8 query heads. 5 tokens over 8 ranks: some hold nothing but padding.
VOCABULARIES = ((64, False, "llama"), (61, True, "olmo2"), (5, True, "llama"))
CUTS = [(kv, tp, *vocabulary) for kv in (1, 2, 8) for tp in (1, 2, 4, 8) for vocabulary in VOCABULARIES]
SHARDS = (1, 2, 3, 5)  # data-parallel ranks that share a parameter's rows; some get none


def model_of(kv_heads: int, vocabulary: int, tied: bool, kind: str = "llama") -> ModelConfig:
    return ModelConfig(
        model_type=kind,
        attention_bias=kind == "olmo2",
        mlp_bias=kind == "olmo2",  # no such model is exported, but the shapes are valid
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=3,
        tie_word_embeddings=tied,
    )


def rows_by_name(model: ModelConfig, tp: int, split_stages: bool) -> dict[str, int]:
    """Our parameters and their rows on one tensor-parallel rank, written down without the table under test.

    ``split_stages``: embedding and head are on different pipeline stages, so a tied head is a copy.
    """
    assert model.num_key_value_heads is not None and model.head_dim is not None
    table = padded_vocab_size(model.vocab_size, tp) // tp
    heads = model.num_attention_heads // tp + 2 * max(1, model.num_key_value_heads // tp)
    rows = {"embed_tokens.weight": table, "norm.weight": model.hidden_size}
    for layer in range(model.num_hidden_layers):
        rows[f"layers.{layer}.post_attention_layernorm.weight"] = model.hidden_size
        other = "post_feedforward_layernorm" if model.model_type == "olmo2" else "input_layernorm"
        rows[f"layers.{layer}.{other}.weight"] = model.hidden_size
        rows[f"layers.{layer}.self_attn.qkv_proj.weight"] = heads * model.head_dim
        rows[f"layers.{layer}.self_attn.o_proj.weight"] = model.hidden_size
        rows[f"layers.{layer}.mlp.gate_up_proj.weight"] = 2 * model.intermediate_size // tp
        rows[f"layers.{layer}.mlp.down_proj.weight"] = model.hidden_size
        if model.model_type == "olmo2":
            kv = max(1, model.num_key_value_heads // tp)
            rows[f"layers.{layer}.self_attn.q_norm.weight"] = model.num_attention_heads // tp * model.head_dim
            rows[f"layers.{layer}.self_attn.k_norm.weight"] = kv * model.head_dim
            matrices = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
            for matrix in matrices:
                rows[f"layers.{layer}.{matrix}.bias"] = rows[f"layers.{layer}.{matrix}.weight"]
    if split_stages or not model.tie_word_embeddings:
        rows["lm_head.weight"] = table
    return rows


def held(model: ModelConfig, tp: int, shards: int, split_stages: bool) -> Iterator[Rectangle]:
    """The rectangles of all ranks that hold one copy of the data-parallel shards."""
    padded = padded_vocab_size(model.vocab_size, tp)
    for rank in range(tp):
        for name, rows in rows_by_name(model, tp, split_stages).items():
            parts = rectangles(name, model, TensorParallel(rank, tp), padded)
            for part in torch.arange(rows).chunk(shards):
                yield from keep_rows(parts, int(part[0]), int(part[-1]) + 1)


def expected_copies(name: str, model: ModelConfig, tp: int, split_stages: bool) -> int:
    if "q_norm" in name:
        return 1
    if "k_norm" in name or "k_proj" in name or "v_proj" in name:
        return kv_copies(model, tp)
    if name.endswith(("norm.weight", "o_proj.bias", "down_proj.bias")):
        return tp
    return 2 if name == "model.embed_tokens.weight" and model.tie_word_embeddings and split_stages else 1


@pytest.mark.parametrize("split_stages", [False, True])
@pytest.mark.parametrize("shards", SHARDS)
def test_rectangles_cover_every_tensor_once_and_copies_are_counted(shards: int, split_stages: bool) -> None:
    for kv_heads, tp, vocabulary, tied, kind in CUTS:
        model = model_of(kv_heads, vocabulary, tied, kind)
        # One count per replica number: replica 0 alone, and each other copy alone, must be the whole tensor, once.
        counts: dict[str, dict[int, torch.Tensor]] = {name: {} for name in hf_shapes(model)}
        for rectangle in held(model, tp, shards, split_stages):
            assert rectangle.global_shape == hf_shapes(model)[rectangle.name]
            copy = counts[rectangle.name].setdefault(
                rectangle.replica, torch.zeros(rectangle.global_shape, dtype=torch.int32)
            )
            where = copy[global_slices(rectangle)]
            assert where.shape == rectangle.size, "a rectangle reaches beyond its tensor"
            where += 1
        for name, copies in counts.items():
            assert set(copies) == set(range(expected_copies(name, model, tp, split_stages))), (name, kv_heads, tp)
            for copy in copies.values():
                assert (copy == 1).all(), (name, kv_heads, tp, vocabulary, tied)


def test_rectangles_fill_the_parameter_but_for_padding() -> None:
    for kv_heads, tp, vocabulary, tied, kind in CUTS:
        model = model_of(kv_heads, vocabulary, tied, kind)
        padded = padded_vocab_size(vocabulary, tp)
        for rank in range(tp):
            for name, rows in rows_by_name(model, tp, True).items():
                filled = torch.zeros(rows, dtype=torch.int32)
                for part in rectangles(name, model, TensorParallel(rank, tp), padded):
                    filled[part.local_slices[0]] += 1
                is_table = name in ("embed_tokens.weight", "lm_head.weight")
                real = max(0, min(rows, vocabulary - rank * rows)) if is_table else rows
                assert filled.tolist() == [1] * real + [0] * (rows - real), (name, rank, tp)


def test_a_rank_holds_its_query_heads_with_the_kv_heads_they_attend_to() -> None:
    for kv_heads in (1, 2, 4, 8):
        model = model_of(kv_heads, 64, False)
        for tp in (1, 2, 4, 8):
            for rank in range(tp):
                parts = rectangles("layers.0.self_attn.qkv_proj.weight", model, TensorParallel(rank, tp), 64)
                rows = [range(part.offset[0], part.offset[0] + part.size[0]) for part in parts]
                queries, keys, values = ({row // 3 for row in part} for part in rows)
                assert keys == values == {head * kv_heads // 8 for head in queries}


def test_keep_rows_is_slicing() -> None:
    source = random.Random(0)
    for kv_heads, tp, vocabulary, tied, kind in CUTS:
        model = model_of(kv_heads, vocabulary, tied, kind)
        whole = {name: torch.arange(torch.Size(shape).numel()).view(shape) for name, shape in hf_shapes(model).items()}
        for name, rows in rows_by_name(model, tp, True).items():
            parts = rectangles(name, model, TensorParallel(source.randrange(tp), tp), padded_vocab_size(vocabulary, tp))
            start = source.randint(0, rows)
            stop = source.randint(start, rows)
            columns = parts[0].size[1:] if parts else ()
            parameter = assembled(parts, rows, columns, whole)
            sliced = assembled(keep_rows(parts, start, stop), stop - start, columns, whole)
            assert torch.equal(sliced, parameter[start:stop]), (name, start, stop)


def assembled(
    parts: list[Rectangle], rows: int, columns: tuple[int, ...], whole: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Assemble a parameter from its rectangles, with -1 in the gaps."""
    parameter = torch.full((rows, *columns), -1)
    for part in parts:
        parameter[part.local_slices] = whole[part.name][global_slices(part)]
    return parameter


def global_slices(rectangle: Rectangle) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(rectangle.offset, rectangle.size, strict=True))


def test_an_unknown_parameter_has_no_name() -> None:
    with pytest.raises(KeyError, match="rotary"):
        rectangles("layers.0.rotary", model_of(2, 64, False), TensorParallel(0, 1), 64)


LINES = Path(__file__).with_name("parameters.txt").read_text(encoding="utf-8").splitlines()
COUNTS = {name: int(count) for name, count in (line.split() for line in LINES if line and not line.startswith("#"))}


@pytest.mark.parametrize("name", COUNTS)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    model = load_config([f"model={name}"], CONF).model
    count = parameters(model)
    assert count == COUNTS[name] and model.name == name.replace("/", "_")
    assert f"{count:,}" in (CONF / "model" / f"{name}.yaml").read_text(encoding="utf-8"), "not in the file's comment"


def test_every_preset_is_counted() -> None:
    assert {*options_of("model", CONF)} - {"from_hf"} == {*COUNTS}  # the shape of from_hf is in the folder


@pytest.mark.parametrize("name", ["llama70b", "llama3_8b", "smollm2_135m", "llama_56m"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 2), (1, 5)])
def test_pipeline_stages_add_up_to_the_model(name: str, tp: int, pp: int) -> None:
    overrides = [f"model={name}", "data=mock", f"trainer.tp={tp}", f"trainer.pp={pp}", "trainer.global_batch_size=10"]
    plan = resolve(load_config(overrides, CONF), tp * pp)
    model = plan.model
    # With pp > 1, tied embeddings are stored twice: as the embedding on the first stage and as the head on the last.
    copies = model.vocab_size * model.hidden_size if model.tie_word_embeddings and pp > 1 else 0
    assert sum(stage.held for stage in plan.stages) == parameters(model) + copies


def test_tensor_parallel_ranks_hold_equal_shares_and_whole_norms() -> None:
    model = load_config(["model=llama70b"], CONF).model
    for name, matrix in matrices(model).items():
        assert math.prod(matrix.local_shape(8)) == math.prod(matrix.shape) // 8, name
    assert parameters_per_layer(model, tp=8) == matrices_per_layer(model) // 8 + 2 * model.hidden_size
    # 8 kv heads over 16 ranks: two ranks hold the same one.
    keys, queries = matrices(model)["k_proj"], matrices(model)["q_proj"]
    assert keys.local_shape(16) == keys.local_shape(8) == (128, 8192)
    assert (queries.local_shape(8), queries.local_shape(16)) == ((1024, 8192), (512, 8192))


@pytest.mark.parametrize(("name", "tp"), [("llama70b", 1), ("llama70b", 8), ("llama70b", 16), ("smollm2_135m", 9)])
@pytest.mark.parametrize("matrix", FUSED)
def test_fused_matrices_have_the_shapes_of_their_rectangles(name: str, tp: int, matrix: str) -> None:
    model = load_config([f"model={name}"], CONF).model
    owner = matrices(model)[FUSED[matrix][0]].name.partition(".")[0]
    parts = rectangles(f"layers.0.{owner}.{matrix}.weight", model, TensorParallel(tp - 1, tp), model.vocab_size)
    assert fused_rows(model, matrix, tp) == {part.name.split(".")[-2]: part.size[0] for part in parts}
    assert fused_shape(model, matrix, tp) == (sum(part.size[0] for part in parts), parts[0].size[1])


def test_padding_is_on_the_ranks_but_not_in_the_model() -> None:
    plan = resolve(load_config(["model.vocab_size=4099", "trainer.tp=4", "data=mock"], CONF), 4)
    rows = 4100 // 4
    (stage,) = plan.stages
    assert stage.held == 2 * rows * 192 + 4 * parameters_per_layer(plan.model, 4) + 192
    assert parameters(plan.model) == 2 * 4099 * 192 + 4 * parameters_per_layer(plan.model) + 192
