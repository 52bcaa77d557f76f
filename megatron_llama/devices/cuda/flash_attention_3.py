"""FlashAttention 3 (Shah et al. 2024, arXiv:2407.08608) on Hopper GPUs that have its package. Not run on hardware.

The package is built from ``hopper/`` of github.com/Dao-AILab/flash-attention. PyPI has no build with a backward pass,
so there is no extra. torch calls its kernels in place of FlashAttention 2: in scaled_dot_product_attention and in the
operators of ``varlen``, in 16-bit formats. Other formats keep their kernels.
"""

from __future__ import annotations

import importlib.util
import warnings

PACKAGE, MODULE = "flash_attn_3", "flash_attn_interface"
CAPABILITY = 9  # major compute capability of Hopper, the only one that the kernels support


def activate() -> bool:
    """Use FlashAttention 3 in this process, if its GPU is a Hopper; return whether it is used.

    Warns and keeps FlashAttention 2 if the package is installed but does not work with this torch.
    """
    if importlib.util.find_spec(MODULE) is None:
        return False
    import torch
    from torch.nn import attention

    if torch.cuda.get_device_capability()[0] != CAPABILITY:
        return False
    try:
        attention.activate_flash_attention_impl("FA3")
    except (AttributeError, ImportError, RuntimeError) as error:  # torch below 2.11; a build for another torch
        warnings.warn(f"FlashAttention 2 instead of {PACKAGE}, which does not work here: {error}", stacklevel=2)
        return False
    return True
