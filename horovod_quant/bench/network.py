"""Bytes that the kernel has counted at this host's network interfaces."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

COUNTERS = Path("/proc/self/net/dev")
"""Of this process's network namespace; what /sys/class/net shows may be another's."""

_SENT = 8  # the column of a line's numbers
_SIOCGIFADDR = 0x8915


class Counter:
    """Bytes sent, headers and all other traffic included.

    Args:
        peers: names of the other hosts. With any, the interface to them is read, otherwise the loopback interface.
        environment: Horovod's launcher says there which interface Gloo uses.
        counters: where Linux shows them.

    Attributes:
        names: of the interfaces that are read; none where they cannot be.
    """

    def __init__(
        self,
        peers: Sequence[str],
        environment: Mapping[str, str] = os.environ,
        counters: Path = COUNTERS,
    ) -> None:
        self._file = counters
        there = self._read()
        chosen = (environment.get("HOROVOD_GLOO_IFACE") or interface_to(peers[0])) if peers else "lo"
        self.names = [chosen] if chosen in there else []

    def bytes_sent(self) -> float | None:
        """Since the host was started; None where it cannot be read."""
        counted = self._read()
        return float(sum(counted[name] for name in self.names)) if self.names else None

    def _read(self) -> dict[str, int]:
        try:
            lines = self._file.read_text().splitlines()[2:]
        except OSError:
            return {}
        pairs = (line.split(":") for line in lines)
        return {name.strip(): int(numbers.split()[_SENT]) for name, numbers in pairs}


def interface_to(host: str) -> str | None:
    """The interface whose address a packet to that host gets; None if there is no way to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        try:
            unsent.connect((host, 9))
        except OSError:
            return None
        own = unsent.getsockname()[0]
    return next((name for _, name in socket.if_nameindex() if address_of(name) == own), None)


def address_of(interface: str) -> str | None:
    """Its IPv4 address; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(anything.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None
