"""Progress thread, which polls running jobs and launches their next stages.

So a script that computes, or waits for something else, delays no other worker. The thread depends on neither a
framework nor a library of collectives: it runs jobs.

Signal handlers run in the main thread, between any two instructions, and may raise. That thread therefore makes a
single call of a `SimpleQueue` here, which an exception leaves either done or not begun, and holds no lock meanwhile.
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

from horovod_quant.kernels import notices
from horovod_quant.transports import time_slice

LONG = 10.0
"""Seconds without progress after which the thread logs the stalled job."""

# Polling takes time from computation on the same cores, so pauses between polls grow with the time waited.
_SHORTEST_PAUSE, _LONGEST_PAUSE, _PAUSE_SHARE = 2e-4, 1e-3, 1 / 16
_PAUSE_WITHOUT_URGENT_JOBS = 2e-2  # no thread waits; one that begins to wait ends the pause

_EXIT_PATIENCE = 5.0
"""Seconds that the program waits for the thread at exit."""


class Job:
    """Work in stages, in each of which other workers participate.

    Args:
        name: the name of its collectives; it begins when an earlier job of the same name has ended.

    Attributes:
        ended: whether there is nothing left to do.
        error: the exception that ended it early, or None.
        urgent: whether other workers may wait for the next `advance`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = False
        self.error: BaseException | None = None
        self.urgent = True
        self.taken = False  # by the thread
        self.previous: Job | None = None
        self.bells: list[SimpleQueue[None]] = []

    @property
    def has_result(self) -> bool:
        """True if a result or an error, awaited by callers, is available."""
        return self.ended

    def poll(self) -> bool:
        """True if `advance` can do something now."""
        raise NotImplementedError

    def may_begin(self) -> bool:
        """True if no earlier job of the same name is under way."""
        if self.previous is not None and self.previous.ended:
            self.previous = None
        return self.previous is None

    def advance(self) -> bool:
        """Do the work that needs no waiting for other workers.

        Return True if the job has ended.
        """
        raise NotImplementedError

    def stalled(self, seconds: float) -> str | None:
        """Return the message to log after a long time without progress.

        Returns None if no caller waits.
        """
        return None


class Progress:
    """Running jobs and their thread.

    It starts with the first job.

    Attributes:
        advanced: number of calls of any job's `advance`.
        long: see `LONG`.
    """

    def __init__(self, long: float = LONG) -> None:
        self.long = long
        self.advanced = 0
        self._stops_at_exit = False
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Reset in a forked process, which has no thread.

        It does not participate in its parent's collectives.
        """
        self._lock = threading.Lock()
        self._inbox: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def hand(self, job: Job) -> None:
        """Submit a job to the thread; submitting it again has no effect."""
        self._inbox.put(job)
        # Not is_alive(): an exception of a signal handler in there marks a thread as ended that goes on.
        if self._thread is None:
            threading.Thread(target=self._run, name="horovod_quant progress", daemon=True).start()

    def _claim(self) -> bool:
        """Return True for the first thread only.

        `hand` may have started several concurrently.
        """
        with self._lock:
            if self._thread is not None:
                return False
            self._thread = threading.current_thread()
        if not self._stops_at_exit:
            self._stops_at_exit = True
            atexit.register(self.stop)
        return True

    def stop(self) -> None:
        """End the thread.

        When the interpreter exits, it must not be inside a library.
        """
        thread = self._thread
        if thread is not None:
            self._inbox.put(None)
            thread.join(_EXIT_PATIENCE)

    def wait(self, jobs: Sequence[Job], is_over: Callable[[], bool], patience: float | None = None) -> bool:
        """Sleep until jobs have made a condition true.

        Args:
            jobs: the jobs whose results or ends can make it true.
            is_over: returns the condition.
            patience: seconds without progress of any job after which to give up; None: never.

        Returns:
            The condition.
        """
        bell = _bells.bell
        for job in jobs:
            job.bells.append(bell)
            if not job.urgent:
                self._inbox.put(job)  # the thread may be in a long pause
        while not is_over():
            before = self.advanced
            try:
                bell.get(timeout=patience)
            except Empty:
                if self.advanced == before:
                    return is_over()
        return True

    def _run(self) -> None:
        if self._claim():
            try:
                time_slice.shorten()  # other workers wait while it waits for a core
                self._work()
            finally:
                self._thread = None

    def _work(self) -> None:
        inbox = self._inbox
        jobs: list[Job] = []
        advanced_at, waited, logged = time.perf_counter(), 0.0, False
        while True:
            try:
                job = inbox.get(timeout=_pause(jobs, waited)) if jobs else inbox.get()
                while True:
                    if job is None:
                        return
                    if not job.taken:
                        job.taken = True
                        job.previous = next((each for each in reversed(jobs) if each.name == job.name), None)
                        jobs.append(job)
                        advanced_at, logged = time.perf_counter(), False
                    job = inbox.get_nowait()
            except Empty:
                job = None  # else this variable keeps the job alive
            while self._advance_one(jobs):
                advanced_at, logged = time.perf_counter(), False
                if not inbox.empty():
                    break
            waited = time.perf_counter() - advanced_at
            if jobs and not logged and waited > self.long:
                logged = _log_stall(jobs, waited)

    def _advance_one(self, jobs: list[Job]) -> bool:
        """Advance the oldest job that is ready, urgent ones first.

        Return False if none is.
        """
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
        if job.has_result:  # no earlier: a thread that wakes for nothing takes a core from others
            for bell in job.bells:
                bell.put(None)
        return True


def _pause(jobs: Iterable[Job], waited: float) -> float:
    """Return the seconds until the next poll."""
    if not any(job.urgent or job.bells for job in jobs):
        return _PAUSE_WITHOUT_URGENT_JOBS
    return min(max(_PAUSE_SHARE * waited, _SHORTEST_PAUSE), _LONGEST_PAUSE)


def _log_stall(jobs: Iterable[Job], seconds: float) -> bool:
    """Log the first stalled job that a caller waits for.

    Return False if there is none.
    """
    for job in jobs:
        message = job.stalled(seconds)
        if message is not None:
            notices.log(logging.WARNING, "horovod_quant: %s", message)
            return True
    return False


class _Bells(threading.local):
    """A queue per thread, on which the thread waits."""

    def __init__(self) -> None:
        self.bell: SimpleQueue[Any] = SimpleQueue()


_bells = _Bells()

PROGRESS = Progress()
