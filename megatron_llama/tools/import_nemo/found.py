"""What becomes of the keys of a NeMo, neuronx-nemo-megatron or NxDT file: the record of a conversion."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from megatron_llama.tools.import_nemo import nemo_keys as keys

TAKEN, RENAMED, MEANINGLESS = "taken", "renamed", "without meaning here"
SAME = "not supported: the training is the same"
UNSUPPORTED = "not supported: the training will differ"
KINDS = (TAKEN, RENAMED, MEANINGLESS, SAME, UNSUPPORTED)


@dataclass(frozen=True)
class Found:
    """One key of the source and what becomes of it."""

    key: str
    value: Any
    kind: str
    ours: str = ""
    """The setting it was converted to, as on a command line."""
    why: str = ""


@dataclass
class Converted:
    """What a file means here."""

    name: str
    """The file's own name for the run."""
    settings: dict[str, Any] = field(default_factory=dict)
    """{setting: value} in our names."""
    schedule: str = "cosine"
    """Which file of conf/optim/ has the schedule."""
    found: list[Found] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    """What the file leaves open, and the value that was assumed."""
    world_size: int | None = None
    """Devices that the file names, or None."""

    @property
    def unsupported(self) -> list[Found]:
        """The keys whose neglect changes the result."""
        return [one for one in self.found if one.kind == UNSUPPORTED]


def unread(key: str, value: Any) -> Found:
    """A key that no subject has read: supported with some values only, without meaning here, or unknown."""
    if key in keys.ONLY:
        allowed, why = keys.ONLY[key]
        if value is None or value in allowed:
            return Found(key, value, MEANINGLESS, why="off" if value in (None, False) else "as it always is here")
        return Found(key, value, UNSUPPORTED, why=why)
    section = next((one for one in keys.ONLY if key.startswith(f"{one}.")), None)
    if section is not None:
        return Found(key, value, UNSUPPORTED if value else MEANINGLESS, why=keys.ONLY[section][1])
    for patterns, why in keys.WITHOUT_MEANING:
        if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
            return Found(key, value, MEANINGLESS, why=why)
    if value in (None, False, [], {}):
        return Found(key, value, MEANINGLESS, why="off")
    return Found(key, value, UNSUPPORTED, why="an unknown key, so what it changes is unknown too")
