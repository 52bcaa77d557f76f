"""Numbers as people read them."""

from __future__ import annotations

import pytest

from megatron_llama.system.tables import GIB, gib

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 MiB"),
        (512 * MIB, "512 MiB"),
        (1002 * MIB, "1,002 MiB"),
        (GIB - 1, "1,024 MiB"),
        (GIB, "1 GiB"),
        (25.14 * GIB, "25.1 GiB"),
        (1024 * GIB, "1,024 GiB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    assert gib(size) == text
