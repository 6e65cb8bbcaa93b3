"""A thread that drives exchanges: it polls what is under way, and launches what follows.

So a script that computes, or waits for something else, holds up no other worker. It knows neither a framework nor a
library of collectives: it is handed jobs.

Signal handlers run in the main thread, between any two instructions, and may raise. What that thread does here is
therefore one call of a `SimpleQueue`, which an exception finds either done or not begun, and no lock is held meanwhile.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

LONG = 10.0
"""Seconds without progress after which the thread logs what is waited for."""

# Between two looks: short at first, then a share of what has been waited already. Each look takes time from those who
# compute on the same cores.
_SHORTEST_PAUSE, _LONGEST_PAUSE, _PAUSE_SHARE = 2e-4, 1e-3, 1 / 16

_EXIT_PATIENCE = 5.0
"""Seconds that the end of the program waits for the thread."""

_log = logging.getLogger("horovod_quant")


class Job:
    """Work in stages, each of which other workers have a part in.

    Args:
        name: of its collectives; it begins when an earlier job of the same name has ended.

    Attributes:
        ended: whether there is nothing left to do.
        error: what has ended it early; None without.
        urgent: whether other workers may wait for what `advance` does next.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = False
        self.error: BaseException | None = None
        self.urgent = True
        self.taken = False  # by the thread
        self.previous: Job | None = None
        self.bells: list[SimpleQueue[None]] = []

    def poll(self) -> bool:
        """True if `advance` can do something now."""
        raise NotImplementedError

    def may_begin(self) -> bool:
        """True if no earlier job of the same name is under way."""
        if self.previous is not None and self.previous.ended:
            self.previous = None
        return self.previous is None

    def advance(self) -> bool:
        """Do what can be done without waiting for other workers; True if that was all."""
        raise NotImplementedError

    def stalled(self) -> str | None:
        """Return what to log where it makes no progress for long; None if no caller waits for it."""
        return None

    def ring(self) -> None:
        """Wake those who wait: there is something new."""
        for bell in self.bells:
            bell.put(None)


class Pauses:
    """Pauses between looks at something; they back off with elapsed time."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    @property
    def waited(self) -> float:
        """Seconds since the first."""
        return time.perf_counter() - self._begin

    @property
    def seconds(self) -> float:
        """Of the next one."""
        return min(max(_PAUSE_SHARE * self.waited, _SHORTEST_PAUSE), _LONGEST_PAUSE)

    def sleep(self) -> None:
        time.sleep(self.seconds)


class Progress:
    """The jobs under way, and their thread, which starts with the first one.

    Attributes:
        advanced: how often a job has been advanced.
        long: see `LONG`.
    """

    def __init__(self, long: float = LONG) -> None:
        self.long = long
        self.advanced = 0
        self._lock = threading.Lock()
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """A forked process has no thread, and no part in what its parent exchanges."""
        self._lock = threading.Lock()
        self._inbox: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def hand(self, job: Job) -> None:
        """Give a job to the thread. Doing so again does nothing."""
        self._inbox.put(job)
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                atexit.register(self.stop)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="horovod_quant progress", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread: at the interpreter's end it must not be inside a library."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._inbox.put(None)
            thread.join(_EXIT_PATIENCE)

    def wait(self, jobs: Sequence[Job], is_over: Callable[[], bool], patience: float | None = None) -> bool:
        """Wait, asleep, for something that jobs bring about.

        Args:
            jobs: those that ring when it may be over.
            is_over: tells it.
            patience: seconds without progress of any job after which to give up; None: never.

        Returns:
            Whether it is over.
        """
        bell = _bells.own
        for job in jobs:
            job.bells.append(bell)
        while not is_over():
            before = self.advanced
            try:
                bell.get(timeout=patience)
            except Empty:
                if self.advanced == before:
                    return is_over()
        return True

    def _run(self) -> None:
        inbox = self._inbox
        jobs: list[Job] = []
        pauses, logged = Pauses(), False
        while True:
            try:
                job = inbox.get(timeout=pauses.seconds) if jobs else inbox.get()
                while True:
                    if job is None:
                        return
                    if not job.taken:
                        job.taken = True
                        job.previous = next((each for each in reversed(jobs) if each.name == job.name), None)
                        jobs.append(job)
                        pauses, logged = Pauses(), False
                    job = inbox.get_nowait()
            except Empty:
                job = None  # which it would keep alive
            while self._advance_one(jobs):
                pauses, logged = Pauses(), False
                if not inbox.empty():
                    break
            if jobs and not logged and pauses.waited > self.long:
                logged = _log_stall(jobs, pauses.waited)

    def _advance_one(self, jobs: list[Job]) -> bool:
        """Advance the oldest job that can be, the urgent ones first; whether there was one."""
        for urgent in (True, False):
            for job in jobs:
                if job.urgent is urgent and self._advance(job, jobs):
                    return True
        return False

    def _advance(self, job: Job, jobs: list[Job]) -> bool:
        try:
            if not job.poll():
                return False
            job.ended = job.advance()
        except BaseException as error:
            job.error = error
            job.ended = True
        self.advanced += 1
        if job.ended:
            jobs.remove(job)
        job.ring()
        return True


def _log_stall(jobs: Iterable[Job], seconds: float) -> bool:
    """Log what is waited for, if a caller waits; whether one does."""
    for job in jobs:
        message = job.stalled()
        if message is not None:
            _log.warning("horovod_quant: %s", message.format(seconds=f"{seconds:.0f}"))
            return True
    return False


class _Bells(threading.local):
    """Each thread's, for which it waits."""

    def __init__(self) -> None:
        self.own: SimpleQueue[Any] = SimpleQueue()


_bells = _Bells()

PROGRESS = Progress()
