"""Turn a NeMo, neuronx-nemo-megatron or NxDT YAML into ours: python scripts/import_config.py their.yaml [-o ours.yaml]

Lists each of its keys as taken, renamed, without meaning here, or not supported; writes a YAML for experiment=...; and
prints the train.py line that says the same. docs/import_config.md explains.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STATUS = (
    "Exit status: 0 all that matters was taken over; 1 written, but something is not supported or still to be given "
    "(it is listed); 2 a mistake, nothing written."
)


def main() -> int:
    """Exit status: 0 all taken over, 1 written but not all of it works here, 2 a mistake."""
    arguments = parsed()
    # Imported here: --help needs none of it.
    from megatron_llama.config import ConfigError, format_problems
    from megatron_llama.tools.import_nemo import as_yaml, check, command_line, convert, listing

    conf_dir = ROOT / "conf"
    out = arguments.output or conf_dir / "experiment" / f"{arguments.theirs.stem}.yaml"
    try:
        converted = convert(arguments.theirs, arguments.overrides)
        write(out, as_yaml(converted, arguments.theirs.name))
    except ConfigError as error:
        sys.stderr.write(format_problems(error, str(arguments.theirs)) + "\n")
        return 2
    sys.stdout.write(listing(converted, str(arguments.theirs)))
    name = out.stem if out.resolve().parent == conf_dir / "experiment" else out
    sys.stdout.write(f"\nwritten: {out}\n  python train.py experiment={name}\n")
    sys.stdout.write(f"the same without the file:\n  {command_line(converted, conf_dir)}\n")
    problems = check(out, conf_dir, converted.world_size)
    if problems:
        sys.stdout.write("\n" + format_problems(problems, "As it stands, train.py says that it") + "\n")
    return 1 if problems or converted.unsupported else 0


def write(out: Path, text: str) -> None:
    """Writes the file; raises ConfigError where another one, not made by this script, is in its place."""
    from megatron_llama.config import ConfigError, Problem
    from megatron_llama.tools.import_nemo.write_yaml import MARK

    try:
        if out.exists() and MARK not in out.read_text(encoding="utf-8", errors="replace"):
            rule = "is there already, and was not made by this script"
            raise ConfigError([Problem("-o", str(out), rule, "name another file")])
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        rule = f"can't be written: {error.strerror}"
        raise ConfigError([Problem("-o", str(out), rule, "name another file")]) from None


def parsed() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=STATUS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("theirs", type=Path, help="their YAML")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="what their command line changes in it: model.num_layers=32 (also model.vocab_size=N)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="the file to write (default: conf/experiment/<name of theirs>.yaml)"
    )
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    sys.exit(main())
