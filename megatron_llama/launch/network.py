"""Which address and interface this machine uses towards another one. Asks the system, sends nothing."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_DISCARD_PORT = 9


def is_loopback(host: str) -> bool:
    """Whether ``host`` means "this machine" on every machine: localhost, 127.x.y.z or ::1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.partition(".")[0] in ("localhost", "ip6-localhost")


def addresses_of(host: str) -> list[str]:
    """The addresses that this machine takes ``host`` for; raises OSError where it knows none."""
    return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))


def own_address_towards(host: str) -> str:
    """This machine's address on the way to ``host``, as its routes say; raises OSError where there is no way."""
    family, kind, _, _, target = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # for a datagram socket this picks a route, and no packet leaves
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has ``address``; None where the system does not say."""
    if sys.platform != "linux":
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        with suppress(OSError):
            lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
            return next((line.split()[-1] for line in lines if line.startswith(wanted.packed.hex())), None)
        return None
    named = (name for _, name in socket.if_nameindex())
    return next((name for name in named if address_of_interface(name) == str(wanted)), None)


def address_of_interface(name: str) -> str | None:
    """The first IPv4 address of an interface; None where it has none, or the system does not say."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
