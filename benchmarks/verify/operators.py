"""Print the tables of docs/results/accelerators.md: operators missing from the lists of Trainium and Gaudi.

    python -m benchmarks.verify.operators > operators.md

Rehearses a step of the Trainium and of the Gaudi experiment with two layers of full width. Prints operators that the
vendor's published list lacks, device-to-host synchronizations, and dynamic shapes. Takes about a minute on one core.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator

from benchmarks.help_format import HelpFormatter
from megatron_llama.tools.rehearse.cli import read_rehearsal
from megatron_llama.tools.rehearse.rehearsal import rehearse
from megatron_llama.tools.rehearse.report import find_listed_name, published_operators, unlisted_operators

LAYOUTS = {
    "Trainium": ("experiment=llama2_7b_qnli_trainium", "model.num_hidden_layers=2", "trainer.global_batch_size=16"),
    "Gaudi": ("experiment=llama2_70b_lora_gaudi", "model.num_hidden_layers=2"),
}


def tables(name: str, overrides: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of the Markdown section of one experiment."""
    plan, *_ = read_rehearsal(overrides)
    names = published_operators(plan.config.device.name)
    assert names is not None
    rehearsal = rehearse(plan, 0)
    aten = {operator.name: operator.view for operator in rehearsal.operators if operator.namespace == "aten"}
    missing = unlisted_operators(rehearsal.operators, names)
    unlisted_names = {operator.name for operator in missing}
    computing = [operator for operator, view in aten.items() if not view]
    exact = sum(find_listed_name(operator, names) == operator for operator in computing)
    variants = len(computing) - exact - len(unlisted_names)
    yield f"## {name}: `{' '.join(overrides)}`"
    yield ""
    yield (
        f"Rank 0 of {plan.world_size}. {len(aten)} operators of torch, of which {len(aten) - len(computing)} create "
        f"views or launch no kernel. Of the other {len(computing)}, {exact} are on the list of {len(names)} names, "
        f"{variants} under another name (in-place variant, `to`, `view`), and {len(unlisted_names)} are missing:"
    )
    yield from ("", "| operator | calls | first call |", "|---|---|---|")
    calls: dict[str, int] = defaultdict(int)
    where: dict[str, dict[str, None]] = defaultdict(dict)
    for operator in missing:
        calls[operator.name] += operator.calls
        where[operator.name][f"{operator.module} ({operator.place.removeprefix('megatron_llama.')})"] = None
    for unlisted_name in sorted(unlisted_names):
        first, *more = where[unlisted_name]
        rest = f", and {len(more)} more" if more else ""
        yield f"| `{unlisted_name}` | {calls[unlisted_name]} | {first}{rest} |"
    yield from ("", "Device-to-host synchronizations, and shapes that depend on values or change:", "")
    for sighting in (*rehearsal.synchronizations, *rehearsal.dynamic):
        yield f"* {sighting.count} x {sighting.what}: {sighting.place}"
    yield ""


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter).parse_args()
    for layout, settings in LAYOUTS.items():
        print("\n".join(tables(layout, settings)))
