"""Byte counters of this host's network interfaces."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

COUNTERS = Path("/proc/self/net/dev")
"""Counters of this process's network namespace; /sys/class/net may show another namespace."""

_SENT = 8  # the column of the bytes sent
_SIOCGIFADDR = 0x8915


class Counter:
    """Counter of bytes sent, including headers and the traffic of all processes.

    Args:
        peers: names of the other hosts. With any, the interface to them is read, otherwise the loopback interface.
            Horovod's launcher may have named that interface, in HOROVOD_GLOO_IFACE.

    Attributes:
        names: names of the interfaces that are read; empty if they cannot be read.
    """

    def __init__(self, peers: Sequence[str]) -> None:
        chosen = (os.environ.get("HOROVOD_GLOO_IFACE") or interface_to(peers[0])) if peers else "lo"
        self.names = [chosen] if chosen in _counted() else []

    def bytes_sent(self) -> float | None:
        """Return the bytes sent since the host was started.

        Returns None if they cannot be read.
        """
        counted = _counted()
        return float(sum(counted[name] for name in self.names)) if self.names else None


def _counted() -> dict[str, int]:
    """Return the bytes that each interface has sent; none if unreadable."""
    try:
        lines = COUNTERS.read_text().splitlines()[2:]
    except OSError:
        return {}
    pairs = (line.split(":") for line in lines)
    return {name.strip(): int(numbers.split()[_SENT]) for name, numbers in pairs}


def interface_to(host: str) -> str | None:
    """Return the interface for packets to a host.

    Returns None if there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        try:
            unsent.connect((host, 9))
        except OSError:
            return None
        own = unsent.getsockname()[0]
    return next((name for _, name in socket.if_nameindex() if address_of(name) == own), None)


def address_of(interface: str) -> str | None:
    """Return an interface's IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(anything.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None
