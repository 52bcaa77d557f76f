"""The CPU: ranks as processes of one machine, its process group and its kernels."""

from megatron_llama.devices.cpu.device import DEVICE

__all__ = ["DEVICE"]
