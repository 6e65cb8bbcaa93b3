"""Waiting for other workers: asleep, and with a limit where one is due."""

from __future__ import annotations

from typing import Any

from horovod_quant.transports.progress import Pauses


def wait(handle: Any) -> None:
    """Horovod's own wait spins, and takes a core from what it waits for."""
    import horovod.torch as hvd

    pauses = Pauses()
    while not hvd.poll(handle):
        pauses.sleep()


class Patience:
    """How long to wait for something that another worker may do much later, or not at all.

    The more often it was in vain, the shorter; the more often not, the longer.
    """

    _LEAST = 2e-3

    def __init__(self, most: float = 1.0) -> None:
        self._most = most
        self.seconds = most

    def learn(self, in_vain: bool) -> None:
        self.seconds = max(self.seconds / 4, self._LEAST) if in_vain else min(self.seconds * 2, self._most)
