"""Attention of a Blackwell GPU with the stand-in for Transformer Engine. Raises if a result is wrong.

Runs as a program on the runtime. Results are compared with a dense mask in fp32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import torch

from megatron_llama.arch.pattern import Pattern
from megatron_llama.devices import device_named
from megatron_llama.devices.visibility import Documents
from tests.cuda.flash_attention_3 import LENGTH, check

BLACKWELL = 10, 0


def main() -> None:
    sys.path.insert(0, str(Path(__file__).with_name("stand_ins") / "te"))
    with patch.object(torch.cuda, "get_device_capability", lambda *_: BLACKWELL):
        device_named("cuda").enter(0, 1)
    from transformer_engine.pytorch.cpp_extensions import fused_attn  # type: ignore[import-not-found]

    ids = (torch.arange(2 * LENGTH).view(2, LENGTH) % 17 == 0).cumsum(1)
    check(Pattern(), None)
    assert fused_attn.calls == {"fwd sbhd": 1, "bwd sbhd": 1}
    for number, (pattern, documents) in enumerate(
        [(Pattern(), Documents.of(ids)), (Pattern(window=9), None), (Pattern(5), Documents.of(ids))], start=1
    ):
        check(pattern, documents)
        assert fused_attn.calls == {"fwd sbhd": 1, "bwd sbhd": 1, "fwd thd": number, "bwd thd": number}
    print("done")


if __name__ == "__main__":
    main()
