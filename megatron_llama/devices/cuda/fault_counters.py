"""Reader of a GPU's counters of memory errors (ECC) and of Xid errors, through NVML if nvidia-ml-py is installed.

NVML counts ECC errors since the driver was loaded. It has no counter of Xid errors, which arrive as events. Names:
NVML API Reference Guide, "Event Handling Methods" and nvmlDeviceGetTotalEccErrors. Not run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megatron_llama.devices.base import FaultCounts

MOST_EVENTS = 100
"""Xid errors that one call reads; the next call reads more."""


def open_fault_counters(uuid: str) -> Callable[[], FaultCounts] | None:
    """Return a function that reads the counters of the GPU with this UUID; None without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # not installed, no driver, a part of a GPU (MIG): a run does not need the counters
        return None
    events: Any = None
    with suppress(Exception):  # not supported, such as on WSL
        events = pynvml.nvmlEventSetCreate()
        pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
    xids, ecc = list[int](), dict[int, int]()

    def count_ecc(kind: int) -> int:
        with suppress(pynvml.NVMLError):  # a GPU without ECC, or one that fell off the bus
            ecc[kind] = int(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, pynvml.NVML_VOLATILE_ECC))
        return ecc.get(kind, 0)

    kinds = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    first = [*map(count_ecc, kinds)]

    def read() -> FaultCounts:
        with suppress(pynvml.NVMLError):  # the timeout without a further event
            for _ in range(MOST_EVENTS if events is not None else 0):
                xids.append(int(pynvml.nvmlEventSetWait(events, 0).eventData))
        corrected, uncorrected = (count_ecc(kind) - before for kind, before in zip(kinds, first, strict=True))
        return FaultCounts(corrected, uncorrected, len(xids), xids[-1] if xids else 0)

    return read
