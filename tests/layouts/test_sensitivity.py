"""The oracle can fail: each test breaks one invariant on purpose and sees the comparison go red."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.compiled import skip_without_compiler
from tests.layouts import table, tampers
from tests.oracle import TOLERANCE, Tamper, oracle, run_layout, worst
from tests.rows import rows

BROKEN: list[tuple[Tamper, int, list[str], list[str]]] = [
    (tampers.matrices_of_each_rank_alone, 2, [table.TP2], [table.MUON]),
    (tampers.logits_of_each_rank_alone, 2, [table.ZERO1], [table.QK_CLIP]),
    (tampers.logits_of_each_rank_alone, 4, [table.TP4, table.MICRO_4], [table.QK_CLIP]),
    (tampers.keys_of_each_rank_alone, 2, [table.CP], [table.QK_CLIP]),
    (tampers.no_sequence_parallel_sum, 2, [table.TP2], []),
    (tampers.no_sequence_parallel_sum, 2, [table.TP2, table.NO_SP], [table.QWEN3]),
    (tampers.no_kv_copy_sum, 4, [table.TP4, table.MICRO_4], []),
    (tampers.no_kv_copy_sum, 4, [table.TP4, table.MICRO_4], [table.QWEN2, table.BIAS_EPS]),
    (tampers.no_kv_copy_sum_of_the_norm, 4, [table.TP4, table.MICRO_4], [table.OLMO2]),
    (tampers.mean_squares_of_each_rank_alone, 2, [table.TP2], [table.OLMO2]),
    (tampers.gradients_of_mean_squares_of_each_rank_alone, 2, [table.TP2], [table.OLMO2]),
    (tampers.norms_before_the_branches, 2, [table.TP2], [table.OLMO2]),
    (tampers.bias_of_each_rank, 2, [table.TP2], [*table.BIASES, table.BIAS_EPS]),
    (tampers.no_sequence_parallel_sum_of_biases, 2, [table.TP2], [*table.BIASES, table.BIAS_EPS]),
    (tampers.no_tied_sum, 2, [table.PP2], [table.TIED]),
    (tampers.replicated_gradients_twice, 2, [table.TP2], []),
    (tampers.replicated_gradients_twice, 4, [table.TP4, table.NO_SP, table.MICRO_4], []),
    (tampers.local_token_count, 2, [table.ZERO1], []),
    (tampers.mean_over_data_parallel_ranks, 2, [table.ZERO1], []),
    (tampers.padding_in_the_loss, 2, [table.TP2], [table.ODD]),
    (tampers.last_chunk_of_the_head_lost, 1, [], []),
    (tampers.loss_weights_only_in_the_loss, 1, [], []),
    (tampers.softmax_of_each_rank_alone, 2, [table.TP2], []),
    (tampers.head_gradient_not_summed, 2, [table.TP2], []),
    (tampers.head_gradient_not_summed, 2, [table.TP2, table.NO_SP], []),
    (tampers.norms_count_copies, 2, [table.TP2], []),
    (tampers.norms_count_copies, 2, [table.ZERO0], []),
    (tampers.no_causal_mask, 1, [], []),
    (tampers.window_of_one_token_more, 1, [], [table.WINDOW]),
    (tampers.blocks_without_global_ones, 1, [], [table.BLOCKS]),
    (tampers.compiled_gradients_of_one_token_more, 1, table.COMPILED, [*table.WIDE, table.WINDOW]),
    (tampers.chunks_in_plain_order, 2, [table.CP], []),
    (tampers.key_gradients_of_each_rank_alone, 2, [table.CP], []),
    (tampers.documents_joined_at_a_chunk_boundary, 2, [table.CP], [table.DOCUMENTS]),
    (tampers.documents_in_zigzag_order, 2, [table.CP], [table.DOCUMENTS]),
    (tampers.positions_of_the_rank, 2, [table.CP, table.ULYSSES], []),
    (tampers.local_token_count, 2, [table.CP], []),
    (tampers.mean_over_data_parallel_ranks, 2, [table.CP], []),
    (tampers.gathered_pieces_of_the_wrong_rank, 2, table.ASYNC_TP, []),
    (tampers.scattered_pieces_of_the_wrong_rank, 2, table.ASYNC_TP, []),
]
NAMED = {f"{case[0].__name__}, {' '.join([*case[2], *case[3]])}": case for case in BROKEN}
QUICK = {
    "no_sequence_parallel_sum, trainer.tp=2",
    "no_kv_copy_sum, trainer.tp=4 trainer.micro_batch_size=4",
    "no_tied_sum, trainer.pp=2 model.tie_word_embeddings=true",
    "mean_over_data_parallel_ranks, trainer.zero=1",
    "norms_count_copies, trainer.zero=0",
    "no_causal_mask, ",
    "last_chunk_of_the_head_lost, ",
    "key_gradients_of_each_rank_alone, trainer.cp=2",
}


@pytest.mark.parametrize(("tamper", "ranks", "layout", "model"), rows(NAMED.items(), QUICK))
@pytest.mark.usefixtures("compiled_here")
def test_oracle_goes_red(tamper: Tamper, ranks: int, layout: list[str], model: list[str]) -> None:
    skip_without_compiler(layout)
    expected = oracle(*model)
    try:
        result = run_layout(ranks, *layout, *model, tamper=tamper)
    except AssertionError as failure:  # of a rank, or of copies that drifted apart
        assert "differ" in str(failure) or "disagree" in str(failure)
        return
    assert max(worst(result, expected).values()) > 5 * TOLERANCE


def test_every_fault_is_used() -> None:
    # A fault that no test uses is an error.
    used = "".join(file.read_text() for file in Path(__file__).parent.parent.rglob("test_*.py"))
    defined = [name for name, value in vars(tampers).items() if getattr(value, "__module__", "") == tampers.__name__]
    assert [name for name in defined if not re.search(rf"\b{name}\b", used)] == []
