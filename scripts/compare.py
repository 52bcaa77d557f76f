"""Compare training curves: python scripts/compare.py RUN_A RUN_B [...] --tolerance 0.01

Reads run folders, TensorBoard folders, metrics.jsonl and trainer_state.json, of this program, NeMo, Megatron-LM and
Hugging Face's Trainer. Prints a table and a verdict, and draws the curves and their gap. docs/compare.md explains.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

STATUS = "Exit status: 0 the curves agree, 1 they don't, 2 a mistake in what was asked."


def main() -> int:
    """Exit status: 0 the curves agree, 1 they don't, 2 a mistake in what was asked."""
    arguments = parsed()
    # Imported here: --help needs neither numpy nor matplotlib.
    from megatron_llama.config import ConfigError, format_problems
    from megatron_llama.tools.compare.cli import Asked, run_comparison

    asked = Asked(
        runs=[arguments.reference, *arguments.others],
        seeds=arguments.seeds,
        tolerance=arguments.tolerance,
        window=arguments.window,
        tags=arguments.tag,
        samples_per_step=arguments.samples_per_step,
        min_overlap=arguments.min_overlap,
    )
    try:
        comparison = run_comparison(asked)
    except ConfigError as error:
        sys.stderr.write(format_problems(error, "This comparison") + "\n")
        return 2
    from megatron_llama.tools.compare.comparison_plot import draw
    from megatron_llama.tools.compare.comparison_report import as_html, as_text

    sys.stdout.write(as_text(comparison))
    picture, page = Path(f"{arguments.out}.png"), Path(f"{arguments.out}.html")
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(draw(comparison))
        page.write_text(as_html(comparison), encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"The report can't be written: {error}\n")
        return 2
    sys.stdout.write(f"\n{picture}\n{page}\n")
    return 0 if comparison.agree else 1


def parsed() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=STATUS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reference", metavar="RUN_A", help="the run that the others are compared with")
    parser.add_argument("others", metavar="RUN_B", nargs="+", help="runs compared with it")
    parser.add_argument(
        "--tolerance", type=float, default=0.01, help="largest relative gap of the smoothed curves (default 0.01)"
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        default=[],
        metavar="RUN",
        help="further runs of RUN_A with other seeds: their mean becomes the reference, their spread is allowed",
    )
    parser.add_argument(
        "--window", type=float, help="samples to smooth over (default: 5%% of what is compared, 8 steps at least)"
    )
    parser.add_argument(
        "--min-overlap",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="share of RUN_A's samples that all runs must have; below it they don't agree (default 0.9)",
    )
    parser.add_argument(
        "--tag",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="what a series is called, where the built-in names don't fit: loss=NAME, samples=NAME, step_time=NAME",
    )
    parser.add_argument(
        "--samples-per-step",
        action="append",
        default=[],
        metavar="[RUN=]N",
        help="global batch size of runs that log steps only",
    )
    parser.add_argument(
        "--out", default="comparison", metavar="PREFIX", help="writes PREFIX.png and PREFIX.html (default: comparison)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
