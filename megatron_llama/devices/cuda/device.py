"""NVIDIA GPUs, through CUDA and NCCL."""

from __future__ import annotations

import os
import re
import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_llama.arch.attention_pattern import CAUSAL, Pattern, fits_varlen, pattern_of
from megatron_llama.config import ConfigError, Problem
from megatron_llama.devices.base import INDUCTOR, Device, FaultCounts, LazyModule, Peak, async_tp_problem, device_index
from megatron_llama.devices.cuda import fault_counters, flash_attention_3, flight_recorder
from megatron_llama.devices.cuda.compiler import compiler_missing
from megatron_llama.devices.cuda.data_sheets import find_product

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from megatron_llama.config import Config
    from megatron_llama.devices.kernels import Kernels
else:
    torch = LazyModule("torch")

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of torch's allocator: the name since torch 2.9, and the older name, which still works."""
_FRAGMENTATION = 0.06
"""Share of live tensors that the allocator reserves in addition. Measured with torch 2.13, expandable segments and a
simulated device: 1 % for 8 layers of 7 B on one rank, 6 % for 7 B on 8 ranks."""
_CONTEXT_BYTES = 2 << 30
"""Estimate of the CUDA context with its kernels, and of NCCL's buffers."""
_TRANSFORMER_ENGINE = "transformer_engine"
LEAST_FLOAT8_CAPABILITY = 8, 9
"""Compute capability of the first GPUs with float8 tensor cores (Ada)."""
_LEAST_DRIVER = {12: 525, 13: 580}
"""First driver of a CUDA version: CUDA Toolkit release notes, table of minor version compatibility."""

# Files of the driver on Linux: discrete GPU, WSL, Jetson.
DRIVER = Path("/proc/driver/nvidia")
_DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg", "/dev/nvhost-ctrl-gpu")


def _driver_present() -> bool:
    """Whether driver files exist. Importing torch to probe takes seconds, and most login nodes have no GPU."""
    return sys.platform != "linux" or any(os.path.exists(path) for path in _DRIVER_FILES)


class Cuda(Device):
    """One rank per visible GPU."""

    name = "cuda"
    backend = "nccl"
    is_accelerator = True
    forkable = False  # a CUDA context does not survive a fork
    compiler = INDUCTOR
    attention = "varlen"
    binds_process_group = True
    compile_from_steps = 100  # an eager step takes a third more time
    compiles_epochs = True
    fuses_eager_blocks = True
    pins_memory = True
    overlaps_copies = True
    sums_int64 = True
    has_float8 = True
    has_async_tp = True
    float8_multiple = 16
    decoding_keys_multiple = 128  # cuDNN, which torch prefers on Hopper, builds a plan for each shape
    variants = {
        "without Dynamo": {"TORCHDYNAMO_DISABLE": "1"},
        "without cuDNN": {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"},
        "without expandable segments": {_ALLOCATOR_SETTINGS[0]: "expandable_segments:False"},
        "with blocking launches": {"CUDA_LAUNCH_BLOCKING": "1"},
    }
    variable_prefixes = ("CUDA_", "CUBLAS_", "NCCL_")
    interface_variable = "NCCL_SOCKET_IFNAME"

    def probe(self) -> str | None:
        if not _driver_present():
            return "this machine has no NVIDIA driver"
        if torch.version.cuda is None:
            return f"torch {torch.__version__} was built without CUDA"
        if not torch.cuda.is_available():
            return f"torch finds no NVIDIA GPU: {self._driver_fault(torch.__version__, torch.version.cuda)}"
        return None

    def _driver_fault(self, torch_version: str, cuda_version: str) -> str:
        """Return the reason that torch cannot use the driver, with the remedy."""
        driver, major = self.hardware().get("driver"), int(cuda_version.partition(".")[0])
        least = _LEAST_DRIVER.get(major)
        if driver is None or least is None or int(driver.partition(".")[0]) >= least:
            known = "the driver" if driver is None else f"driver {driver}"
            return f"check CUDA_VISIBLE_DEVICES, {known}, and the GPUs of the job (nvidia-smi)"
        return (
            f"driver {driver} is too old for torch {torch_version} with CUDA {cuda_version}; install driver {least} or "
            "newer, or a build of torch for an older CUDA (https://pytorch.org/get-started/locally)"
        )

    def ignored(self) -> str | None:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
        if hidden or sys.platform != "linux" or not _driver_present() or (reason := self.probe()) is None:
            return None
        return f"device=auto does not use the NVIDIA GPU of this machine: {reason}"

    def memory_reserve(self, tensor_bytes: int) -> int:
        return int(_FRAGMENTATION * tensor_bytes) + _CONTEXT_BYTES

    def compiler_missing(self) -> str | None:
        return compiler_missing()

    def count(self) -> int:
        return torch.cuda.device_count()

    def memory_bytes(self) -> int:
        return torch.cuda.get_device_properties(0).total_memory

    def hardware(self) -> dict[str, str]:
        facts = {}
        with suppress(OSError):
            text = (DRIVER / "version").read_text(encoding="utf-8")
            if version := re.search(r"Kernel Module.*?\s(\d[\d.]*)", text):
                facts["driver"] = version[1]
        models: list[str] = []
        for path in sorted(DRIVER.glob("gpus/*/information")):
            with suppress(OSError):
                models += re.findall(r"^Model:\s*(.+?)\s*$", path.read_text(encoding="utf-8"), re.MULTILINE)
        if models:
            facts["devices"] = ", ".join(f"{models.count(model)} x {model}" for model in dict.fromkeys(models))
        return facts

    def libraries(self) -> dict[str, str]:
        versions = {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
        if torch.distributed.is_nccl_available():
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        with suppress(metadata.PackageNotFoundError):
            versions["FlashAttention 3"] = metadata.version(flash_attention_3.PACKAGE)
        with suppress(metadata.PackageNotFoundError):
            versions["Transformer Engine"] = metadata.version(_TRANSFORMER_ENGINE)
        return versions

    def environment(self, config: Config) -> dict[str, str]:
        variables = flight_recorder.recorder_environment()
        trainer = config.trainer
        if not trainer.async_tp and not any(name in os.environ for name in _ALLOCATOR_SETTINGS):
            # Segments grow in place, so fragments of freed blocks stay usable. Not tried with the symmetric memory of
            # async_tp. torch reads the older name first, so either name is the user's choice.
            variables[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
        if trainer.tp > 1 and (trainer.dp, trainer.cp) == (1, 1) and not trainer.compile:
            # The eager linear layers of megatron-core overlap communication by launch order, which needs one hardware
            # queue. With data or context parallelism, fully_shard's collectives would wait in it for matmuls.
            variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        if trainer.random_ltd is not None and pattern_of(config.model) != CAUSAL:
            variables["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"  # its gradients with a mask can be NaN: pytorch#196678
        if trainer.deterministic:
            variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        return variables

    def enter(self, local_rank: int, local_ranks: int) -> torch.device:
        index = device_index(self.name, local_rank, torch.cuda.device_count())
        torch.cuda.set_device(index)
        from megatron_llama.devices.cuda import transformer_engine

        if not flash_attention_3.activate():
            transformer_engine.activate()
        return torch.device("cuda", index)

    def kernel_type(self) -> type[Kernels]:
        from megatron_llama.devices.cuda.kernels import CudaKernels

        return CudaKernels

    def attention_kernel(self, pattern: Pattern, dtype: str, head_dim: int) -> str:
        return "varlen" if fits_varlen(pattern, dtype, head_dim) else "tiles"

    def attention_packages(self) -> list[str]:
        packages = {
            flash_attention_3.MODULE: "FlashAttention 3 on Hopper GPUs",
            _TRANSFORMER_ENGINE: "cuDNN through Transformer Engine on Hopper and Blackwell GPUs",
        }
        return [name for module, name in packages.items() if find_spec(module) is not None]

    def open_fault_counters(self) -> Callable[[], FaultCounts] | None:
        return fault_counters.open_fault_counters(str(torch.cuda.get_device_properties(None).uuid))

    def recorder(self) -> Any:
        return flight_recorder

    def peak_flops(self, precision: str) -> Peak:
        model = torch.cuda.get_device_name()
        product = find_product(model)
        if product is not None:
            rate = product.fp32 if precision == "fp32" else product.bf16
            return Peak(rate * 1e12, f"data sheet, {product.name} dense {precision}")
        return Peak(0.0, f"unknown for {model}: set device.peak_tflops to see MFU")

    def has_fast_bf16(self) -> bool:
        return torch.cuda.get_device_capability() >= (8, 0)  # Ampere and later; Volta and Turing have fp16 units only

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def register_host_memory(self, buffer: torch.Tensor) -> None:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)))

    def unregister_host_memory(self, buffer: torch.Tensor) -> None:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())))

    def synchronize_stream(self) -> None:
        torch.cuda.current_stream().synchronize()

    def require_float8(self) -> None:
        """Raise ConfigError if the GPU's tensor cores have no float8: they do from compute capability 8.9 on."""
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) < LEAST_FLOAT8_CAPABILITY:
            name = torch.cuda.get_device_name()
            needs = ".".join(map(str, LEAST_FLOAT8_CAPABILITY))
            reason = f"{name} has compute capability {major}.{minor}; float8 matmuls need {needs}"
            raise ConfigError([Problem("trainer.float8", None, reason, "write trainer.float8=null")])

    def enable_async_tp(self, group: dist.ProcessGroup) -> None:
        """Enable Inductor's pass micro_pipeline_tp.py, which fuses a gather or scatter with the adjacent matmul.

        The fused operators exchange chunks through symmetric memory, which each GPU of the group maps from all others.
        """
        # The import also defines the operators that cached graphs use.
        import torch.distributed._symmetric_memory as symmetric
        from torch._inductor import config

        reason = _peer_access_problem(group)
        if reason is None:
            with warnings.catch_warnings():
                # Deprecated in torch 2.13, but its pass fuses only if this was called.
                warnings.simplefilter("ignore", FutureWarning)
                symmetric.enable_symm_mem_for_group(group.group_name)
            try:  # at startup, not at the first matmul of a step
                device = torch.device("cuda", torch.cuda.current_device())
                symmetric.rendezvous(symmetric.empty(16, dtype=torch.uint8, device=device), group.group_name)
            except RuntimeError as error:
                reason = f"tensor-parallel ranks cannot map each other's memory: {error}"
        if reason is not None:
            raise ConfigError([async_tp_problem(reason)])
        config._micro_pipeline_tp = True

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()  # an event of another stream may be later than the caller's read
        return start.elapsed_time(end) / 1e3


def _peer_access_problem(group: dist.ProcessGroup) -> str | None:
    """Return the reason that ranks of ``group`` cannot map each other's memory, the same on all; None if no problem.

    GPUs of several machines are not checked: the driver supports them if NVLink connects the machines.
    """
    import torch.distributed as dist

    here = socket.gethostname(), torch.cuda.current_device()
    places: list[tuple[str, int]] = [here] * group.size()
    dist.all_gather_object(places, here, group=group)
    reason = None
    if len(set(places)) < len(places):
        reason = "tensor-parallel ranks have one visible GPU each: make all GPUs of the machine visible to every rank"
    else:
        peers = [index for host, index in places if (host, index) != here and host == here[0]]
        unreachable = [index for index in peers if not torch.cuda.can_device_access_peer(here[1], index)]
        if unreachable:
            reason = f"GPU {here[1]} of {here[0]} has no peer access to GPU {unreachable[0]}"
    reasons = [reason] * group.size()
    dist.all_gather_object(reasons, reason, group=group)
    return next((each for each in reasons if each is not None), None)


DEVICE = Cuda()
