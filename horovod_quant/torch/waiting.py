"""Waiting for other workers without spinning, with adaptive time limits."""

from __future__ import annotations

from typing import Any

from horovod_quant.transports.progress import Pauses


def wait(handle: Any) -> None:
    """Wait asleep.

    Horovod's wait spins, and takes a core from the work that it waits for.
    """
    import horovod.torch as hvd

    pauses = Pauses()
    while not hvd.poll(handle):
        pauses.sleep()


class Patience:
    """Adaptive time limit for an event that may never come.

    Shrinks after each timeout, grows after each success.
    """

    _LEAST = 2e-3

    def __init__(self, most: float = 1.0) -> None:
        self._most = most
        self.seconds = most

    def learn(self, in_vain: bool) -> None:
        self.seconds = max(self.seconds / 4, self._LEAST) if in_vain else min(self.seconds * 2, self._most)
