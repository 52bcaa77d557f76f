"""Convert rows of published training runs to ``Job`` objects.

Publications use different conventions. The meaning of a row's numbers is derived here from its columns: which FLOPs
an MFU counts, what a device is, and which program and kernels ran.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_llama.plan.job import Job, ModelShape, Program, StateBytes
from megatron_llama.plan.memory import footprint
from megatron_llama.tools.forecast.hardware import HardwareSpec, find_device
from megatron_llama.tools.forecast.programs import PROGRAMS
from megatron_llama.tools.plan.forecast_page import (
    NO,
    CannotPredict,
    Row,
    parse_flag,
    parse_int,
    parse_number,
    require_int,
)

SQUAD_DOCUMENT = 256
"""Tokens per example of the packed fine-tuning sets in NVIDIA's benchmarks (SQuAD). Attention is within examples."""

RESERVED = 1.04
"""Reserved bytes per live byte of the caching allocator, for rows that state reserved memory."""
TYPICAL_VOCABULARY = 51_200
"""Vocabulary of rows without one: GPT's, padded as in Megatron-LM."""


@dataclass(frozen=True)
class Published:
    """Published run that can be predicted."""

    row: Row
    job: Job
    device: HardwareSpec
    """Share of a device that one rank uses."""
    seconds: float | None
    """Published seconds of a step, or derived from tokens/s or from an MFU of stated convention."""
    memory: float | None
    """Published peak memory of a rank, bytes."""
    assumed: tuple[str, ...]
    """Assumptions for missing columns."""


MOST_LAYERS = 10_000
"""Rows with more layers are rejected."""
DO_NOT_FIT = "inconsistent sizes"
_NOT_DENSE = re.compile(r"moe|mixture|mixtral|\b\d+x\d+b|-a\d+b|deepseek|mamba|\bssm\b|\bt5\b|bert|\bvit\b|diffusion")


def read_run(row: Row) -> Published:
    """Convert a row to a run.

    Raises:
        CannotPredict: a required column is missing, or the run is not supported.
    """
    assumed: list[str] = []
    device = find_device(row.get("device", ""))
    if device is None:
        raise CannotPredict("the device is not in the hardware table")
    device = with_network(device, row.get("interconnect", ""))
    row = _with_devices(row, device)
    if match := _NOT_DENSE.search(f"{row.get('arch', '')} {row.get('model', '')}".lower()):
        raise CannotPredict(f"not a dense decoder ({match[0].strip('-')})")
    shape = _shape(row, assumed)
    seq = require_int(row, "seq", "the sequence length")
    form = number_format(row.get("precision", ""))
    tp, pp, cp, dp, device = _layout(row, device, assumed)
    vpp = parse_int(row, "vpp") or 1
    micro, batches = _batch(row, dp, pp, assumed)
    arch = row.get("arch", "").lower()
    lora = "lora" in arch
    program = program_of(row, device)
    sp = parse_flag(row, "sp")
    if sp is None and tp > 1 and program.attention != "scores":
        sp = True
        assumed.append("sequence parallelism")
    zero = zero_stage(row.get("sharding", ""), program)
    if not row.get("sharding"):
        assumed.append(f"ZeRO {zero}")
    recompute = recompute_of(row.get("recompute", ""))
    if not row.get("recompute"):
        recompute = "none"
        assumed.append("no recomputation")
    packed = "sft" in arch or (lora and "mlperf" not in arch)
    if packed:
        assumed.append(f"attention inside examples of {SQUAD_DOCUMENT} tokens")
    job = Job(
        shape=shape,
        seq=seq,
        micro_batch=micro,
        num_microbatches=batches,
        tp=tp,
        pp=pp,
        vpp=max(1, min(vpp, shape.layers // pp)),
        cp=cp,
        dp=dp,
        sp=bool(sp) and tp > 1,
        zero=zero,
        shard_size=_shard_size(row.get("sharding", ""), dp * cp) if zero else 1,
        recompute=recompute,
        format=form,
        scaling=scaling_of(row.get("precision", "")),
        state=_state(row, program, form),
        lora_parameters=_lora(row, shape, tp) if lora else 0,
        adapted=frozenset(("qkv", "o")) if lora else frozenset(),
        document=min(SQUAD_DOCUMENT, seq) if packed else None,
        program=program,
    )
    return Published(row, job, device, _seconds(row, job, device, assumed), _memory(row), tuple(assumed))


def _with_devices(row: Row, device: HardwareSpec) -> Row:
    """Add the number of devices that the layout requires, if the row lacks it."""
    sizes = [parse_int(row, axis) for axis in ("tp", "pp", "dp")]
    if parse_int(row, "n_devices") is not None or None in sizes:
        return row
    ranks = math.prod(size or 1 for size in sizes) * (parse_int(row, "cp") or 1)
    return {**row, "n_devices": str(max(1, ranks // device.ranks_per_device))}


def number_format(precision: str) -> str:
    """Return the GEMM format of a precision such as "fp8 hybrid", "bf16 (PURE)" or "nvfp4"."""
    words = re.sub("float(?=\\d)|e4m3|e5m2", lambda match: "fp" if match[0] == "float" else "fp8", precision.lower())
    named = re.search(r"fp4|fp8|b?fp?16|half", words)
    if named:
        return named[0] if named[0] in ("fp4", "fp8") else "bf16"
    return "fp32" if "32" in words else "bf16"


def scaling_of(precision: str) -> str:
    """Return the granularity of scales: per tensor, per row, or per block (mx formats, nvfp4)."""
    words = precision.lower()
    if "row" in words:
        return "per row"
    return "per block" if re.search(r"mx|nvfp4|block", words) else "per tensor"


def with_network(device: HardwareSpec, interconnect: str) -> HardwareSpec:
    """Replace the network bandwidth by a stated one, such as "1600 Gb/s per node" or "400Gb/s per GPU"."""
    per_node = re.search(r"(?:(\d+)x [^,;+]*?)?(\d+) ?Gb/s[^,;+]* per (?:\d+-chip )?node", interconnect)
    per_device = re.search(r"(\d+) ?Gb/s[^,;+]* per GPU", interconnect)
    if per_node:
        return replace(device, network=int(per_node[1] or 1) * float(per_node[2]) * 1e9 / 8 / device.per_node)
    if per_device:
        return replace(device, network=float(per_device[1]) * 1e9 / 8)
    return device


def program_of(row: Row, device: HardwareSpec) -> Program:
    """Return the program variant of the row's framework."""
    words, date = row.get("framework", "").lower(), row.get("date", "")
    overlapped = "overlap" in row.get("sp", "").lower() or "overlap" in row.get("note", "").lower()
    if device.family.startswith("trn"):
        return PROGRAMS["xla"]
    if device.family.startswith("gaudi"):
        return PROGRAMS["synapse"]
    if "async" in words:
        return PROGRAMS["compiled, overlapped"]
    if "compile" in words:
        return PROGRAMS["compiled"]
    if "deepspeed" in words and "megatron" in words or re.search(r"megatron-lm 20(19|2[012])", words):
        return PROGRAMS["megatron 2021"]
    if re.search(r"megatron|nemo|bridge|primus|mlperf|mcore|transformer ?engine", words) or words == "amd":
        return PROGRAMS["megatron, overlapped" if overlapped else "megatron"]
    if date[:4].isdecimal() and int(date[:4]) < 2022:
        return PROGRAMS["megatron 2021"]
    if "nanotron" in words:
        return PROGRAMS["nanotron"]
    if "foundry" in words or "composer" in words or date[:4].isdecimal() and int(date[:4]) < 2023:
        return PROGRAMS["eager, flash 1"]
    return PROGRAMS["eager"]


def zero_stage(sharding: str, program: Program) -> int:
    """Return the ZeRO stage of a sharding description; if it is empty, the program's default."""
    words = sharding.lower()
    stated = re.search(r"zero[\W_]*(?:stage[\W_]*)?(\d)", words)
    if "full_shard" in words or "fsdp2" in words:
        return 3
    if stated:
        return min(int(stated[1]), 3)
    if "grad_op" in words:
        return 2
    if "fsdp" in words or "hsdp" in words:
        return 3
    if "distributed optimizer" in words:
        return 1
    if words in (*NO, "ddp"):
        return 0
    return {"scores": 0}.get(program.attention, 1)


def recompute_of(text: str) -> str:
    """Return none, selective, half (every second GEMM is saved, as in torchtitan) or full."""
    words = text.lower()
    if not words or words.startswith(("none", "no ")) or words in NO:
        return "none"
    if "per-op" in words or "sac" in words:
        return "half"
    return "selective" if "select" in words else "full"


def _shape(row: Row, assumed: list[str]) -> ModelShape:
    hidden, layers = require_int(row, "hidden", "the model's shape"), require_int(row, "layers", "the model's shape")
    heads, ffn = require_int(row, "heads", "the model's shape"), require_int(row, "ffn", "the model's shape")
    vocab = parse_int(row, "vocab")
    if vocab is None:
        vocab = TYPICAL_VOCABULARY
        assumed.append(f"a vocabulary of {vocab:,}")
    kv_heads = parse_int(row, "kv_heads") or heads
    if layers > MOST_LAYERS:
        raise CannotPredict(f"more than {MOST_LAYERS:,} layers")
    if heads > hidden or kv_heads > heads:
        raise CannotPredict(DO_NOT_FIT)
    arch = row.get("arch", "")
    return ModelShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=max(1, hidden // heads),
        ffn=ffn,
        vocab=vocab,
        gated="glu" in row.get("ffn_kind", "").lower()
        or ("llama" in arch.lower() and row.get("ffn_kind", "").lower() in ("", "silu", "swish")),
        tied=bool(parse_flag(row, "tied")),
        learned_positions=(parse_int(row, "seq") or 0) if arch.startswith("GPT") else 0,
    )


def _layout(row: Row, device: HardwareSpec, assumed: list[str]) -> tuple[int, int, int, int, HardwareSpec]:
    """Return (tp, pp, cp, dp, share of a device that one rank uses).

    dp is derived from the ranks and the other sizes, because published values are often wrong. A table may count the
    devices or their cores.
    """
    tp, pp, cp = (parse_int(row, axis) or 1 for axis in ("tp", "pp", "cp"))
    if not row.get("tp") and not row.get("pp"):
        assumed.append("no model parallelism")
    model, printed = tp * pp * cp, parse_int(row, "dp")
    count, parts = require_int(row, "n_devices", "the number of devices"), 1
    if device.ranks_per_device > 1 and (printed is None or model * printed == count * device.ranks_per_device):
        parts = device.ranks_per_device
    dp, rest = divmod(count * parts, model)
    if rest or not dp:
        raise CannotPredict("tp, pp and cp do not divide the devices")
    if pp > require_int(row, "layers", "the model's shape"):
        raise CannotPredict("more pipeline stages than layers")
    if printed is not None and printed != dp:
        assumed.append(f"dp {dp}, not the published {printed}")
    return tp, pp, cp, dp, device.per_rank() if parts > 1 else device


def _batch(row: Row, dp: int, pp: int, assumed: list[str]) -> tuple[int, int]:
    """Return (micro batch size, number of micro batches)."""
    micro, total = parse_int(row, "micro_batch"), parse_int(row, "global_batch")
    if micro is None and total is None:
        raise CannotPredict("neither micro batch nor global batch is stated")
    if total is None:
        assert micro is not None
        assumed.append("one micro batch per stage")
        return micro, pp
    if micro is None:
        micro = 1
        assumed.append("micro batch 1")
    per_rank = max(1, round(total / dp))
    micro = min(micro, per_rank)
    return micro, max(1, round(per_rank / micro))


def _state(row: Row, program: Program, form: str) -> StateBytes:
    """Return the bytes of a parameter's states, from the columns precision and sharding."""
    words = f"{row.get('precision', '')} {row.get('sharding', '')}".lower()
    if "pure" in words:
        return StateBytes(2, 2, 0, 4)
    if "stochastic" in words:
        return StateBytes(2, 2, 0, 8)
    if "amp_" in words or "fsdp" in words:  # fully sharded: fp32 weights are the master weights, gathered in 16 bits
        return StateBytes(2, 4 if "torchtitan" in row.get("framework", "") else 2, 4, 8)
    if form == "fp8" and ("mlperf" in f"{row.get('arch', '')} {row.get('framework', '')}".lower()):
        return StateBytes(1, 2, 4, 8)  # weights are stored in fp8
    if "params fp8" in words:  # gradients are reduced in 16 bits
        return StateBytes(1, 2, 4, 8)
    return StateBytes()


def _shard_size(sharding: str, ranks: int) -> int:
    """Return the number of ranks that share the states, such as 64 for "mcore FSDP 64"."""
    stated = re.search(r"fsdp (\d+)", sharding.lower())
    return min(int(stated[1]), ranks) if stated else ranks


def _lora(row: Row, shape: ModelShape, tp: int) -> int:
    """Return the LoRA parameters of one block."""
    stated = re.search(r"rank (\d+)", row.get("arch", ""))
    rank = int(stated[1]) if stated else 16
    return rank * sum(inner + columns for inner, columns in shape.layer_matmuls(tp))


def _seconds(row: Row, job: Job, device: HardwareSpec, assumed: list[str]) -> float | None:
    """Return the published seconds of a step; None if they cannot be derived."""
    count = require_int(row, "n_devices", "the number of devices")
    if (rate := parse_number(row, "tokens_per_s_per_dev")) and not row.get("global_batch"):
        return job.tokens_per_step / (rate * count)
    if seconds := parse_number(row, "step_time_s"):
        return seconds
    if rate:
        return job.tokens_per_step / (rate * count)
    return _seconds_from_flops(row, job, device, count, assumed)


def _seconds_from_flops(row: Row, job: Job, device: HardwareSpec, count: int, assumed: list[str]) -> float | None:
    """Derive the seconds of a step from TFLOP/s or an MFU, if the row states which FLOPs it counts."""
    convention = row.get("flop_convention", "").lower()
    per_token = {"full": flops_per_token(job, 12), "causal": flops_per_token(job, 6)}
    if "not stated" in convention:
        return None
    if "6n" in convention and "no attention" in convention:
        counted = flops_per_token(job, 0)
    elif "hardware" in convention:
        counted = per_token["full"] * 4 / 3
    elif "causal" in convention:
        counted = per_token["causal"]
    elif "full" in convention:
        counted = per_token["full"]
    else:
        return None
    rank_parts = job.ranks / count
    peak = device.peak(job.format) * rank_parts
    if tflops := parse_number(row, "tflops_per_dev"):
        rate = tflops * 1e12
    elif percent := parse_number(row, "mfu_pct"):
        rate = percent / 100 * peak
    else:
        return None
    assumed.append("time derived from FLOP/s")
    return job.tokens_per_step * counted / (rate * count)


def flops_per_token(job: Job, attention: int) -> float:
    """Return the FLOPs per token: 6 per GEMM weight, plus ``attention`` * layers * width * sequence.

    Frozen weights of LoRA count 4 instead of 6.
    """
    shape = job.shape
    blocks = shape.layers * sum(rows * columns for rows, columns in shape.layer_matmuls())
    each = 4 if job.lora_parameters else 6
    return each * (blocks + shape.vocab * shape.hidden) + attention * shape.layers * shape.queries * job.seq


def _memory(row: Row) -> float | None:
    peak = parse_number(row, "peak_mem_GiB")
    return None if peak is None else peak * 2**30


def predicted_memory(run: Published) -> float:
    """Return the predicted peak of the rank that the row measures: the first, the logging or the heaviest rank."""
    words, job = run.row.get("mem_kind", "").lower(), run.job
    stages: Sequence[int] = range(job.pp)
    if "rank 0" in words or "chart" in words:
        stages = [0]
    elif "logging rank" in words or "log" in words and "maximum" not in words:
        stages = [job.pp - 1]
    peak = max(footprint(job, stage).total for stage in stages)
    return peak * (RESERVED if "max reserved" in words else 1)
