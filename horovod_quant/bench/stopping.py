"""Ctrl-C, and what horovodrun makes of it.

A signal only leaves a note. The workers tell each other in the next measurement, and so stop at the same point.

- ``horovodrun --gloo``, when interrupted, sends SIGTERM to the *children* of the processes that it has started, which
  are the workers themselves. A worker without children is frozen and killed at once, one with children is 5 seconds
  later. So each worker has a child, which passes the signal on.
- ``mpirun`` sends SIGTERM to the workers, and kills them a second later, or as its setting says.

After SIGTERM there may be too little time to agree. Then whoever has something to say says it, and the process ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

GLOO_PATIENCE = 3.0, 4.5
"""Seconds after SIGTERM in which the workers may agree to stop, and in which they may finish by themselves."""

MPI_KILLS_AFTER = "OMPI_MCA_odls_base_sigkill_timeout"

_CHILD = """
import os, signal, sys
worker = int(sys.argv[1])
def pass_on(number, frame):
    if os.getppid() == worker:
        os.kill(worker, signal.SIGTERM)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, pass_on)
sys.stdin.read()
"""


class Interruption:
    """Notes SIGINT and SIGTERM, from now on; to be made in the main thread.

    Args:
        controller: ``"gloo"`` or ``"mpi"``.
        last_words: called in another thread before the process ends for lack of time.

    Attributes:
        requested: whether to stop.
        doomed: whether the launcher will kill this process soon.
    """

    def __init__(self, controller: str, last_words: Callable[[], None]) -> None:
        self.requested = False
        self._patience, self._longest = GLOO_PATIENCE if controller == "gloo" else _mpi_patience()
        self._last_words = last_words
        self.doomed = False
        self._lock = threading.Lock()
        self._settled = False
        # The main thread may wait in Horovod for long; a handler in Python would wait for it.
        self._signals, writer = socket.socketpair()
        writer.setblocking(False)
        self._writer = writer
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()
        if controller == "gloo":
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CHILD, str(os.getpid())],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip

    def _watch(self) -> None:
        while True:
            for number in self._signals.recv(64):
                self.requested = True
                if number == signal.SIGTERM and not self.doomed:
                    self.doomed = True
                    for seconds, action in ((self._patience, self._give_up), (self._longest, leave)):
                        timer = threading.Timer(seconds, action)
                        timer.daemon = True
                        timer.start()

    def _give_up(self) -> None:
        with self._lock:
            if self._settled:
                return
            self._settled = True
        try:
            self._last_words()
        finally:
            leave()

    def settle(self) -> None:
        """Says that the main thread is about to finish by itself; does not return if another thread already does."""
        with self._lock:
            first, self._settled = not self._settled, True
        if not first:
            threading.Event().wait()


def _mpi_patience() -> tuple[float, float]:
    try:
        seconds = min(float(int(os.environ.get(MPI_KILLS_AFTER, "1"))), threading.TIMEOUT_MAX)
    except ValueError:
        seconds = 1.0  # as Open MPI's own
    return 0.4 * seconds, 0.9 * seconds


def leave(status: int = 0) -> None:
    """Ends the process at once: Horovod's own threads may never end after a worker is gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)
