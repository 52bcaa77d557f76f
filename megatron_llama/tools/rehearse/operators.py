"""Which operators of a rehearsed step a vendor's published list has.

The lists are tables of names, operators/DEVICE.csv; operators/README.md has their sources.
"""

from __future__ import annotations

import csv
from collections.abc import Collection
from pathlib import Path

from megatron_llama.tools.rehearse.report import DispatchedOperator

LISTS = Path(__file__).with_name("operators")
# Dispatched name -> the name under which a public list has it.
_OTHER_NAMES = {
    "_to_copy": "to",
    "_unsafe_view": "view",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
    "split_with_sizes": "split",
    "where": "_s_where",
}


def published(device: str) -> frozenset[str] | None:
    """The names that the vendor of ``device`` lists; None where no list is kept here."""
    path = LISTS / f"{device}.csv"
    if not path.exists():
        return None
    with path.open(newline="") as file:
        return frozenset(row["operator"] for row in csv.DictReader(file))


def listed_as(name: str, names: Collection[str]) -> str | None:
    """The name under which ``names`` has the operator ``name``: its own, its form in place or not, another; or None."""
    other_form = name.removesuffix("_") if name.endswith("_") else name + "_"
    return next((known for known in (name, other_form, _OTHER_NAMES.get(name)) if known in names), None)


def unlisted(operators: Collection[DispatchedOperator], names: Collection[str]) -> tuple[DispatchedOperator, ...]:
    """Those of torch's own ``operators`` (aten) that compute something and that ``names`` lacks.

    A view computes nothing: it is another description of the same memory, and needs no kernel.
    """
    computing = (found for found in operators if found.namespace == "aten" and not found.view)
    return tuple(found for found in computing if listed_as(found.name, names) is None)
