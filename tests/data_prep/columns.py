"""Writers of parquet and Arrow for the tests, which skip without pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow", reason="an extra")
import pyarrow.parquet as pq  # noqa: E402

Rows = list[dict[str, Any]]


def write_parquet(path: Path, records: Rows, rows: int = 10) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=rows)
    return path


def write_arrow(path: Path, records: Rows, rows: int = 10, stream: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(records)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path
