"""Compare all layouts of tests/layouts with the one-process oracle; print a Markdown table of differences.

    python -m benchmarks.verify.parity --exact docs/results/exact.txt > table.md
    python -m benchmarks.verify.parity --fine-tuning >> table.md

Takes about twenty minutes on two cores, and five for preferences, new tokens and their rows under LoRA. The table of
exact mode comes from `python -m benchmarks.verify.exact`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.help_format import HelpFormatter
from benchmarks.results import conditions
from megatron_llama.system.errors import run_main
from megatron_llama.system.tables import markdown_table

KINDS = ("losses", "norms", "first_grads", "last_grads", "weights")
COLUMNS = ("layout", "ranks", "losses", "gradient norms", "gradients, step 1", "gradients, step 3", "weights, step 3")


def exact_results(page: str) -> dict[str, str]:
    """Return the result of each row in a page of benchmarks.verify.exact: 0, or the first cell that is not 0.

    The cells "own" (the row has its own precision) and "–" (not run) are no results.
    """
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| layout |")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    results = {name: [cell for cell in cells if cell not in ("own", "–")] for name, _, *cells in rows}
    return {name: next((cell for cell in cells if cell != "0"), "0") for name, cells in results.items() if cells}


def fine_tuning_rows(folder: Path | None = None) -> Iterator[tuple[str, int, list[str]]]:
    """Yield (name, ranks, settings) of the layouts of tests/finetuning; settings need the data in ``folder``."""
    from tests.finetuning import runner, test_preference
    from tests.ranks import run_ranks
    from tests.rows import read_layouts

    world = None if folder is None else runner.make_world(folder)
    for number, (name, (ranks, settings)) in enumerate(read_layouts(runner.__file__, "preference")[0].items()):
        if ranks > 1:
            if world is not None:
                settings = test_preference.settings(world.base.parent / str(number), world, *settings)
            yield name if name.startswith(("orpo", "kto")) else f"dpo, {name}", ranks, settings
    for tied in (False, True):
        start = [*runner.GROWN, *([runner.TIED] if tied else [])]
        kinds = {"new tokens": ["finetune=full"], "new tokens, rows": [*runner.LORA, *runner.BY_ROWS[tied]]}
        if folder is not None:
            base, grown = runner.make_bases(folder / f"tokens_{tied}", tied)
            start += [f"init_from={base}"]
            # At B = 0 Adam's first steps are signs of gradients, also of gradients that are rounding errors.
            plan, adapter = runner.make_plan(1, folder, *kinds["new tokens, rows"], *start), base.parent / "adapter"
            run_ranks(runner.save_adapter, 1, plan, grown, adapter)
            kinds["new tokens, rows"] = ["finetune=lora", f"finetune.adapter={adapter}"]
        for kind, chosen in kinds.items():
            for name, (ranks, layout) in read_layouts(runner.__file__, "new tokens")[0].items():
                if ranks > 1:
                    yield f"{kind}, {'tied' if tied else 'untied'}, {name}", ranks, [*start, *chosen, *layout]


def print_fine_tuning(texts: list[str]) -> bool:
    """Print the table of ``fine_tuning_rows``; return whether a difference exceeds the tolerance."""
    from tests.finetuning.runner import MICRO_1, TOLERANCE, tune, worst
    from tests.oracle import distance

    columns, failed = [name for name in COLUMNS if "gradients, step 3" not in name], False
    print("\n" + "\n".join(markdown_table(columns, [])))
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, ranks, settings) in enumerate(fine_tuning_rows(Path(folder))):
            if not any(text in name for text in texts):
                continue
            alone = [setting for setting in settings if not setting.startswith("trainer.") or setting == MICRO_1]
            ours, one = (
                tune(world, Path(folder, f"{number}_{world}"), *chosen, steps=3)
                for world, chosen in ((ranks, settings), (1, alone))
            )
            differences = worst(ours, one)
            values = [differences.pop("losses"), differences.pop("norms")]
            values += [max(distance(ours.first_grads[key], grad) for key, grad in one.first_grads.items())]
            values += [max(differences.values())]
            failed |= max(values) > TOLERANCE
            print(f"| {name} | {ranks} | {' | '.join(map(_cell, values))} |", flush=True)
    return failed


def _cell(difference: float) -> str:
    return "0" if difference == 0 else f"{difference:.1e}"


def main() -> int:
    """Print the table; return 1 if a difference exceeds the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[""], metavar="TEXT", help="only rows with one of the texts")
    parser.add_argument("--exact", type=Path, metavar="PAGE", help="adds the column of exact mode from this page")
    parser.add_argument("--fine-tuning", action="store_true", help="only the layouts of tests/finetuning")
    args = parser.parse_args()
    if args.fine_tuning:
        return int(print_fine_tuning(args.rows))
    from tests.compiled import REASON
    from tests.layouts.table import LAYOUTS, rejection
    from tests.oracle import TOLERANCE, oracle, run_layout, worst

    exact = exact_results(args.exact.read_text(encoding="utf-8")) if args.exact is not None else None
    print(f"{conditions()} `python -m benchmarks.verify.parity`\n")
    print("\n".join(markdown_table((*COLUMNS, *(["exact"] * (exact is not None))), [])))
    failed = False
    for name, ranks, layout, model in (row for row in LAYOUTS if any(text in row[0] for text in args.rows)):
        if REASON is not None and "trainer.compile=true" in layout:
            sys.stderr.write(f"{name}: skipped. {REASON}\n")
            continue
        differences = worst(run_layout(ranks, *layout, *model), oracle(*model))
        failed |= any(differences[kind] > TOLERANCE for kind in KINDS)
        cells = [_cell(differences[kind]) for kind in KINDS]
        if exact is not None:
            cells.append(rejection(layout, model) or exact.get(name, "not run"))
        print(f"| {name} | {ranks} | {' | '.join(cells)} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    run_main(main)
