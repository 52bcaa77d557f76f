"""Worker pool after the death of a worker."""

import os
import signal
from collections.abc import Iterator
from multiprocessing import connection
from typing import Any, cast

import pytest

from data_prep.lib.blocks import BlockEncoder, Slots, TextBlock
from data_prep.lib.job import BlockResult
from data_prep.lib.pool import Pool
from megatron_llama.system.errors import MachineError


class DiesWhileSending:
    """Encoder whose process is killed on block 3 when half of the result is in the pipe."""

    def __init__(self) -> None:
        self.slots = Slots(1, 1)

    def run(self, block: TextBlock) -> BlockResult:
        if block.number == 3:
            connection.Connection._send = _send_half  # type: ignore[attr-defined]
        return BlockResult(tokens=[bytes(1000)])


def _send_half(self: connection.Connection, buffer: bytes) -> None:
    os.write(self.fileno(), buffer[: len(buffer) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def blocks() -> Iterator[TextBlock]:
    for number in range(100):
        yield TextBlock(number, [])


@pytest.mark.timeout(60)
def test_a_worker_killed_while_it_sends_a_result_is_reported() -> None:
    done: list[int] = []
    with pytest.raises(MachineError, match="a worker ended by signal 9"):
        with Pool(2, cast(BlockEncoder[Any], DiesWhileSending())) as pool:
            for block, _ in pool.run(blocks(), lambda: None):
                done.append(block.number)
    assert done == list(range(len(done))) and len(done) < 100  # in order
    assert not any(process.is_alive() for process in pool.processes)
