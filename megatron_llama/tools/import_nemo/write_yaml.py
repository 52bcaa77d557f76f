"""What a converted file is written as: our YAML, a train.py line, the list of keys."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from megatron_llama.config.fields import get, sections
from megatron_llama.config.hf_config import FROM_HF
from megatron_llama.config.load_config import EXPERIMENT, load_config
from megatron_llama.config.problems import ConfigError, Problem, shown
from megatron_llama.config.settings import Config, ModelConfig
from megatron_llama.plan.resolve import resolve
from megatron_llama.system.files import write_atomically
from megatron_llama.tools.import_nemo.convert import KINDS, UNSUPPORTED, Converted, Found

MARK = "# Made by scripts/import_config.py"
# What Hydra's grammar takes for text without quotes.
PLAIN = re.compile(r"[A-Za-z_/.~][A-Za-z0-9_/.\-~]*")
# Labels; two configs are the same without them.
LABELS = ("model.name", "data.name")


def as_yaml(converted: Converted, source: str) -> str:
    """A file for conf/experiment/, or for ``experiment=PATH``."""
    head = [
        "# @package _global_",  # first, or Hydra takes the sections for those of the group
        f"{MARK} from {source}.",
        "# python train.py experiment=PATH, or its name alone where it stands in conf/experiment/",
    ]
    for found in converted.unsupported:
        head += _comment(f"NOT SUPPORTED {found.key}={shown(found.value)}: {found.why}")
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
    try:
        if out.exists() and MARK not in out.read_text(encoding="utf-8", errors="replace"):
            rule = "is there already, and was not made by this script"
            raise ConfigError([Problem("-o", str(out), rule, "name another file")])
        write_atomically(out, text)
    except OSError as error:
        rule = f"can't be written: {error.strerror}"
        raise ConfigError([Problem("-o", str(out), rule, "name another file")]) from None


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent="# ", subsequent_indent="#   ", break_long_words=False)


def command_line(converted: Converted, conf_dir: Path) -> str:
    """The same as one train.py line without the file: the nearest preset, and what differs from it."""
    base = [f"model={_nearest(converted, conf_dir)}"]
    base += [f"optim={converted.schedule}"] if converted.schedule != "cosine" else []
    config = load_config(base, conf_dir)
    needed = [
        shlex.quote(f"{name}={_written(value)}")
        for name, value in converted.settings.items()
        if name not in LABELS and _differs(config, name, value)
    ]
    return " ".join(["python train.py", *base, *needed])


def _nearest(converted: Converted, conf_dir: Path) -> str:
    """The preset in conf/model/ from which the fewest settings differ."""

    def distance(path: Path) -> int:
        shape = {**asdict(ModelConfig()), **(yaml.safe_load(path.read_text(encoding="utf-8")) or {})}
        return sum(converted.settings.get(f"model.{name}") != value for name, value in shape.items())

    presets = sorted(path for path in (conf_dir / "model").glob("*.yaml") if path.stem != FROM_HF)
    return min(presets, key=distance).stem


def _differs(config: Config, name: str, value: Any) -> bool:
    """Whether a setting of ``config`` has to be changed to be ``value``. A value that is derived is not the same as
    one that is given."""
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
    return repr(value) if isinstance(value, float) else shown(value)


def check(path: Path, conf_dir: Path, world_size: int | None) -> list[Problem]:
    """What train.py would say to the written file, on the devices that their file names, where its data is."""
    try:
        config = load_config([f"{EXPERIMENT}={path}"], conf_dir)
        block = config.trainer.tp * config.trainer.pp
        resolve(config, world_size if world_size and world_size % block == 0 else block, exists=lambda _: True)
    except ConfigError as error:
        return list(error.problems)
    return []


def listing(converted: Converted, source: str) -> str:
    """Every key of theirs, by what became of it."""
    lines = [f"{source}: {len(converted.found)} keys"]
    for kind in KINDS:
        found = [one for one in converted.found if one.kind == kind]
        if found:
            lines += ["", f"{kind} ({len(found)})", *_table(found, kind)]
    if converted.assumed:
        lines += ["", "left open by the file, and assumed"]
        for assumed in converted.assumed:
            lines += textwrap.wrap(assumed, 110, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
    return "\n".join(lines) + "\n"


def _table(found: Sequence[Found], kind: str) -> Iterator[str]:
    theirs = [f"{one.key}={_short(one.value)}" for one in found]
    width = min(max(map(len, theirs)), 64)
    for text, one in zip(theirs, found, strict=True):
        why = one.why if kind == UNSUPPORTED or not one.ours else (f"({one.why})" if one.why else "")
        yield f"  {text.ljust(width)}  {' '.join(filter(None, (f'→ {one.ours}' if one.ours else '', why)))}".rstrip()


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= 40 else text[:37] + "..."
