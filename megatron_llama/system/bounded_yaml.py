"""Bounds on YAML files that may come from strangers, checked before anything is built from them.

Aliases share nodes, so a file of a few hundred bytes can stand for billions of values ("billion laughs"). YAML's own
reader makes shared objects of them, but OmegaConf copies each one.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from megatron_llama.system.files import read_whole

MOST_BYTES = 256 << 10
MOST_VALUES = 50_000
"""Scalars, lists and mappings, aliases written out."""
MOST_DEPTH = 32
"""Lists and mappings inside one another: whoever reads them takes a part of the stack for each."""
_MAPPING = "tag:yaml.org,2002:map"
_WORDS = {"seq": "sequence", "str": "text", "int": "number", "float": "number"}


def check_yaml(path: Path) -> None:
    """Checks that a file is a mapping, or empty, within the bounds.

    Raises:
        ValueError: it is too large, too deep, stands for too many values, or is no mapping: OmegaConf reads a text at
            the top as YAML once more, and fails without a message on what it finds there.
        OSError, yaml.YAMLError: it can't be read.
    """
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{path} has {size:,} bytes; a YAML file may have {MOST_BYTES:,}")
    try:
        root = yaml.compose(read_whole(path).decode(), Loader=yaml.SafeLoader)  # libyaml crashes on deep nesting
        count = _values(root, {}, MOST_DEPTH) if root is not None else 0
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply, or holds itself") from None
    if count > MOST_VALUES:
        raise ValueError(
            f"{path} stands for {count:,} values once its aliases are written out; {MOST_VALUES:,} are allowed"
        )
    if root is not None and root.tag != _MAPPING:
        kind = root.tag.rpartition(":")[2]
        raise ValueError(f"{path} holds a {_WORDS.get(kind, kind)}, where names and their values are expected")


def _values(node: yaml.Node, known: dict[int, int], room: int) -> int:
    """Values below a node, itself included; each shared node is counted as often as it is used, but visited once."""
    if not room:
        raise RecursionError
    if id(node) not in known:
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            parts = node.value
        elif isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_values(part, known, room - 1) for part in parts)
    return known[id(node)]
