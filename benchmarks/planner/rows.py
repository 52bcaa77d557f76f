"""Convert rows of published training runs to jobs.

Publications use different conventions. The meaning of a row's numbers is derived here from its columns: which FLOPs
an MFU counts, what a device is, and which program and kernels ran.
"""

from __future__ import annotations

import csv
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.planner.programs import PROGRAMS, Program, PublishedJob, footprint
from megatron_llama.config.settings import ModelConfig
from megatron_llama.plan.forecast_job import StateBytes
from megatron_llama.tools.forecast.hardware import HardwareSpec, find_device

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
    job: PublishedJob
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
    """Convert a row to a run. Raises CannotPredict if a required column is missing, or the run is not supported."""
    assumed: list[str] = []
    device = find_device(row.get("device", ""))
    if device is None:
        raise CannotPredict("the device is not in the hardware table")
    device = with_network(device, row.get("interconnect", ""))
    row = _with_devices(row, device)
    if match := _NOT_DENSE.search(f"{row.get('arch', '')} {row.get('model', '')}".lower()):
        raise CannotPredict(f"not a dense decoder ({match[0].strip('-')})")
    model = _model(row, assumed)
    seq = require_int(row, "seq", "the sequence length")
    form = number_format(row.get("precision", ""))
    tp, pp, cp, dp, device = _layout(row, device, assumed)
    micro, batches = _batch(row, dp, pp, assumed)
    arch = row.get("arch", "").lower()
    program = program_of(row, device)
    sp = _sequence_parallel(row, tp, program, assumed)
    zero = zero_stage(row.get("sharding", ""), program)
    if not row.get("sharding"):
        assumed.append(f"ZeRO {zero}")
    if not row.get("recompute"):
        assumed.append("no recomputation")
    packed = "sft" in arch or ("lora" in arch and "mlperf" not in arch)
    if packed:
        assumed.append(f"attention inside examples of {SQUAD_DOCUMENT} tokens")
    gated = "glu" in row.get("ffn_kind", "").lower()
    job = PublishedJob(
        model=model,
        gated=gated or ("llama" in arch and row.get("ffn_kind", "").lower() in ("", "silu", "swish")),
        learned_positions=seq if row.get("arch", "").startswith("GPT") else 0,
        seq=seq,
        micro_batch=micro,
        num_microbatches=batches,
        tp=tp,
        pp=pp,
        vpp=max(1, min(parse_int(row, "vpp") or 1, model.num_hidden_layers // pp)),
        cp=cp,
        dp=dp,
        sp=sp,
        zero=zero,
        shard_size=_shard_size(row.get("sharding", ""), dp * cp) if zero else 1,
        recompute=recompute_of(row.get("recompute", "")),
        format=form,
        scaling=scaling_of(row.get("precision", "")),
        state=_state(row, program, form),
        adapted=frozenset(("qkv", "o")) if "lora" in arch else frozenset(),
        document=min(SQUAD_DOCUMENT, seq) if packed else None,
        program=program,
        kernels=program.kernels,
        overlaps_tp=program.overlaps_tp,
    )
    if "lora" in arch:
        stated = re.search(r"rank (\d+)", row.get("arch", ""))
        job = replace(job, lora_parameters=(int(stated[1]) if stated else 16) * sum(map(sum, job.matmuls)))
    return Published(row, job, device, _seconds(row, job, device, assumed), _memory(row), tuple(assumed))


def _sequence_parallel(row: Row, tp: int, program: Program, assumed: list[str]) -> bool:
    sp = parse_flag(row, "sp")
    if sp is None and tp > 1 and program.attention != "scores":
        sp = True
        assumed.append("sequence parallelism")
    return bool(sp) and tp > 1


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


def _model(row: Row, assumed: list[str]) -> ModelConfig:
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
    return ModelConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=max(1, hidden // heads),
        intermediate_size=ffn,
        vocab_size=vocab,
        tie_word_embeddings=bool(parse_flag(row, "tied")),
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
    is_mlperf = "mlperf" in f"{row.get('arch', '')} {row.get('framework', '')}".lower()
    if form == "fp8" and is_mlperf or "params fp8" in words:
        return StateBytes(1, 2, 4, 8)  # weights are stored in fp8, gradients are reduced in 16 bits
    return StateBytes()


def _shard_size(sharding: str, ranks: int) -> int:
    """Return the number of ranks that share the states, such as 64 for "mcore FSDP 64"."""
    stated = re.search(r"fsdp (\d+)", sharding.lower())
    return min(int(stated[1]), ranks) if stated else ranks


def _seconds(row: Row, job: PublishedJob, device: HardwareSpec, assumed: list[str]) -> float | None:
    """Return the published seconds of a step; None if they cannot be derived."""
    count = require_int(row, "n_devices", "the number of devices")
    if (rate := parse_number(row, "tokens_per_s_per_dev")) and not row.get("global_batch"):
        return job.tokens_per_step / (rate * count)
    if seconds := parse_number(row, "step_time_s"):
        return seconds
    if rate:
        return job.tokens_per_step / (rate * count)
    return _seconds_from_flops(row, job, device, count, assumed)


def _seconds_from_flops(
    row: Row, job: PublishedJob, device: HardwareSpec, count: int, assumed: list[str]
) -> float | None:
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
    if tflops := parse_number(row, "tflops_per_dev"):
        rate = tflops * 1e12
    elif percent := parse_number(row, "mfu_pct"):
        rate = percent / 100 * device.peak(job.format) * job.ranks / count
    else:
        return None
    assumed.append("time derived from FLOP/s")
    return job.tokens_per_step * counted / (rate * count)


def flops_per_token(job: PublishedJob, attention: int) -> float:
    """Return the FLOPs per token: 6 per GEMM weight, plus ``attention`` * layers * width * sequence.

    Frozen weights of LoRA count 4 instead of 6.
    """
    layers = job.model.num_hidden_layers
    blocks = layers * sum(rows * columns for rows, columns in replace(job, tp=1).matmuls)
    each = 4 if job.lora_parameters else 6
    return each * (blocks + job.vocab * job.model.hidden_size) + attention * layers * job.queries * job.seq


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


# Tables: columns, and the notations of their cells.


Row = Mapping[str, str]
NO = ("no", "off", "none", "false", "0", "0.0", "n", "disabled")
_NOTHING = ("?", "-", "n/a", "na", "null", "unknown", "not stated")
_CAPITALS = {name.lower(): name for name in ("peak_mem_GiB", "GPUs")}
"""Column names that contain capitals, by their lower-case names."""
_NUMBER = re.compile(r"[~≈<>]?\s*(\d[\d_]*\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*(%|[a-z/ .]*)", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<=\d)[,\s'](?=\d{3}(?!\d))")
_REMARK = re.compile(r"\(.*?\)")
_TIMES = re.compile(r"\s*[x×*]\s*")


class CannotPredict(ValueError):
    """A row cannot be predicted; the message is the reason."""


def read_table(path: Path) -> list[dict[str, str]]:
    """Read a CSV file of published runs, or of a sweep. Missing cells are empty.

    Columns may be in any order and case, separated by commas, semicolons or tabs.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        head = file.readline()
        file.seek(0)
        lines = csv.reader(file, delimiter=max(",;\t", key=head.count))
        names = [_CAPITALS.get(name.strip().lower(), name.strip().lower()) for name in next(lines, [])]
        cells = [list(map(str.strip, line)) for line in lines]
    rows = [dict.fromkeys(names, "") | dict(zip(names, row, strict=False)) for row in cells if any(row)]
    if rows and TIME in rows[0]:
        rows = [_published(number, row) for number, row in enumerate(rows, 1)]
    for row in rows:
        row["confidence"] = row.get("confidence", "").lower()
    return rows


def parse_number(row: Row, column: str) -> float | None:
    """Parse a number: "4,096", "2 x 8", "8k" (tokens), "870 ms". Return None unless it is positive."""
    plain = _THOUSANDS.sub("", _REMARK.sub("", row.get(column, ""))).strip()
    value = 1.0
    for part in map(_NUMBER.fullmatch, _TIMES.split(plain)):
        if part is None:
            return None
        unit = part[2].strip().lower().partition(" ")[0]
        scale = {"k": 1024 if column == "seq" else 1000, "ms": 1e-3 if column == "step_time_s" else 1}
        value *= float(part[1]) * scale.get(unit, 1)
    return value if 0 < value < float("inf") else None


def parse_int(row: Row, column: str) -> int | None:
    """Parse a positive integer; return None for other values."""
    value = parse_number(row, column)
    return int(value) if value is not None and value >= 1 and value == int(value) else None


def require_int(row: Row, column: str, label: str) -> int:
    """Parse a positive integer that a prediction requires; raise CannotPredict if it is missing."""
    value = parse_int(row, column)
    if value is None:
        raise CannotPredict(f"{label} is not stated")
    return value


def parse_flag(row: Row, column: str) -> bool | None:
    """Parse yes or no; return None for an empty cell."""
    words = row.get(column, "").lower()
    if not words or words in _NOTHING:
        return None
    return words not in NO and not words.startswith("no ")


TIME = "iteration time (ms)"
"""Column by which vTrain's layout sweeps are recognized."""
_SWEEP = tomllib.loads(Path(__file__).with_name("vtrain.toml").read_text(encoding="utf-8"))


def _published(number: int, row: Mapping[str, str]) -> dict[str, str]:
    """Convert row ``number`` (from 1) of a sweep to a row of published runs."""
    run = {"id": f"sweep {number}", **_SWEEP["unsaid"]}
    run |= {name: row.get(column, "") for name, column in _SWEEP["columns"].items()}
    run["ffn"], run["step_time_s"] = f"4 x {run['hidden']}", f"{row.get(TIME, '')} ms"
    return run
