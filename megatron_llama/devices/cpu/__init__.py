"""CPU: device, process group over shared memory, and kernels."""

from megatron_llama.devices.cpu.device import DEVICE

__all__ = ["DEVICE"]
