"""The machines that launch.hosts or a hostfile names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# No leading dash: ssh would read such a name as an option.
_NAME = r"(?:\w[\w.-]*@)?[A-Za-z0-9][\w.-]*"
_HOST = re.compile(rf"(?P<name>{_NAME})(?::(?P<slots>[1-9]\d*))?")
_LINE = re.compile(rf"(?P<name>{_NAME})(?:\s+slots\s*=\s*(?P<slots>[1-9]\d*))?(?:\s+max_slots\s*=\s*\d+)?")

HOST_FORMS = "name, user@name or name:ranks"


@dataclass(frozen=True)
class Host:
    """One machine."""

    name: str
    """As given to ssh, with the user if there is one."""
    slots: int | None = None
    """Ranks to start there; None: one for each of its devices."""

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


def check_hosts(entries: Iterable[Any]) -> str | None:
    """What is wrong with the entries of launch.hosts, in one sentence; None where nothing is."""
    wrong = [str(entry) for entry in entries if not _HOST.fullmatch(str(entry))]
    return f"{wrong[0]!r} is not a host name" if wrong else _bad_together(parse_hosts(entries))


def parse_hosts(entries: Iterable[Any]) -> list[Host]:
    """The hosts of launch.hosts; malformed entries, which ``check_hosts`` reports, are left out."""
    found = [_HOST.fullmatch(str(entry)) for entry in entries]
    return [_host(match) for match in found if match is not None]


def parse_hostfile(text: str) -> list[Host]:
    """The hosts of a file with a line ``name slots=N`` for each, as DeepSpeed and mpirun read it; ``#`` begins a
    comment.

    Raises ValueError with the line that is wrong.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if line:
            found = _LINE.fullmatch(line)
            if found is None:
                raise ValueError(f"line {number}, {line!r}, is not 'name slots=N'")
            hosts.append(_host(found))
    wrong = _bad_together(hosts) if hosts else "it names no host"
    if wrong:
        raise ValueError(wrong)
    return hosts


def _host(found: re.Match[str]) -> Host:
    return Host(found["name"], int(found["slots"]) if found["slots"] else None)


def _bad_together(hosts: list[Host]) -> str | None:
    names = [host.address for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        return f"{twice[0]} is listed twice; one process starts all ranks of a host"
    if len({host.slots is None for host in hosts}) > 1:
        return "some hosts have a number of ranks and some don't"
    return None
