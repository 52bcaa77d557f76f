"""Which ``trainer.precision`` a NeMo, neuronx-nemo-megatron or NxDT config means; up to seven of its keys decide."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The names of neuronx-nemo-megatron's train_setup.sh, which trainer.precision takes on every device.
PRESETS = ("bf16SR", "fp32_ZeroOptMaster", "fp32_ZeroOptMasterGradAcc", "megatron_amp_O2", "fp32_OptStates", "fp32")
SWITCHES = (
    "model.megatron_amp_O2",
    "model.wrap_with_zero",
    "model.zero_use_master_weight",
    "model.zero_use_fp32_grad_accum",
)
FP32_STATES = "adamw_fp32optstate"
HALF = "XLA_USE_BF16"
"""The variable by which alone train_setup.sh tells bf16SR from fp32; set where their script runs this one."""


@dataclass(frozen=True)
class Precision:
    """What ``trainer.precision`` becomes."""

    name: str
    key: str
    """The source's key that decided."""
    why: str = ""
    supported: bool = True
    assumed: str = ""
    """What was assumed because the file leaves it open."""


def precision_of(values: Mapping[str, Any]) -> Precision:
    """The precision that the flat keys ``values`` mean."""
    stated = str(values.get("trainer.precision", "32"))
    if stated in PRESETS or stated == "bf16_sr":
        return Precision(stated, "trainer.precision")
    if values.get("precision.type") is not None:
        return _nxdt(values)
    if values.get("trainer.accelerator") == "tpu" or values.get("model.wrap_with_zero") is not None:
        return _neuron(values)
    key, kind = "trainer.precision", stated.lower().removesuffix("-mixed")
    if kind in ("32", "32-true", "fp32"):
        return Precision("fp32", key)
    if kind == "bf16":
        name = "megatron_amp_O2" if on(values, "model.megatron_amp_O2") else "bf16"
        return Precision(name, key, "fp32 master weights, bf16 arithmetic")
    why = "is an unknown precision; bf16 is taken"
    if kind in ("16", "fp16"):
        why = "fp16 with loss scaling is not supported; bf16 needs none"
    elif kind == "bf16-true":
        why = "bf16 weights without fp32 copies lose small updates; bf16 keeps them"
    return Precision("bf16", key, why, supported=False)


def on(values: Mapping[str, Any], key: str) -> bool:
    """Whether a switch is on; NxDT writes some as '0' and '1'."""
    return str(values.get(key, False)).lower() in ("true", "1")


def _nxdt(values: Mapping[str, Any]) -> Precision:
    key, kind = "precision.type", str(values["precision.type"])
    zero = on(values, "distributed_strategy.zero1") or "distributed_strategy.zero1" not in values
    if kind in ("bf16SR", "fp32"):
        return Precision(kind, key)
    if kind == "autocast":
        return Precision("bf16", key, "computes in bf16, keeps fp32")
    if kind in ("mixed_precision", "mixed_precisionSR", "mixed_precision_SR"):
        if not zero:
            why = "without zero1 it keeps no master weights, which is not supported; bf16 keeps them"
            return Precision("bf16", key, why, supported=False)
        sr = "; activations are rounded to nearest" if kind != "mixed_precision" else ""
        return Precision("fp32_ZeroOptMasterGradAcc", key, f"master weights and gradient sums in fp32{sr}")
    if kind == "manual":
        return _manual(values, zero)
    return Precision("bf16", key, "is not a precision of NxDT; bf16 is taken", supported=False)


def _manual(values: Mapping[str, Any], zero: bool) -> Precision:
    key = "precision.type"
    half, down = on(values, "precision.xla_use_bf16"), on(values, "precision.xla_downcast_bf16")
    stochastic = on(values, "precision.neuron_rt_stochastic_rounding_en")
    master = on(values, "precision.master_weights") and zero
    if half and stochastic:
        return Precision("bf16SR", key, "xla_use_bf16 with stochastic rounding")
    if down and master:
        sums = on(values, "precision.fp32_grad_acc")
        return Precision("fp32_ZeroOptMasterGradAcc" if sums else "fp32_ZeroOptMaster", key, "master weights in fp32")
    if not half and not down:
        return Precision("fp32", key, "nothing is in bf16")
    why = "bf16 without master weights and without stochastic rounding loses small updates; bf16 is taken"
    return Precision("bf16", key, why, supported=False)


def _neuron(values: Mapping[str, Any]) -> Precision:
    amp, zero, master, sums = (on(values, switch) for switch in SWITCHES)
    if amp:
        return Precision("megatron_amp_O2", SWITCHES[0])
    if zero and master:
        return Precision("fp32_ZeroOptMasterGradAcc" if sums else "fp32_ZeroOptMaster", SWITCHES[2])
    if str(values.get("model.optim.name", "")).lower() == FP32_STATES:
        return Precision("fp32_OptStates", "model.optim.name")
    half = os.environ.get(HALF)
    if half is not None:
        kind = "bf16SR" if half.lower() in ("1", "true") else "fp32"
        return Precision(kind, "trainer.precision", f"{HALF}={half} is set, as train_setup.sh does")
    assumed = (
        "trainer.precision=fp32: for bf16SR and fp32 their files are the same, and train_setup.sh tells them apart by "
        f"{HALF}; write trainer.precision=bf16SR for the former"
    )
    return Precision("fp32", "trainer.precision", assumed=assumed)
