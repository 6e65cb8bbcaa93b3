"""Bytes that the kernel has counted at this host's network interfaces."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

INTERFACES = Path("/sys/class/net")


class Counter:
    """Bytes sent, headers and everybody's traffic included.

    Args:
        hosts: with several hosts the interfaces to the others are read, with one the loopback interface.
        environment: Horovod's launcher says there which interface Gloo uses.
        interfaces: where Linux shows them.
    """

    def __init__(
        self, hosts: int, environment: Mapping[str, str] = os.environ, interfaces: Path = INTERFACES
    ) -> None:
        self._folder = interfaces
        self.names = ["lo"] if hosts == 1 else self._outward(environment.get("HOROVOD_GLOO_IFACE", ""))
        if self.bytes_sent() is None:
            self.names = []

    def _outward(self, chosen: str) -> list[str]:
        if chosen and chosen != "lo" and (self._folder / chosen).exists():
            return [chosen]
        try:
            found = sorted(path for path in self._folder.iterdir() if path.name != "lo")
        except OSError:
            return []
        # What belongs to a bridge or a bond is counted there again.
        return [path.name for path in found if not (path / "master").exists()]

    def bytes_sent(self) -> float | None:
        """Since the host was started; None where it cannot be read."""
        if not self.names:
            return None
        try:
            files = [self._folder / name / "statistics" / "tx_bytes" for name in self.names]
            return float(sum(int(file.read_text()) for file in files))
        except (OSError, ValueError):
            return None
