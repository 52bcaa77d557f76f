"""Operators of the Trainium and Gaudi experiments compared with the vendors' lists."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_llama.tools.rehearse.cli import read_rehearsal
from megatron_llama.tools.rehearse.rehearsal import rehearse
from megatron_llama.tools.rehearse.report import (
    LISTS,
    Rehearsal,
    find_listed_name,
    lines,
    published_operators,
    unlisted_operators,
)
from tests.ranks import run_ranks

# The experiments' layouts and settings; the model is small, so that building it takes no time.
SMALL = (
    *("model.hidden_size=64", "model.intermediate_size=96", "model.num_attention_heads=8"),
    *("model.num_key_value_heads=8", "model.vocab_size=128", "model.num_hidden_layers=1", "data.seq_length=64"),
)
TRAINIUM = ("experiment=llama2_7b_qnli_trainium", "trainer.global_batch_size=16", *SMALL)
GAUDI = ("experiment=llama2_70b_lora_gaudi", *SMALL)
FP32_ON_A_DEVICE = ("device=hpu", "trainer.precision=fp32")
FOR_CPU = {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"}
"""Kernels of scaled_dot_product_attention on CPU; devices have others."""
# A new name in these sets is a new requirement on the device: check whether it can be avoided.
NOT_LISTED_FOR_NEURON = FOR_CPU | set(
    "__rshift__ _to_copy abs amax arange bitwise_and bitwise_not bitwise_or bitwise_xor cat clamp clone "
    "copy_ cummax empty_like eq exp exp_ floor_divide ge index index_put index_put_ lerp_ linalg_vector_norm log mean "
    "ne ones_like pow reciprocal rsqrt scalar_tensor silu silu_backward stack sub sub_ zeros new_empty".split()
)
NOT_LISTED_FOR_GAUDI = FOR_CPU | {"_foreach_copy_", "_fused_adamw_", "cummax"}
AFTER_THE_STEP = {"megatron_llama.train.loop", "megatron_llama.checkpoint.saving"}
"""Modules that read loss and norm after a step, and synchronize the ranks between steps."""


def _rehearsed(_: int, overrides: tuple[str, ...]) -> tuple[Rehearsal, list[str]]:
    dist.destroy_process_group()  # the rehearsal creates its own process group
    plan, *_ = read_rehearsal(overrides)
    rehearsal = rehearse(plan, 0)
    return rehearsal, list(lines(rehearsal, plan))


@pytest.mark.parametrize(
    ("overrides", "device", "expected"),
    [(TRAINIUM, "neuron", NOT_LISTED_FOR_NEURON), (GAUDI, "hpu", NOT_LISTED_FOR_GAUDI)],
    ids=["Trainium", "Gaudi"],
)
def test_operators_of_a_step(overrides: tuple[str, ...], device: str, expected: set[str]) -> None:
    rehearsal, text = run_ranks(_rehearsed, 1, overrides)[0]
    names = published_operators(device)
    assert names is not None
    missing = unlisted_operators(rehearsal.operators, names)
    assert {operator.name for operator in missing} == expected
    assert all(operator.module and operator.place for operator in missing), "each has a source"
    modules = {operator.module for operator in rehearsal.operators}
    assert {"embed_tokens", "layers.*.self_attn", "layers.*.mlp", "lm_head", "the optimizer and the loop"} <= modules
    printed = "\n".join(text)
    assert f"the vendor's list for device={device}" in printed and all(name in printed for name in expected)
    places = {item.place.split(":")[0] for item in rehearsal.synchronizations}
    assert places == AFTER_THE_STEP, "no reads inside the step, and reads are detected"
    lines = {item.place for item in rehearsal.synchronizations if item.place.startswith("megatron_llama.train.loop:")}
    assert len(lines) == 1, "the loop reads all numbers of a step in one transfer"


def _reads(_: int, settings: list[tuple[str, ...]]) -> list[set[tuple[str, int]]]:
    """Return module and count of the host synchronizations for each list of settings."""
    dist.destroy_process_group()
    counts = []
    for overrides in settings:
        waits = rehearse(read_rehearsal((*SMALL, *FP32_ON_A_DEVICE, *overrides))[0], 0).synchronizations
        counts.append({(item.place.split(":")[0], item.count) for item in waits})
    return counts


def test_host_reads_with_other_optimizers() -> None:
    # Warm-up only, since a rehearsal has no counts. tests/optim/test_onebit_adam.py tests the other phase.
    onebit = ("optim.name=onebit_adam", "trainer.zero=0", "trainer.dp=2")
    offloads = [("trainer.offload=[optimizer]", f"optim.name={name}") for name in ("adamw", "sgd")]
    *on_device, adamw, sgd = run_ranks(_reads, 1, [("optim.name=sgd",), onebit, *offloads])[0]
    after_step = on_device[0]
    assert {place for place, _ in after_step} == AFTER_THE_STEP
    assert on_device == [after_step, after_step], "no reads inside the step"
    assert adamw - after_step == sgd - after_step == {("megatron_llama.optim.optimizer", 1)}, "the gradients' arrival"


def test_names_match_their_aliases() -> None:
    names = {"add", "zero_", "to", "view"}
    assert find_listed_name("add", names) == find_listed_name("add_", names) == "add"
    assert find_listed_name("zero", names) == "zero_"
    assert find_listed_name("_to_copy", names) == "to"
    assert find_listed_name("addmm", names) is None


def test_published_lists_are_valid() -> None:
    assert {path.stem for path in LISTS.glob("*.csv")} == {"neuron", "hpu"}
    assert published_operators("cpu") is None
    for device, expected in (
        ("neuron", {"mm", "embedding", "_softmax"}),
        ("hpu", {"mm", "embedding", "softmax", "silu"}),
    ):
        names = published_operators(device)
        assert names is not None and expected <= names and not any(name.strip() != name or not name for name in names)
