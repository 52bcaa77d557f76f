"""CPU and CUDA devices, and the selection of a device. Other devices have separate test files."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch._inductor import config as inductor

from megatron_llama.config import ConfigError
from megatron_llama.devices import NAMES, device_named, get_device, ignored_devices
from megatron_llama.devices.cpu import device as cpu
from megatron_llama.devices.cuda import compiler
from megatron_llama.devices.cuda import device as cuda
from megatron_llama.devices.cuda.data_sheets import find_product
from megatron_llama.plan import resolve
from megatron_llama.system import ulimits
from megatron_llama.tools.forecast import hardware
from tests.config.helpers import make
from tests.ranks import run_ranks


def test_an_unknown_device_is_told_the_choices() -> None:
    with pytest.raises(ValueError, match=r"unknown device 'tpu': choose one of auto, cuda, neuron, hpu, cpu"):
        get_device("tpu")


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        ("x86_64 Kernel Module  535.129.03", "535.129.03 is too old for torch .* CUDA 13.0; install driver 580"),
        ("Open Kernel Module for x86_64  580.65.06", "CUDA_VISIBLE_DEVICES, driver 580.65.06, and the GPUs of the job"),
        ("", "check CUDA_VISIBLE_DEVICES, the driver, and the GPUs of the job"),
    ],
)
def test_auto_reports_a_bad_driver(driver: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cuda.sys, "platform", "linux")
    monkeypatch.setattr(cuda, "_driver_present", lambda: True)
    (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX {driver}  Release Build\nGCC version:  13.3.0\n")
    monkeypatch.setattr(cuda, "DRIVER", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (line,) = ignored_devices()
    assert re.search(f"device=auto does not use the NVIDIA GPU of this machine: .*{reason}", line)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ignored_devices() == [], "the user hides the GPUs"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(cuda, "_driver_present", lambda: False)
    assert ignored_devices() == []


@pytest.mark.parametrize(("version", "reason"), [(None, "was built without CUDA"), ("13.0", "finds no NVIDIA GPU")])
def test_an_unavailable_device_is_reported(version: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_driver_present", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"device=cuda is unavailable on this host: .*{reason}"):
        get_device("cuda")
    assert get_device("auto").name == "cpu"
    monkeypatch.setattr(cuda.DEVICE.__class__, "probe", lambda self: None)
    assert get_device("auto").name == "cuda" and get_device("cpu").name == "cpu"


def test_without_a_driver_torch_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_DRIVER_FILES", ("/no/such/file",))
    monkeypatch.setattr(cuda.sys, "platform", "linux")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("torch was called"))
    assert get_device("auto").name == "cpu"


CACHED = "anon 7\nactive_file 268435456\ninactive_file 268435456\n"
VERSION_1 = {"limit": "2147483648\n", "usage": "1073741824\n"}


@pytest.mark.parametrize(
    ("files", "mib", "free"),
    [
        ({}, 4096, 2048),
        ({"memory.max": "1073741824\n"}, 1024, 1024),
        ({"memory.max": "1073741824\n", "memory.current": "805306368\n"}, 1024, 256),
        ({"memory.max": "1073741824\n", "memory.current": "805306368\n", "memory.stat": CACHED}, 1024, 768),
        ({"memory.max": "max\n", "memory.current": "805306368\n"}, 4096, 2048),
        ({"job/memory.max": "3221225472\n", "job/step/memory.max": "max\n"}, 3072, 2048),
        ({"job/memory.max": "3221225472\n", "job/memory.current": "2147483648\n"}, 3072, 1024),
        ({"memory/batch/memory.limit_in_bytes": "2147483648\n", "memory.max": "max"}, 2048, 2048),
        ({f"memory/memory.{name}_in_bytes": size for name, size in VERSION_1.items()}, 2048, 1024),
    ],
    ids="none,container,used,cached,unlimited,parent,used parent,version 1,used version 1".split(","),
)
def test_memory_of_a_control_group(
    files: dict[str, str], mib: int, free: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contents = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    contents["proc/self/cgroup"] = "9:cpu,cpuacct:/\n4:memory:/batch\n0::/job/step\n"
    contents["proc/meminfo"] = "MemFree:        7 kB\nMemAvailable:   2097152 kB\n"
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(ulimits, "Path", lambda name: tmp_path / name.lstrip("/"))
    monkeypatch.setattr(cpu.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}.__getitem__)
    assert get_device("cpu").memory_bytes() >> 20 == mib and min(ulimits.available_memory()) >> 20 == free


def _free_bytes() -> int:
    """Free memory of glibc's heap: ``fordblks`` of struct mallinfo2, the ninth of ten numbers."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = type("Mallinfo", (ctypes.Structure,), {"_fields_": [("counters", ctypes.c_size_t * 10)]})
    return int(mallinfo().counters[8])


def _free_heap(_: int, activation_bytes: int) -> tuple[int, int]:
    """Free large tensors among small ones; return the free bytes of the heap before and after."""
    device = get_device("cpu")
    device.enter(0, 1)
    device.prepare_memory(activation_bytes)
    before = _free_bytes()
    tensors = [torch.ones(size) for _ in range(8) for size in (5 << 20, 1000)]
    del tensors[::2]
    return before, _free_bytes()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_memory_of_long_sequences_is_returned_to_the_system() -> None:
    [(_, reused)], [(before, after)] = (run_ranks(_free_heap, 1, size << 20) for size in (4, 32))
    assert reused > 100 << 20, "a short sequence keeps freed memory"
    assert after - before < 1 << 20


@pytest.mark.parametrize(
    ("requested", "expected"),
    [(None, [8, 2, 1]), ("", [8, 2, 1]), ("3", [3, 3, 3]), ("5,2", [5, 5, 5]), ("99999", [1024] * 3)],
)
def test_local_ranks_share_cores(requested: str | None, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(cpu.Cpu, "count", lambda self: 8)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setenv("OMP_NUM_THREADS", requested or "")
    if requested is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    device = get_device("cpu")
    # The world, ranks of other machines included, says nothing about this one.
    assert device.environment(resolve(make(**{"trainer.global_batch_size": 48}), 16).config) == {}
    for local_ranks in (1, 3, 16):
        assert device.enter(0, local_ranks) == torch.device("cpu")
    assert threads == expected, "what the user sets wins"


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed: set[str] = set()
    for module in (compiler, cpu):
        monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{name}" if name in installed else None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "needs a C compiler, and gcc is not installed" in (cuda.DEVICE.compiler_missing() or "")
    installed.add("clang")
    assert f"{tmp_path / 'Python.h'} is missing" in (cuda.DEVICE.compiler_missing() or "")
    (tmp_path / "Python.h").touch()
    assert cuda.DEVICE.compiler_missing() is None
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, "my-compiler")
    assert "my-compiler (CC) is not installed" in (cuda.DEVICE.compiler_missing() or "")
    assert "my-compiler is not installed" in (cpu.DEVICE.compiler_missing() or "")
    installed.add("my-compiler")
    assert cpu.DEVICE.compiler_missing() is None


PEAKS = {
    (989, 67): ("H100 80GB HBM3", "H200", "GH200 480GB"),
    (835, 60): ("H100 NVL", "H200 NVL"),
    (756, 51): ("H100 PCIe",),
    (148, 44): ("H20", "H20-3e"),
    (2250, 75): ("B200", "B300 SXM6 AC"),
    (2500, 80): ("GB200", "GB300"),
    (312, 19.5): ("A100-SXM4-80GB", "A100 80GB PCIe"),
    (362, 91.6): ("L40S",),
    (165, 82.6): ("GeForce RTX 4090",),
    (209.5, 104.8): ("GeForce RTX 5090",),
}
"""Dense TFLOP/s in bf16 and fp32."""


def test_peaks_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for model, bf16, fp32 in ((model, *peak) for peak, models in PEAKS.items() for model in models):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda model=model: f"NVIDIA {model}")
        rates = [cuda.DEVICE.peak_flops(precision).flops for precision in ("bf16", "fp32")]
        assert rates == [bf16 * 1e12, fp32 * 1e12], model
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200 MIG")
    assert cuda.DEVICE.peak_flops("bf16") == (0.0, "unknown for NVIDIA H200 MIG: set device.peak_tflops to see MFU")


def test_the_forecasts_hardware_has_the_same_peaks() -> None:
    names = {"h100-500w": "H100", "a100-40gb": "A100", "a100-pcie": "A100", "h100-pcie": "H100 PCIe"}
    of_nvidia = {name: spec for name, spec in hardware.devices().items() if spec.kind == "cuda" and name[:2] != "mi"}
    assert {"h100", "gh200", "b200", "b300", "gb200", "gb300"} <= set(of_nvidia)
    for name, spec in of_nvidia.items():
        product = find_product(f"NVIDIA {names.get(name, name.upper())}")
        assert product is not None, name
        assert (spec.peak("bf16"), spec.peak("fp32")) == (product.bf16 * 1e12, product.fp32 * 1e12), name


@pytest.mark.parametrize(("local_rank", "visible", "index"), [(3, 4, 3), (3, 1, 0), (0, 1, 0)])
def test_a_rank_takes_a_visible_gpu(local_rank: int, visible: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # srun --gpus-per-task=1 shows each task one GPU, whatever its number on the machine.
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert cuda.DEVICE.enter(local_rank, 4) == torch.device("cuda", index) and chosen == [index]


def test_more_ranks_than_gpus_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, advice in ((2, "start 2 ranks per machine"), (0, "check that the job was given devices")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        with pytest.raises(ConfigError, match=f"local rank 2 has no device: {visible} are visible(.|\n)*{advice}"):
            cuda.DEVICE.enter(2, 3)


class Nvml(ModuleType):
    """pynvml as of nvidia-ml-py 12.575, for one GPU."""

    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0
    nvmlEventTypeXidCriticalError = 8

    class NVMLError(Exception):
        """Also of a timeout and of unsupported functions."""

    nvmlInit, nvmlEventSetCreate = staticmethod(lambda: None), staticmethod(lambda: "set")
    nvmlDeviceRegisterEvents = staticmethod(lambda handle, types, events: None)

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.ecc, self.xids = [3, 0], list[int]()

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlEventSetWait(self, events: str, milliseconds: int) -> SimpleNamespace:
        assert (events, milliseconds) == ("set", 0)
        if not self.xids:
            raise self.NVMLError("Timeout")
        return SimpleNamespace(eventType=8, eventData=self.xids.pop(0))

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        if not self.ecc:
            raise self.NVMLError("Not Supported")
        return self.ecc[kind]


def test_fault_counters_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    read = cuda.DEVICE.open_fault_counters()
    assert read is not None and read() == (0, 0, 0, 0)
    nvml.ecc, nvml.xids = [4, 1], [63, 79]
    assert read() == (1, 1, 2, 79) and read() == (1, 1, 2, 79), "an error is counted once"
    nvml.ecc = []
    assert read() == (1, 1, 2, 79), "a lost GPU"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="MIG"))
    assert cuda.DEVICE.open_fault_counters() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert cuda.DEVICE.open_fault_counters() is None, "not installed"


def test_times_between_events_are_seconds() -> None:
    start = SimpleNamespace(elapsed_time=lambda end: 2500.0 if end.synchronize.called else 0.0)
    assert cuda.DEVICE.elapsed_seconds(start, Mock()) == 2.5


def test_where_inductor_keeps_its_graphs(tmp_path: Path) -> None:
    for device in (cpu.DEVICE, cuda.DEVICE):
        variables = device.compile_environment(tmp_path)
        assert set(variables) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
        assert all(Path(value).is_relative_to(tmp_path) for value in variables.values())
        assert device.count_compiled_graphs(tmp_path) is None and device.ahead_of_time_environment() == {}


def test_the_seed_reaches_torch() -> None:
    drawn = []
    for seed in (7, 8, 7):
        get_device("cpu").seed(seed)
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] == drawn[2] != drawn[1]


def test_variables_of_a_gpu_follow_from_the_layout() -> None:
    def variables(ranks: int, **settings: object) -> dict[str, str]:
        config = resolve(make(**{f"trainer.{name}": value for name, value in settings.items()}), ranks).config
        return cuda.DEVICE.environment(config)

    plain, no_cudnn = variables(1), "TORCH_CUDNN_SDPA_DEPRIORITIZED"
    assert not plain.keys() & {"CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", no_cudnn}
    masked = make(**{"trainer.random_ltd.min_value": 64, "model.sliding_window": 48})
    assert cuda.DEVICE.environment(masked)[no_cudnn] == "1"
    # With 1 torch aborts communicators while the flight recorder writes its dump.
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in plain
    full = variables(2, tp=2, deterministic=True)
    assert full["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and full["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    # fully_shard's collectives would wait in the single queue for matmuls that they should overlap.
    assert all("CUDA_DEVICE_MAX_CONNECTIONS" not in variables(4, tp=2, cp=cp) for cp in (1, 2))


def test_the_allocator_has_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    config = resolve(make(**{"trainer.tp": 2}), 2).config
    assert cuda.DEVICE.environment(config)[names[0]] == "expandable_segments:True"
    config.trainer.async_tp = True
    assert not set(names) & set(cuda.DEVICE.environment(config))
    config.trainer.async_tp = False
    for name in names:  # torch reads one of them, so ours could hide the user's
        monkeypatch.setenv(name, "max_split_size_mb:512")
        assert not set(names) & set(cuda.DEVICE.environment(config))
        monkeypatch.delenv(name)


def _enabled(rank: int, fault: str) -> tuple[bool, str]:
    """Whether Inductor's pass is on for the group of all ranks, and why not. Each rank of a machine has a GPU."""
    torch.cuda.current_device = lambda: 0 if fault == "one visible" else rank
    torch.cuda.can_device_access_peer = lambda one, other: not (fault == "no path" and rank == 1)
    symmetric.empty = lambda *size, dtype, device: torch.empty(*size, dtype=dtype)
    symmetric.rendezvous = lambda memory, group: dist.barrier()
    if fault == "driver":
        symmetric.rendezvous = lambda memory, group: (_ for _ in ()).throw(RuntimeError("no pidfd_open"))
    elif fault == "two machines":
        cuda.socket.gethostname = lambda: f"node{rank}"
        torch.cuda.can_device_access_peer = lambda one, other: pytest.fail("asked about another machine's GPU")
    name, message = dist.group.WORLD.group_name, ""
    try:
        cuda.DEVICE.enable_async_tp(dist.group.WORLD)
    except ConfigError as error:
        message = str(error)
    assert not inductor._micro_pipeline_tp or symmetric.is_symm_mem_enabled_for_group(name)
    return inductor._micro_pipeline_tp, message


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("", ""),
        ("two machines", ""),  # NVLink may join them
        ("one visible", "make all GPUs of the machine visible to every rank"),
        ("no path", "GPU 1 of .* has no peer access to GPU 0"),
        ("driver", "cannot map each other's memory: no pidfd_open"),
    ],
)
def test_async_tp_needs_gpus_that_reach_each_other(fault: str, message: str) -> None:
    for on, reason in run_ranks(_enabled, 2, fault):  # all ranks give one answer
        assert on == (not message) and re.search(message, re.sub(r"\s+", " ", reason)), reason


def test_gpus_without_float8_units_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    for capability, works in {(8, 0): False, (8, 9): True, (9, 0): True, (10, 0): True}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda known=capability: known)
        if works:
            cuda.DEVICE.require_float8()
        else:
            with pytest.raises(ConfigError, match="compute capability 8.0; float8 matmuls need 8.9"):
                cuda.DEVICE.require_float8()


def test_abilities_of_devices() -> None:
    assert [name for name in NAMES if device_named(name).has_float8] == ["cuda", "cpu"]
    assert [name for name in NAMES if device_named(name).has_async_tp] == ["cuda"]
