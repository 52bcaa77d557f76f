"""Hosts that launch.hosts or a hostfile lists."""

from __future__ import annotations

import re
from collections import Counter
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
    """Name for ssh, including the user if there is one."""
    slots: int | None = None
    """Ranks to start on the host; None: one per device."""

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


def check_hosts(entries: Iterable[Any]) -> str | None:
    """Return the first error in the entries of launch.hosts; None if there is none."""
    wrong = [str(entry) for entry in entries if not _HOST.fullmatch(str(entry))]
    return f"{wrong[0]!r} is not a host name" if wrong else _check_all(parse_hosts(entries))


def parse_hosts(entries: Iterable[Any]) -> list[Host]:
    """Return the hosts of launch.hosts. Malformed entries, which ``check_hosts`` reports, are omitted."""
    return [_host(match) for match in [_HOST.fullmatch(str(entry)) for entry in entries] if match is not None]


def parse_hostfile(text: str) -> list[Host]:
    """Return the hosts of a hostfile in DeepSpeed's and mpirun's format: a line ``name slots=N`` per host.

    ``#`` begins a comment. Raises ValueError with the malformed line.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if line:
            match = _LINE.fullmatch(line)
            if match is None:
                raise ValueError(f"line {number}, {line!r}, is not 'name slots=N'")
            hosts.append(_host(match))
    wrong = _check_all(hosts) if hosts else "it lists no host"
    if wrong:
        raise ValueError(wrong)
    return hosts


def _host(match: re.Match[str]) -> Host:
    return Host(match["name"], int(match["slots"]) if match["slots"] else None)


def _check_all(hosts: list[Host]) -> str | None:
    """Return the error of a list of hosts whose entries are valid."""
    twice = sorted(name for name, count in Counter(host.address for host in hosts).items() if count > 1)
    if twice:
        return f"{twice[0]} is listed twice; one process starts all ranks of a host"
    if len({host.slots is None for host in hosts}) > 1:
        return "either all hosts or no host must have a number of ranks"
    return None
