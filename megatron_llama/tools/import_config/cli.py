"""Convert another program's config to a config for experiment=NAME: a NeMo, neuronx-nemo-megatron or NxDT YAML, a
Megatron-LM bash script or its flags, or a torchtitan TOML. Lists each key as taken, renamed,
without meaning here or not supported, and prints the equivalent train.py command. Accepts the arguments of the original
training script, so it can replace that script in a shell script. See docs/guides/data/import_config.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from megatron_llama.config.conf_folders import EXPERIMENT
from megatron_llama.config.hf_config import FROM_HF
from megatron_llama.config.load_config import load_config
from megatron_llama.config.problems import ConfigError, Problem, format_problems, format_value, write_override
from megatron_llama.config.settings import Config, ModelConfig
from megatron_llama.config.settings_table import get, sections
from megatron_llama.plan.resolve import resolve
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_USER
from megatron_llama.system.files import write_atomically
from megatron_llama.system.programs import CONF_DIR, name_commands, option_name
from megatron_llama.system.rerun_command import ArgumentParser
from megatron_llama.system.wrapping import WIDTH, escape_controls, wrap, wrap_command, wrap_lines
from megatron_llama.tools.common import check_recipe, nest
from megatron_llama.tools.import_config.conversion import MOST_UNKNOWN, UNKNOWN, Conversion, KeyConversion, Kind
from megatron_llama.tools.import_config.megatron import convert_script
from megatron_llama.tools.import_config.nemo import convert
from megatron_llama.tools.import_config.torchtitan import convert_toml
from megatron_llama.topology import Grid

STATUS = (
    "Exit status: 0 all relevant keys were converted (a missing dataset is a note), 1 written, but some keys are not "
    "supported or training rejects the file (they are listed), 2 an error, nothing written."
)


OPTIONS = ("--help", "--output", "--config-name", "--config-path")


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/import_config.py`` with ``argv``; return the exit status."""
    parser = ArgumentParser(description=name_commands(__doc__ or ""), epilog=STATUS)
    about = "config to convert: .yaml, .toml, a script (.sh), or a text file of flags"
    parser.add_argument("source", nargs="?", metavar="FILE", help=about)
    about = "overrides of the original command line: model.num_layers=32, +KEY=VALUE, ~KEY (also model.vocab_size=N)"
    about += "; for a script NAME=VALUE of its environment, 1=VALUE for its first argument, and flags"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=about)
    about = "file to write (default: NAME_imported.yaml next to FILE, with its name)"
    parser.add_argument("-o", "--output", type=Path, help=about)
    about = "as in Hydra: name of the config in --config-path, instead of FILE"
    parser.add_argument("-cn", "--config-name", metavar="NAME", help=about)
    about = "folder of --config-name (default: current folder)"
    parser.add_argument("-cp", "--config-path", type=Path, default=Path(), metavar="FOLDER", help=about)
    argv = list(argv)
    start = next((at for at, word in enumerate(argv) if _is_flag(word)), len(argv))
    arguments, flags = parser.parse_intermixed_args(argv[:start]), argv[start:]
    positional = [arguments.source, *arguments.overrides] if arguments.source is not None else []
    if arguments.config_name is not None:
        source = arguments.config_path / f"{arguments.config_name.removesuffix('.yaml')}.yaml"
    elif positional or flags:
        source = Path(positional.pop(0) if positional else "pretrain_gpt.py")
    else:
        parser.error("give the file to convert")
    if flags and source.suffix in (".yaml", ".yml"):
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    out = arguments.output or source.with_name(f"{source.stem}{IMPORTED}.yaml")
    try:
        converted = convert_source(source, positional, flags)
        check_recipe("-o", out, MARK)
        write_atomically(out, as_yaml(converted, source.name))
    except ConfigError as error:
        sys.stderr.write(format_problems(error, str(source)) + "\n")
        return EXIT_USER
    problems = check(out, converted.world_size)
    needs_data = bool(problems) and all(problem.field == "data.prefixes" for problem in problems)
    text = format_listing(converted, str(source)) + format_next(converted, out, needs_data)
    sys.stdout.write(escape_controls(text))
    if problems and not needs_data:
        sys.stdout.write("\n" + format_problems(problems, "The written config") + "\n")
        return EXIT_FAILED
    return EXIT_FAILED if converted.unsupported else 0


def _is_flag(word: str) -> bool:
    return word.startswith("--") and not any(name.startswith(word.partition("=")[0]) for name in OPTIONS)


def convert_source(source: Path, overrides: Sequence[str], flags: Sequence[str]) -> Conversion:
    """Convert a file by its suffix. Raises ConfigError with all reasons why it cannot be converted."""
    if source.suffix in (".yaml", ".yml"):
        return convert(source, overrides)
    if wrong := [text for text in overrides if "=" not in text]:
        raise ConfigError([Problem("override", wrong[0], "is not an override", "write it as in NAME=VALUE")])
    given = {name.lstrip("+"): value for name, _, value in (text.partition("=") for text in overrides)}
    if source.suffix == ".toml":
        return convert_toml(source, given | {n: v for n, _, v in (flag.partition("=") for flag in flags)})
    return convert_script(source, flags, given)


# Output: config file, train.py command line, list of the keys.
IMPORTED = "_imported"  # suffix of the default output, because the source's own name is taken
MARK = "# Made by scripts/import_config.py"
# Labels without effect on training.
LABELS = ("model.name", "data.name")
KEY_WIDTH = 38


def as_yaml(converted: Conversion, source: str) -> str:
    """Format a config for conf/experiment/ or ``experiment=PATH``."""
    head = [
        "# @package _global_",  # must come first, or Hydra puts the sections below "experiment"
        f"{MARK} from {source}.",
        "# python train.py experiment=PATH, or experiment=NAME for a file in conf/experiment/",
    ]
    items, more = _shortened(converted.unsupported)
    texts = [*(f"{item.key}={format_value(item.value)}: {item.why}" for item in items), *more]
    for text in (*(f"NOT SUPPORTED {text}" for text in texts), *(f"ASSUMED {text}" for text in converted.assumed)):
        head += wrap_lines(escape_controls(text), "# ", "#   ", width=118)
    content = {"defaults": [{"override /optim": converted.schedule}], **nest(converted.settings)}
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    return "\n".join([*head, text])


def command_line(converted: Conversion) -> list[str]:
    """Return the words of the equivalent train.py command: the nearest model preset and the differences from it."""

    def distance(preset: Path) -> int:
        shape = {**asdict(ModelConfig()), **(yaml.safe_load(preset.read_text(encoding="utf-8")) or {})}
        return sum(converted.settings.get(f"model.{name}") != value for name, value in shape.items())

    presets = sorted(path for path in (CONF_DIR / "model").rglob("*.yaml") if path.stem != FROM_HF)
    base = [f"model={option_name(min(presets, key=distance), CONF_DIR / 'model')}"]
    base += [f"optim={converted.schedule}"] if converted.schedule != "cosine" else []
    config = load_config(base, CONF_DIR)
    needed = [
        write_override(name, value)
        for name, value in converted.settings.items()
        if name not in LABELS and _differs(config, name, value)
    ]
    return [*name_commands("python train.py").split(), *base, *needed]


def format_next(converted: Conversion, out: Path, needs_data: bool) -> str:
    """Return the lines with the written file and the commands that train with it, completed if it names no dataset."""
    name = out.stem if out.resolve().parent == CONF_DIR / EXPERIMENT else str(out)
    short = [*name_commands("python train.py").split(), write_override(EXPERIMENT, name)]
    equivalent = command_line(converted)
    lines = ["", f"written: {out}"]
    if needs_data:
        lines.append("note: no dataset is given; replace data=mock by data.prefixes=[PATH]")
        short.append("data=mock")
        equivalent = [word for word in equivalent if not word.startswith("data.prefixes=")] + ["data=mock"]
    lines += [wrap_command(short), "equivalent command without the file:", wrap_command(equivalent)]
    return "\n".join(lines) + "\n"


def _differs(config: Config, name: str, value: Any) -> bool:
    """Return whether ``config`` needs an override to have ``value``. A derived value differs from a given one."""
    above, _, key = name.rpartition(".")
    there = config.optim.schedule.get(key) if above == "optim.schedule" else get(config, name)
    if name in sections():
        return bool(there != (None if value is None else sections()[name].kind(**value)))
    return bool(there != value) or isinstance(there, bool) != isinstance(value, bool)


def check(path: Path, world_size: int | None) -> list[Problem]:
    """Return the problems of the written config on the devices of the source, without checking its data."""
    try:
        config = load_config([write_override(EXPERIMENT, str(path))], CONF_DIR)
        block = Grid.of(config.trainer).ranks_per_replica
        resolve(config, world_size if world_size and world_size % block == 0 else block, exists=lambda _: True)
    except ConfigError as error:
        return list(error.problems)
    return []


def format_listing(converted: Conversion, source: str) -> str:
    """List the keys of the source by kind of conversion."""
    lines = [f"{source}: {len(converted.conversions)} keys"]
    for kind in Kind:
        items = [item for item in converted.conversions if item.kind == kind]
        shown, more = _shortened(items)
        lines += ["", f"{kind} ({len(items)})", *_table(shown), *(f"  {text}" for text in more)] if items else []
    if converted.assumed:
        lines += ["", "assumed, because the file does not define it"]
        lines += [wrap(assumed, "  ") for assumed in converted.assumed]
    return "\n".join(lines) + "\n"


def _shortened(items: Sequence[KeyConversion]) -> tuple[list[KeyConversion], list[str]]:
    """Return the items without unknown keys after the first ones, and a text with their count."""
    unknown = [item.key for item in items if item.why == UNKNOWN]
    omitted = set(unknown[MOST_UNKNOWN:])
    more = [f"{len(omitted):,} more unknown keys"] if omitted else []
    return [item for item in items if item.key not in omitted], more


def _table(items: Sequence[KeyConversion]) -> Iterator[str]:
    """Yield one line per key; rows over 79 columns continue on a second line."""
    for key, result in map(_row, items):
        row = f"  {key:<{KEY_WIDTH}}  {result}"
        yield from [row] if len(key) <= KEY_WIDTH and len(row) <= WIDTH else [wrap(key, "  "), wrap(result, "      ")]


def _row(item: KeyConversion) -> tuple[str, str]:
    value = format_value(item.value)
    source = f"{item.key}={value if len(value) <= 40 else value[:37] + '...'}"
    if not item.setting or item.kind == Kind.UNSUPPORTED:
        return source, f"→ {item.setting} {item.why}" if item.setting else item.why
    return source, f"→ {item.setting} ({item.why})" if item.why else f"→ {item.setting}"
