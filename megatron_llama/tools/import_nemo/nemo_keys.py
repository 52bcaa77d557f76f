"""Precision and vocabulary of NeMo, neuronx-nemo-megatron and NxDT configs. nemo.yaml has the tables of their keys."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_llama.config.hf_config import read_hf_config
from megatron_llama.text.tokenizer import vocabulary_size
from megatron_llama.tools.import_nemo.engine import is_on

LAYOUT = "distributed_strategy."
TIED = "model.share_embeddings_and_output_weights"

FROM_A_CHECKPOINT = (
    "export a Llama checkpoint to the Hugging Face format, then run python train.py model=from_hf init_from=FOLDER "
    "finetune=full, or lora (docs/guides/data/finetuning.md); or write model.num_layers=N etc. after the file"
)
GPT_DEFAULTS: Mapping[str, str] = {
    "activation": "gelu",
    "normalization": "layernorm",
    "position_embedding_type": "learned_absolute",
    "bias has_bias": "true",
    "hidden_dropout": "0.1",
    "attention_dropout": "0.1, or 0 on Trainium",
}
"""Defaults of NeMo and derived programs that differ from Llama, by the alternative names of a key."""


# ``trainer.precision`` of a NeMo, neuronx-nemo-megatron or NxDT config, from up to seven keys.

# Names of neuronx-nemo-megatron's train_setup.sh, which trainer.precision accepts on all devices.
PRESETS = ("bf16SR", "fp32_ZeroOptMaster", "fp32_ZeroOptMasterGradAcc", "megatron_amp_O2", "fp32_OptStates", "fp32")
SWITCHES = (
    "model.megatron_amp_O2",
    "model.wrap_with_zero",
    "model.zero_use_master_weight",
    "model.zero_use_fp32_grad_accum",
)
FP32_STATES = "adamw_fp32optstate"
HALF = "XLA_USE_BF16"
"""Variable that distinguishes bf16SR from fp32 in train_setup.sh; set if that script runs this one."""


@dataclass(frozen=True)
class PrecisionChoice:
    """Converted ``trainer.precision``."""

    name: str
    key: str
    """Key of the source that decided."""
    why: str = ""
    supported: bool = True
    assumed: str = ""
    """Note on an assumption; empty if the file defines the precision."""


def convert_precision(values: Mapping[str, Any]) -> PrecisionChoice:
    """Return the precision of the flat keys ``values``."""
    given = str(values.get("trainer.precision") or 32)  # null is Lightning's default
    if given in PRESETS or given == "bf16_sr":
        return PrecisionChoice(given, "trainer.precision")
    if values.get("precision.type") is not None:
        return _nxdt(values)
    if values.get("trainer.accelerator") == "tpu" or values.get("model.wrap_with_zero") is not None:
        return _neuron(values)
    key, kind = "trainer.precision", given.lower().removesuffix("-mixed")
    if kind in ("32", "32-true", "fp32"):
        return PrecisionChoice("fp32", key)
    if kind == "bf16":
        name = "megatron_amp_O2" if is_on(values, "model.megatron_amp_O2") else "bf16"
        return PrecisionChoice(name, key, "fp32 master weights, bf16 arithmetic")
    why = "unknown precision; bf16 is written"
    if kind in ("16", "fp16", "16-true"):
        why = "fp16 with loss scaling is not supported; bf16 is written"
    elif kind == "bf16-true":
        why = "bf16 weights without fp32 master weights lose small updates; bf16 has master weights"
    return PrecisionChoice("bf16", key, why, supported=False)


def _nxdt(values: Mapping[str, Any]) -> PrecisionChoice:
    key, kind = "precision.type", str(values["precision.type"])
    zero = is_on(values, "distributed_strategy.zero1") or "distributed_strategy.zero1" not in values
    if kind in ("bf16SR", "fp32"):
        return PrecisionChoice(kind, key)
    if kind == "autocast":
        return PrecisionChoice("bf16", key, "bf16 arithmetic, fp32 weights")
    if kind in ("mixed_precision", "mixed_precisionSR", "mixed_precision_SR"):
        if not zero:
            why = "without zero1 there are no master weights, which is not supported; bf16 has them"
            return PrecisionChoice("bf16", key, why, supported=False)
        sr = "; activations are rounded to nearest" if kind != "mixed_precision" else ""
        return PrecisionChoice("fp32_ZeroOptMasterGradAcc", key, f"master weights and gradient sums in fp32{sr}")
    if kind == "manual":
        return _manual(values, zero)
    return PrecisionChoice("bf16", key, "not a precision of NxDT; bf16 is written", supported=False)


def _manual(values: Mapping[str, Any], zero: bool) -> PrecisionChoice:
    key = "precision.type"
    bf16, downcast = is_on(values, "precision.xla_use_bf16"), is_on(values, "precision.xla_downcast_bf16")
    stochastic = is_on(values, "precision.neuron_rt_stochastic_rounding_en")
    master = is_on(values, "precision.master_weights") and zero
    if bf16 and stochastic:
        return PrecisionChoice("bf16SR", key, "xla_use_bf16 with stochastic rounding")
    if downcast and master:
        fp32_sums = is_on(values, "precision.fp32_grad_acc")
        name = "fp32_ZeroOptMasterGradAcc" if fp32_sums else "fp32_ZeroOptMaster"
        return PrecisionChoice(name, key, "master weights in fp32")
    if not bf16 and not downcast:
        return PrecisionChoice("fp32", key, "no bf16")
    why = "bf16 without master weights and stochastic rounding loses small updates; bf16 is written"
    return PrecisionChoice("bf16", key, why, supported=False)


def _neuron(values: Mapping[str, Any]) -> PrecisionChoice:
    amp, zero, master, fp32_sums = (is_on(values, switch) for switch in SWITCHES)
    if amp:
        return PrecisionChoice("megatron_amp_O2", SWITCHES[0])
    if zero and master:
        return PrecisionChoice("fp32_ZeroOptMasterGradAcc" if fp32_sums else "fp32_ZeroOptMaster", SWITCHES[2])
    if str(values.get("model.optim.name", "")).lower() == FP32_STATES:
        return PrecisionChoice("fp32_OptStates", "model.optim.name")
    bf16 = os.environ.get(HALF)
    if bf16 is not None:
        kind = "bf16SR" if bf16.lower() in ("1", "true") else "fp32"
        return PrecisionChoice(kind, "trainer.precision", f"{HALF}={bf16} is set, as train_setup.sh does")
    assumed = (
        "trainer.precision=fp32: configs of bf16SR and fp32 are equal, and train_setup.sh distinguishes them by "
        f"{HALF}; write trainer.precision=bf16SR for bf16SR"
    )
    return PrecisionChoice("fp32", "trainer.precision", assumed=assumed)


# Rows of the embedding, from the tokenizer or from its name.
LLAMA2_VOCAB_SIZE = 32000
# Words in the name or type of a tokenizer, and rows of the embedding in models with it.
ROWS_BY_NAME = (
    ("llama3", 128256),
    ("llama2", LLAMA2_VOCAB_SIZE),
    ("gpt2bpe", 50257),
    ("mistral", LLAMA2_VOCAB_SIZE),
    ("mixtral", LLAMA2_VOCAB_SIZE),
)


def embedding_rows(paths: Sequence[str]) -> tuple[int, str]:
    """Return (rows, "") if one of the tokenizers is on this machine, else (rows, basis of the assumption)."""
    for path in paths:
        if (size := _rows_of_path(path)) is not None:
            return size, ""
    normalized = "".join(paths).lower().replace("-", "").replace("_", "")
    for word, size in ROWS_BY_NAME:
        if word in normalized:
            return size, f"from the name of the tokenizer ({word})"
    return LLAMA2_VOCAB_SIZE, "as in Llama 1 and 2"


def _rows_of_path(path: str) -> int | None:
    """Return the embedding rows of a Hugging Face folder, else the size of a tokenizer; None if not found."""
    try:
        rows = read_hf_config(path).get("vocab_size")
    except ValueError:
        return vocabulary_size(path)
    return rows if isinstance(rows, int) else None
