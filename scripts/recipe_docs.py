"""Writes the tables in docs/experiments.md: every experiment in a line, and the planner's forecast of the recipes that
pretrain, on clusters of three kinds.

python scripts/recipe_docs.py            writes them
python scripts/recipe_docs.py --check    writes nothing; status 1 where they are stale
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_llama.cli import CONF_DIR, what_it_is  # noqa: E402 (the tree need not be installed)
from megatron_llama.plan.memory import USABLE  # noqa: E402
from megatron_llama.system.units import GIB  # noqa: E402
from megatron_llama.tools.mock_run import NO_FILES  # noqa: E402
from megatron_llama.tools.plan.forecast_run import Forecast, forecast_run  # noqa: E402
from megatron_llama.topology import AXIS_NAMES  # noqa: E402
from scripts.results import markdown_table  # noqa: E402

DOCS = ROOT / "docs" / "experiments.md"
BEGIN, END = "<!-- written by scripts/recipe_docs.py -->\n", "<!-- end -->\n"
CLUSTERS = ("a100", "h100", "b200")
# Device hours: Llama 2's paper (arXiv:2307.09288, table 2) on A100 80GB, Llama 3.1's model card on H100 80GB, later
# stages of training included.
PUBLISHED = {
    "pretrain_llama7b": ("a100", 184_320),
    "pretrain_llama13b": ("a100", 368_640),
    "pretrain_llama70b": ("a100", 1_720_320),
    "pretrain_llama3_8b": ("h100", 1_460_000),
    "pretrain_llama3_70b": ("h100", 7_000_000),
    "pretrain_llama3_405b": ("h100", 30_840_000),
}


def head(name: str) -> str:
    """What the experiment's file says of itself."""
    return what_it_is(CONF_DIR / "experiment" / f"{name}.yaml")


def tables() -> Iterator[str]:
    """The generated lines."""
    names = sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))
    yield from markdown_table(("experiment", "what it is"), ((f"`{name}`", head(name)) for name in names))
    yield ""
    yield "What a pretraining needs and how long it takes, by `scripts/plan.py`, with failures and checkpoints; device"
    yield "hours that were published stand beside the forecast of the same device."
    yield ""
    columns = ("recipe", "on", "layout", "GiB of a device", "tokens/s", "MFU", "days", "device hours", "published")
    forecasts = ((name, device, forecast(name, device)) for name in PUBLISHED for device in CLUSTERS)
    yield from markdown_table(columns, (row(*each) for each in forecasts))


def forecast(name: str, device: str) -> Forecast:
    """The planner's, on as many devices as the recipe has ranks."""
    return forecast_run([f"experiment={name}", *NO_FILES, "dry_run=true", f"cluster.device={device}"])


def row(name: str, device: str, found: Forecast) -> tuple[str, ...]:
    """A line of the table; rounded, so that a better planner's last digits don't change it."""
    needs, has = max(stage.total for stage in found.stages) / GIB, found.device.memory_bytes / GIB
    fits = "" if needs <= USABLE * has else ", **does not fit**"
    trainer = found.plan.config.trainer
    remarks = {"pp": f" x {trainer.vpp}" if trainer.vpp > 1 else ""}
    grid = " ".join(f"{axis} {found.plan.grid.sizes[axis]}{remarks.get(axis, '')}" for axis in AXIS_NAMES)
    hours = found.days * 24 * found.devices
    on, published = PUBLISHED[name]
    return (
        f"`{name}`",
        f"{found.cluster.nodes} x {found.device.per_node} {device}",
        f"{grid} zero {trainer.zero}",
        f"{needs:.0f} of {has:.0f}{fits}",
        _rounded(found.tokens_per_second),
        f"{100 * found.utilisation(found.flops.causal):.0f} %",
        f"{found.days:.2g}" if found.days < 10 else f"{found.days:.0f}",
        _rounded(hours),
        _rounded(published, 3) if device == on else "",
    )


def _rounded(number: float, digits: int = 2) -> str:
    return f"{int(float(f'{number:.{digits}g}')):,}"


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where the page is stale")
    check = parser.parse_args(arguments).check
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    written, _, after = rest.partition(END)
    fresh = "\n".join(tables()) + "\n"
    if check and written != fresh:
        sys.stderr.write("docs/experiments.md is stale; run: python scripts/recipe_docs.py\n")
        return 1
    if not check:
        DOCS.write_text(before + BEGIN + fresh + END + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
