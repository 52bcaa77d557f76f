"""Convert a NeMo, neuronx-nemo-megatron or NxDT YAML: python scripts/import_config.py their.yaml [-o ours.yaml]

Lists each of its keys as taken, renamed, without meaning here, or not supported; writes a YAML for experiment=...; and
prints the equivalent train.py command line. Takes what their training script takes, so it can stand in its place in a
shell script of theirs. docs/guides/data/import_config.md explains.
"""
from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from megatron_llama.config.fields import get, sections
from megatron_llama.config.hf_config import FROM_HF
from megatron_llama.config.load_config import EXPERIMENT, load_config
from megatron_llama.config.problems import ConfigError, Problem, format_value
from megatron_llama.config.settings import Config, ModelConfig
from megatron_llama.plan.resolve import resolve
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_USER
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import text_table
from megatron_llama.tools.import_nemo.read_yaml import KINDS, UNSUPPORTED, Converted, Found
from megatron_llama.topology import Grid

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
    # Imported late to keep --help fast.
    from megatron_llama.cli import CONF_DIR
    from megatron_llama.config import ConfigError, format_problems
    from megatron_llama.tools.import_nemo.convert import convert

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


# Writes a converted file: as our YAML, as a train.py command line, as a list of its keys.


MARK = "# Made by scripts/import_config.py"
# What Hydra's grammar takes for text without quotes.
PLAIN = re.compile(r"[A-Za-z_/.~][A-Za-z0-9_/.\-~]*")
# Labels, which change nothing.
LABELS = ("model.name", "data.name")


def as_yaml(converted: Converted, source: str) -> str:
    """A file for conf/experiment/, or for ``experiment=PATH``."""
    head = [
        "# @package _global_",  # must come first, or Hydra puts the sections below "experiment"
        f"{MARK} from {source}.",
        "# python train.py experiment=PATH, or its name alone if it is in conf/experiment/",
    ]
    for found in converted.unsupported:
        head += _comment(f"NOT SUPPORTED {found.key}={format_value(found.value)}: {found.why}")
    for assumed in converted.assumed:
        head += _comment(f"ASSUMED {assumed}")
    content: dict[str, Any] = {"defaults": [{"override /optim": converted.schedule}]}
    for name, value in converted.settings.items():
        *sections, key = name.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    return "\n".join([*head, text])


def write(out: Path, text: str) -> None:
    """Writes the file, whole or not at all. Raises ConfigError where another file, not made by this tool, is there."""
    rule = "is there already, and was not made by this script"
    try:
        if not out.exists() or MARK in out.read_text(encoding="utf-8", errors="replace"):
            write_atomically(out, text)
            return
    except OSError as error:
        rule = f"can't be written: {error.strerror}"
    raise ConfigError([Problem("-o", str(out), rule, "name another file")])


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent="# ", subsequent_indent="#   ", break_long_words=False)


def command_line(converted: Converted, conf_dir: Path) -> str:
    """The equivalent train.py command line: the nearest preset, and the settings that differ from it."""

    def distance(preset: Path) -> int:
        shape = {**asdict(ModelConfig()), **(yaml.safe_load(preset.read_text(encoding="utf-8")) or {})}
        return sum(converted.settings.get(f"model.{name}") != value for name, value in shape.items())

    presets = sorted(path for path in (conf_dir / "model").glob("*.yaml") if path.stem != FROM_HF)
    base = [f"model={min(presets, key=distance).stem}"]
    base += [f"optim={converted.schedule}"] if converted.schedule != "cosine" else []
    config = load_config(base, conf_dir)
    needed = [
        shlex.quote(f"{name}={_written(value)}")
        for name, value in converted.settings.items()
        if name not in LABELS and _differs(config, name, value)
    ]
    return " ".join(["python train.py", *base, *needed])


def _differs(config: Config, name: str, value: Any) -> bool:
    """Whether ``config`` needs an override to have ``value``. A derived value is not the same as a given one."""
    there = get(config, name)
    if name in sections():
        section = sections()[name].kind
        return bool(there != (None if value is None else section(**value)))
    return bool(there != value) or isinstance(there, bool) != isinstance(value, bool)


def _written(value: Any) -> str:
    """A value in Hydra's grammar."""
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) and value.lower() not in ("null", "true", "false") else json.dumps(value)
    if isinstance(value, list):
        return "[" + ",".join(_written(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(item)}" for key, item in value.items()) + "}"
    return repr(value) if isinstance(value, float) else format_value(value)


def check(path: Path, conf_dir: Path, world_size: int | None) -> list[Problem]:
    """The problems that train.py would find in the written file, on the source's devices, if its data existed."""
    try:
        config = load_config([f"{EXPERIMENT}={path}"], conf_dir)
        block = Grid.of(config.trainer).block
        resolve(config, world_size if world_size and world_size % block == 0 else block, exists=lambda _: True)
    except ConfigError as error:
        return list(error.problems)
    return []


def listing(converted: Converted, source: str) -> str:
    """Every key of the source, grouped by what became of it."""
    lines = [f"{source}: {len(converted.found)} keys"]
    for kind in KINDS:
        found = [one for one in converted.found if one.kind == kind]
        if found:
            lines += ["", f"{kind} ({len(found)})", *(f"  {row}" for row in text_table([_row(one) for one in found]))]
    if converted.assumed:
        lines += ["", "left open by the file, and assumed"]
        for assumed in converted.assumed:
            lines += textwrap.wrap(assumed, 110, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
    return "\n".join(lines) + "\n"


def _row(one: Found) -> tuple[str, str]:
    value = format_value(one.value)
    theirs = f"{one.key}={value if len(value) <= 40 else value[:37] + '...'}"
    if not one.ours or one.kind == UNSUPPORTED:
        return theirs, f"→ {one.ours} {one.why}" if one.ours else one.why
    return theirs, f"→ {one.ours} ({one.why})" if one.why else f"→ {one.ours}"
