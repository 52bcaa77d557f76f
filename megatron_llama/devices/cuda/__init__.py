"""NVIDIA GPUs: device, kernels and the reader of NCCL's flight recorder."""

from megatron_llama.devices.cuda.device import DEVICE

__all__ = ["DEVICE"]
