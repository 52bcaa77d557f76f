"""The table of docs/results/vendors.md: python -m benchmarks.verify.operators

Rehearses a step of the Trainium and of the Gaudi experiment, two layers at their true width, and prints which operators
it dispatches that the vendor's published list lacks, and where values are read back. A minute on one core.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from megatron_llama.tools.rehearse.cli import plan_rehearsal
from megatron_llama.tools.rehearse.rehearsal import rehearse
from megatron_llama.tools.rehearse.report import find_listed_name, published_operators, unlisted_operators

LAYOUTS = {
    "Trainium": ("experiment=llama2_7b_qnli_trainium", "model.num_hidden_layers=2", "trainer.global_batch_size=16"),
    "Gaudi": ("experiment=llama2_70b_lora_gaudi", "model.num_hidden_layers=2"),
}


def tables(name: str, overrides: tuple[str, ...]) -> Iterator[str]:
    """Markdown about the step that ``overrides`` describe."""
    plan, _notes = plan_rehearsal(overrides)
    names = published_operators(plan.config.device.name)
    assert names is not None
    rehearsal = rehearse(plan, 0)
    aten = {found.name: found.view for found in rehearsal.operators if found.namespace == "aten"}
    missing = unlisted_operators(rehearsal.operators, names)
    lacking = {found.name for found in missing}
    computing = [operator for operator, view in aten.items() if not view]
    own = sum(find_listed_name(operator, names) == operator for operator in computing)
    other = len(computing) - own - len(lacking)
    yield f"## {name}: `{' '.join(overrides)}`"
    yield ""
    yield (
        f"Rank 0 of {plan.world_size}. {len(aten)} operators of torch: {len(aten) - len(computing)} make views or are "
        f"no kernels; of the other {len(computing)}, {own} are on the list of {len(names)} names, {other} there "
        f"under another name (in place or not, `to`, `view`), and {len(lacking)} are not:"
    )
    yield from ("", "| operator | calls | where it is called first |", "|---|---|---|")
    calls: dict[str, int] = defaultdict(int)
    where: dict[str, dict[str, None]] = defaultdict(dict)
    for found in missing:
        calls[found.name] += found.calls
        where[found.name][f"{found.module} ({found.place.removeprefix('megatron_llama.')})"] = None
    for operator in sorted(lacking):
        first, *more = where[operator]
        rest = f", and {len(more)} more" if more else ""
        yield f"| `{operator}` | {calls[operator]} | {first}{rest} |"
    yield from ("", "Values that are read back in the step, and shapes that depend on values or change:", "")
    for sighting in (*rehearsal.synchronizations, *rehearsal.dynamic):
        yield f"* {sighting.count} x {sighting.what}: {sighting.place}"
    yield ""


if __name__ == "__main__":
    for layout, settings in LAYOUTS.items():
        print("\n".join(tables(layout, settings)))
