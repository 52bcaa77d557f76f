"""Peak rates of NVIDIA's GPUs, from data sheets."""

from __future__ import annotations

import re
from typing import NamedTuple


class Product(NamedTuple):
    """Dense rates of one GPU in TFLOP/s."""

    name: str
    """Words of the device's name, as CUDA reports it."""
    bf16: float
    """Rate of tensor cores in bf16 without sparsity, which is half of the rate with sparsity."""
    fp32: float
    """Rate in fp32 without TF32."""
    source: str
    """Document with the rates."""


PRODUCTS = (
    Product("GB300", 2500.0, 80.0, "NVIDIA GB300 NVL72, rates of 72 GPUs / 72"),
    Product("GB200", 2500.0, 80.0, "NVIDIA GB200 NVL72, rates of 72 GPUs / 72"),
    Product("B300", 2250.0, 75.0, "NVIDIA HGX B300, rates of 8 GPUs / 8"),
    Product("B200", 2250.0, 75.0, "NVIDIA HGX B200, rates of 8 GPUs / 8"),
    Product("GH200", 989.0, 67.0, "NVIDIA GH200 data sheet"),
    Product("H200 NVL", 835.0, 60.0, "NVIDIA H200 data sheet, NVL column"),
    Product("H200", 989.0, 67.0, "NVIDIA H200 data sheet, SXM column"),
    Product("H100 NVL", 835.0, 60.0, "NVIDIA H100 data sheet, NVL column"),
    Product("H100 PCIe", 756.0, 51.0, "NVIDIA H100 data sheet, PCIe column (2022)"),
    Product("H100", 989.0, 67.0, "NVIDIA H100 data sheet, SXM column"),
    Product("H20", 148.0, 44.0, "NVIDIA H20 data sheet"),
    Product("A100", 312.0, 19.5, "NVIDIA A100 data sheet"),
    Product("L40S", 362.0, 91.6, "NVIDIA L40S data sheet"),
    Product("A10G", 70.0, 35.0, "NVIDIA A10G data sheet"),
    Product("RTX 4090", 165.0, 82.6, "NVIDIA Ada architecture white paper"),
    Product("RTX 5090", 209.5, 104.8, "NVIDIA RTX Blackwell architecture white paper, fp32 accumulation"),
    Product("V100", 125.0, 15.7, "NVIDIA V100 data sheet, fp16: it has no bf16"),
)
"""Longer names come before the names that they contain."""


def find_product(device_name: str) -> Product | None:
    """Return the GPU of a device name such as "NVIDIA H100 80GB HBM3". None: unknown, or a part of a GPU (MIG)."""
    return next((product for product in PRODUCTS if re.search(rf"\b{product.name}\b(?!.* MIG)", device_name)), None)
