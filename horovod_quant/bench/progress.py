"""How far a benchmark is, in lines: horovodrun and mpirun put a prefix before each, and turn a bar into a long one."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any, Callable, TextIO

from horovod_quant.analysis.units import show_seconds

EVERY = 5.0
"""Seconds between lines, at least."""


class Progress:
    """Writes such lines as ``measuring: 12 of 35 exchanges, 14 s, about 27 s left``, and one at the end.

    Args:
        what: is being done.
        total: how many exchanges there will be; None where nobody knows.
        write: what takes a line; by default standard error.
        clock: seconds.
    """

    def __init__(
        self,
        what: str,
        total: int | None,
        write: Callable[[str], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._clock = what, total, clock
        self._write = (lambda line: write_line(line, sys.stderr)) if write is None else write
        self._done = 0

    def __enter__(self) -> Progress:
        self._begin = self._written = self._clock()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self._say(last=True)

    def update(self) -> None:
        """Counts an exchange."""
        self._done += 1
        if self._clock() - self._written >= EVERY and self._done != self._total:
            self._say(last=False)

    def _say(self, last: bool) -> None:
        self._written = self._clock()
        took = self._written - self._begin
        count = str(self._done) if self._total is None or last else f"{self._done} of {self._total}"
        line = f"{self._what}: {count} exchanges, {show_seconds(took)}"
        if not last and self._total is not None:
            line += f", about {show_seconds(took / self._done * (self._total - self._done))} left"
        self._write(line)


def write_line(line: str, stream: TextIO) -> None:
    """Writes it at once: mpirun puts a prefix before whatever comes, also before a newline that `print` sends alone.

    A stream that takes no more ends no measurement: the report fails on it again.
    """
    with suppress(OSError):
        stream.write(f"{line}\n")
        stream.flush()


class Silent:
    """In place of `Progress` on all workers but the first."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def update(self) -> None:
        """Nothing."""
