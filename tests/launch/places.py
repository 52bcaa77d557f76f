"""Contexts of processes on separate machines, for rendezvous tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_llama.launch import reports
from megatron_llama.launch.environment import ProcessContext
from megatron_llama.launch.reports import NodeInfo


def context(rank: int, world: int = 3, address: str = "127.0.0.1", port: int = 0, job: str = "7") -> ProcessContext:
    """Return the context of one of ``world`` processes on separate machines."""
    return ProcessContext("srun", rank, 0, 1, world, address, port, job, False, node=rank, nodes=world)


def info(rank: int, processes: int = 2, **more: Any) -> NodeInfo:
    """Return the report of one process."""
    return replace(reports.node_info(context(rank, processes), rank, 1, 3), name=f"n{rank + 1}", **more)
