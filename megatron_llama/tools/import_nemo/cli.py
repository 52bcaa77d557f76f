"""Convert a NeMo, neuronx-nemo-megatron or NxDT YAML: python scripts/import_config.py their.yaml [-o ours.yaml]

Lists each of its keys as taken, renamed, without meaning here, or not supported; writes a YAML for experiment=...; and
prints the equivalent train.py command line. Takes what their training script takes, so it can stand in its place in a
shell script of theirs. docs/import_config.md explains.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_USER

STATUS = (
    "Exit status: 0 all that matters was taken over; 1 written, but something is not supported or still to be given "
    "(it is listed); 2 a mistake, nothing written."
)


def main(argv: Sequence[str]) -> int:
    """Runs ``scripts/import_config.py`` with ``argv``; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=STATUS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("theirs", nargs="?", help="the YAML to convert")
    about = "what their command line changes in it: model.num_layers=32, +KEY=VALUE, ~KEY (also model.vocab_size=N)"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=about)
    about = "the file to write (default: conf/experiment/<name of theirs>.yaml)"
    parser.add_argument("-o", "--output", type=Path, help=about)
    about = "the YAML as Hydra's command lines name it, instead of THEIRS: a name in --config-path"
    parser.add_argument("-cn", "--config-name", metavar="NAME", help=about)
    about = "a folder, from here (default: this one)"
    parser.add_argument("-cp", "--config-path", type=Path, default=Path(), metavar="FOLDER", help=about)
    arguments = parser.parse_intermixed_args(argv)
    positional = [arguments.theirs, *arguments.overrides] if arguments.theirs is not None else []
    if arguments.config_name is not None:
        theirs = arguments.config_path / f"{arguments.config_name.removesuffix('.yaml')}.yaml"
    elif positional:
        theirs = Path(positional.pop(0))
    else:
        parser.error("name the YAML to convert")
    # Imported here: --help needs none of it.
    from megatron_llama.cli import CONF_DIR
    from megatron_llama.config import ConfigError, format_problems
    from megatron_llama.tools.import_nemo.convert import convert
    from megatron_llama.tools.import_nemo.write_yaml import as_yaml, check, command_line, listing, write

    out = arguments.output or CONF_DIR / "experiment" / f"{theirs.stem}.yaml"
    try:
        converted = convert(theirs, positional)
        write(out, as_yaml(converted, theirs.name))
    except ConfigError as error:
        sys.stderr.write(format_problems(error, str(theirs)) + "\n")
        return EXIT_USER
    sys.stdout.write(listing(converted, str(theirs)))
    name = out.stem if out.resolve().parent == CONF_DIR / "experiment" else out
    sys.stdout.write(f"\nwritten: {out}\n  python train.py experiment={name}\n")
    sys.stdout.write(f"the same without the file:\n  {command_line(converted, CONF_DIR)}\n")
    if problems := check(out, CONF_DIR, converted.world_size):
        sys.stdout.write("\n" + format_problems(problems, "The written config") + "\n")
    return EXIT_FAILED if problems or converted.unsupported else 0
