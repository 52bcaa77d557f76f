"""``python -m benchmarks launches`` counts the calls of a log and forecasts a step from them."""

from __future__ import annotations

import pytest

from benchmarks.launches import Work, forecast
from tests.cuda.log import Call

LINES = (
    "KERNEL name=vectorized_elementwise_kernel grid=1,1,1 block=1 stream=0",
    "KERNEL name=triton_poi_fused_0 grid=1,1,1 block=1 stream=0",
    "MARK event=triton kernel=triton_poi_fused_0 bytes=500",
    "GEMM batches=1 shape=4096,16384,11008 types=14,14,14 compute=68 layout=NT stream=0",
    "ACCESS name=mm read=0x1,1000;0x2,2000 written=0x3,30 stream=0",
    "ACCESS name=add read=0x1,100;0x2,200 written=0x3,30 stream=0",
    "ACCESS name=_fused_adamw_ read=0x1,7 written= stream=0",
    "SYNC kind=stream stream=0",
    "COPY from=device to=host bytes=8 stream=0",
)
BLOCK = Work.of([Call.parse(f"0.0 1 {line}") for line in LINES])
NOTHING = Work.of([])


def test_calls_are_counted() -> None:
    assert BLOCK.launches == {"elementwise": 1, "Triton": 1, "matmul": 1} and BLOCK.waits == 1
    assert BLOCK.matmuls == {(4096, 16384, 11008): 1}
    assert BLOCK.megabytes(optimizer=False) == pytest.approx(830e-6)
    assert BLOCK.megabytes(optimizer=True) == pytest.approx(7e-6)
    assert (BLOCK - BLOCK).launches.total() == 0 and (BLOCK - NOTHING).moved == BLOCK.moved


def test_forecast_adds_what_a_step_loses() -> None:
    one, two = (forecast(BLOCK, NOTHING, 4096, "compiled", blocks) for blocks in (1, 2))
    # 2 m n k, and attention: three times 4 tokens keys width / 2 FLOPs, at 989 TFLOP/s.
    flops = 2 * 4096 * 16384 * 11008 + 3 * 4 * 16384 * 4096 * 4096 / 2
    assert one.ideal == pytest.approx(flops / 989e12) and two.ideal == pytest.approx(2 * one.ideal)
    assert min(one.lost.values()) >= 0 and one.mfu < two.mfu < 1, "host work once per step"
    assert one.lost["elementwise kernels of the blocks"] == pytest.approx(830 / (3.35e12 * 0.85))
    assert one.lost["gaps between kernels"] < forecast(BLOCK, NOTHING, 4096, "eager", 1).lost["gaps between kernels"]
