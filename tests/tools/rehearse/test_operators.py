"""The steps of the Trainium and the Gaudi experiment: which operators they dispatch, and which the vendors list."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_llama.tools.rehearse.cli import plan_rehearsal
from megatron_llama.tools.rehearse.rehearsal import rehearse
from megatron_llama.tools.rehearse.report import LISTS, Rehearsal, listed_as, published, unlisted
from megatron_llama.tools.rehearse.text import lines
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
"""What scaled_dot_product_attention dispatches on a CPU; a device has its own."""
# A name that joins one of these sets is a new demand on the device: look whether it can be done without.
NOT_OF_NEURON = FOR_CPU | set(
    "__rshift__ _to_copy abs amax arange bitwise_and bitwise_not bitwise_or bitwise_xor cat clamp clone "
    "copy_ cummax empty_like eq exp exp_ floor_divide ge index index_put index_put_ lerp_ linalg_vector_norm log mean "
    "ne ones_like pow reciprocal rsqrt scalar_tensor silu silu_backward stack sub sub_ zeros new_empty".split()
)
NOT_OF_GAUDI = FOR_CPU | {"_foreach_copy_", "_fused_adamw_", "cummax"}
BEHIND_THE_STEP = {"megatron_llama.train.loop", "megatron_llama.checkpoint.saving"}
"""Reads of loss and norm at the end of a step, and what ranks agree on between steps."""


def _rehearsed(_: int, overrides: tuple[str, ...]) -> tuple[Rehearsal, list[str]]:
    dist.destroy_process_group()  # the rehearsal makes its own
    plan, _notes = plan_rehearsal(overrides)
    rehearsal = rehearse(plan, 0)
    return rehearsal, list(lines(rehearsal, plan))


@pytest.mark.parametrize(
    ("overrides", "device", "expected"),
    [(TRAINIUM, "neuron", NOT_OF_NEURON), (GAUDI, "hpu", NOT_OF_GAUDI)],
    ids=["Trainium", "Gaudi"],
)
def test_operators_of_a_step(overrides: tuple[str, ...], device: str, expected: set[str]) -> None:
    rehearsal, text = run_ranks(_rehearsed, 1, overrides)[0]
    names = published(device)
    assert names is not None
    missing = unlisted(rehearsal.operators, names)
    assert {found.name for found in missing} == expected
    assert all(found.module and found.place for found in missing), "each is told with where it comes from"
    modules = {found.module for found in rehearsal.operators}
    assert {"embed_tokens", "layers.*.self_attn", "layers.*.mlp", "lm_head", "the optimizer and the loop"} <= modules
    printed = "\n".join(text)
    assert f"device={device} lacks" in printed and all(name in printed for name in expected)
    places = {sighting.place.split(":")[0] for sighting in rehearsal.synchronizations}
    assert places == BEHIND_THE_STEP, "nothing is read inside the step, and the watch sees reads at all"


def _reads(_: int, settings: list[tuple[str, ...]]) -> list[set[tuple[str, int]]]:
    """Module and number of all that the host waits for, by settings."""
    dist.destroy_process_group()
    found = []
    for overrides in settings:
        waits = rehearse(plan_rehearsal((*SMALL, *FP32_ON_A_DEVICE, *overrides))[0], 0).synchronizations
        found.append({(sighting.place.split(":")[0], sighting.count) for sighting in waits})
    return found


def test_what_the_host_reads_with_other_optimizers() -> None:
    # Its warm-up; a rehearsal reads no counts. What follows: tests/optim/test_onebit_adam.py
    onebit = ("optim.name=onebit_adam", "trainer.zero=0", "trainer.dp=2")
    offloads = [("trainer.offload=[optimizer]", f"optim.name={name}") for name in ("adamw", "sgd")]
    *on_device, adamw, sgd = run_ranks(_reads, 1, [("optim.name=sgd",), onebit, *offloads])[0]
    behind = on_device[0]
    assert {place for place, _ in behind} == BEHIND_THE_STEP
    assert on_device == [behind, behind], "nothing inside the step"
    assert adamw - behind == sgd - behind == {("megatron_llama.optim.optimizer", 1)}, "the gradients' arrival"


def test_names_that_mean_the_same() -> None:
    names = {"add", "zero_", "to", "view"}
    assert listed_as("add", names) == listed_as("add_", names) == "add"
    assert listed_as("zero", names) == "zero_"
    assert listed_as("_to_copy", names) == "to"
    assert listed_as("addmm", names) is None


def test_lists() -> None:
    assert {path.stem for path in LISTS.glob("*.csv")} == {"neuron", "hpu"}
    assert published("cpu") is None
    for device, some in (("neuron", {"mm", "embedding", "_softmax"}), ("hpu", {"mm", "embedding", "softmax", "silu"})):
        names = published(device)
        assert names is not None and some <= names and not any(name.strip() != name or not name for name in names)
