"""AWS Trainium, with pipeline transfers for process groups without send and recv."""

from megatron_llama.devices.neuron.device import DEVICE

__all__ = ["DEVICE"]
