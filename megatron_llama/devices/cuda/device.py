"""NVIDIA GPUs, through CUDA and NCCL."""

from __future__ import annotations

import os
import re
import socket
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.arch.pattern import Pattern, fits_varlen
from megatron_llama.config import ConfigError
from megatron_llama.devices.base import INDUCTOR, Device, Peak, async_tp_problem, device_index
from megatron_llama.devices.cuda.flight_recorder import (
    ask_for_collectives,
    collectives,
    recorder_environment,
    remove_recordings,
)

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from megatron_llama.config import Config
    from megatron_llama.devices.kernels import Kernels

# Dense TFLOP/s from the makers' data sheets: (part of the device's name, bf16, fp32 as TF32 is off). First match wins.
_PEAKS = (
    ("GB200", 2450.0, 80.0),
    ("B200", 2250.0, 75.0),
    ("H200", 989.0, 67.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100", 989.0, 67.0),
    ("A100", 312.0, 19.5),
    ("L40S", 362.0, 91.6),
    ("A10G", 70.0, 35.0),
    ("RTX 4090", 165.0, 82.6),
    ("V100", 125.0, 15.7),
)


# Where a driver shows itself on Linux: a GPU of its own, one lent by Windows, a Jetson's.
DRIVER = Path("/proc/driver/nvidia")
_DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg", "/dev/nvhost-ctrl-gpu")


def _driver_present() -> bool:
    """Whether a probe by torch is worth its import, which takes seconds: most login nodes have no GPU."""
    return sys.platform != "linux" or any(os.path.exists(path) for path in _DRIVER_FILES)


class Cuda(Device):
    """One rank per visible GPU."""

    name = "cuda"
    backend = "nccl"
    is_accelerator = True
    forkable = False  # a CUDA context does not survive a fork
    compiler = INDUCTOR
    attention = "varlen"
    pins_memory = True
    variable_prefixes = ("CUDA_", "CUBLAS_", "NCCL_")
    interface_variable = "NCCL_SOCKET_IFNAME"

    def probe(self) -> str | None:
        if not _driver_present():
            return "this machine has no NVIDIA driver"
        import torch

        if torch.version.cuda is None:
            return f"torch {torch.__version__} was built without CUDA"
        if not torch.cuda.is_available():
            return "torch finds no NVIDIA GPU (is there a driver, and is CUDA_VISIBLE_DEVICES right?)"
        return None

    def count(self) -> int:
        import torch

        return torch.cuda.device_count()

    def memory_bytes(self) -> int:
        import torch

        return torch.cuda.get_device_properties(0).total_memory

    def hardware(self) -> dict[str, str]:
        found = {}
        with suppress(OSError):
            text = (DRIVER / "version").read_text(encoding="utf-8")
            if version := re.search(r"Kernel Module\D*(\d[\d.]*)", text):
                found["driver"] = version[1]
        models: list[str] = []
        for path in sorted(DRIVER.glob("gpus/*/information")):
            with suppress(OSError):
                models += re.findall(r"^Model:\s*(.+?)\s*$", path.read_text(encoding="utf-8"), re.MULTILINE)
        if models:
            found["devices"] = ", ".join(f"{models.count(model)} x {model}" for model in dict.fromkeys(models))
        return found

    def environment(self, config: Config) -> dict[str, str]:
        variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **recorder_environment()}
        trainer = config.trainer
        if trainer.tp > 1 and trainer.dp == 1 and not trainer.compile:
            # megatron-core's linears overlap communication by the order in which kernels are launched, which one
            # queue keeps. It would also put fully_shard's collectives in line with the products that they should run
            # beside, so with data parallelism the default stands; and compiled blocks don't use those linears.
            variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        if trainer.deterministic:
            variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        return variables

    def enter(self, local_rank: int, local_ranks: int) -> torch.device:
        import torch

        index = device_index(self.name, local_rank, torch.cuda.device_count())
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def kernel_type(self) -> type[Kernels]:
        from megatron_llama.devices.cuda.kernels import CudaKernels

        return CudaKernels

    def attention_kernel(self, pattern: Pattern, dtype: str, head_dim: int) -> str:
        return "varlen" if fits_varlen(pattern, dtype, head_dim) else "tiles"

    def request_collectives(self, rank: int) -> bool:
        return ask_for_collectives(rank)

    def last_collectives(self, rank: int) -> str:
        return collectives(rank)

    def remove_recordings(self, rank: int) -> None:
        remove_recordings(rank)

    def peak_flops(self, precision: str) -> Peak:
        import torch

        model = torch.cuda.get_device_name()
        for part, bf16, fp32 in _PEAKS:
            if part in model:
                return Peak((fp32 if precision == "fp32" else bf16) * 1e12, f"data sheet, {part} dense {precision}")
        return Peak(0.0, f"unknown for {model}: set device.peak_tflops to see MFU")

    def has_fast_bf16(self) -> bool:
        import torch

        return torch.cuda.get_device_capability() >= (8, 0)  # from Ampere on; Volta's and Turing's units are for fp16

    def peak_memory_bytes(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated()

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def synchronize_stream(self) -> None:
        import torch

        torch.cuda.current_stream().synchronize()

    def async_tp_missing(self) -> str | None:
        return None

    def enable_async_tp(self, group: dist.ProcessGroup) -> None:
        """Inductor's pass (torch/_inductor/fx_passes/micro_pipeline_tp.py) replaces a gather or scatter and the product
        beside it by one operator, whose pieces go through symmetric memory: memory of each GPU that all others map."""
        import torch

        # Also defines the operators, which graphs out of the cache name.
        import torch.distributed._symmetric_memory as symmetric
        from torch._inductor import config

        reason = _out_of_reach(group)
        if reason is None:
            with warnings.catch_warnings():
                # torch 2.13 calls this needless, and its pass fuses only where it was called.
                warnings.simplefilter("ignore", FutureWarning)
                symmetric.enable_symm_mem_for_group(group.group_name)
            try:  # now, and not at the first product, in the middle of a step
                own = torch.device("cuda", torch.cuda.current_device())
                symmetric.rendezvous(symmetric.empty(16, dtype=torch.uint8, device=own), group.group_name)
            except RuntimeError as error:
                reason = f"the tensor-parallel ranks can't map each other's memory: {error}"
        if reason is not None:
            raise ConfigError([async_tp_problem(reason)])
        config._micro_pipeline_tp = True

    def record_event(self) -> torch.cuda.Event:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3


def _out_of_reach(group: dist.ProcessGroup) -> str | None:
    """Why the ranks of ``group`` can't map each other's memory, the same on all of them; None if nothing that can be
    seen ahead is in the way. GPUs of several machines can where NVLink joins these, which is left to the driver."""
    import torch
    import torch.distributed as dist

    here = socket.gethostname(), torch.cuda.current_device()
    places: list[tuple[str, int]] = [here] * group.size()
    dist.all_gather_object(places, here, group=group)
    reason = None
    if len(set(places)) < len(places):
        reason = "tensor-parallel ranks see one GPU each, under one number: show every rank all GPUs of its machine"
    else:
        beside = [index for host, index in places if (host, index) != here and host == here[0]]
        apart = [index for index in beside if not torch.cuda.can_device_access_peer(here[1], index)]
        if apart:
            reason = f"GPU {here[1]} of {here[0]} can't reach the memory of GPU {apart[0]}"
    reasons = [reason] * group.size()
    dist.all_gather_object(reasons, reason, group=group)
    return next((each for each in reasons if each is not None), None)


DEVICE = Cuda()
