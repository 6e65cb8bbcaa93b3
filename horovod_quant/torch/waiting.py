"""Waiting for other workers: asleep, with a limit where one is due, and not in silence when it takes long."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Any, Callable, Protocol

LONG = 10.0
"""Seconds after which a worker says what it is waiting for."""

# Between two looks at a collective: short at first, then a share of what has been waited already. Each look takes time
# from those who compute on the same cores.
_SHORTEST_PAUSE, _LONGEST_PAUSE, _PAUSE_SHARE = 2e-4, 1e-3, 1 / 16

_log = logging.getLogger("horovod_quant")


class Pauses:
    """Of a thread that waits; each is the longer, the longer it has waited."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    @property
    def waited(self) -> float:
        """Seconds since the first."""
        return time.perf_counter() - self._begin

    def sleep(self) -> None:
        time.sleep(min(max(_PAUSE_SHARE * self.waited, _SHORTEST_PAUSE), _LONGEST_PAUSE))


def wait_while(
    is_waiting: Callable[[], bool], progresses: Callable[[], bool], limit: float | None = None
) -> bool:
    """Looks again and again, with pauses, until nothing is waited for.

    Args:
        is_waiting: whether there is something to wait for.
        progresses: does what has become possible; whether there was something.
        limit: seconds without progress after which to give up; None: never.

    Returns:
        Whether nothing is waited for any more.
    """
    pauses = Pauses()
    while is_waiting():
        if progresses():
            pauses = Pauses()
        elif limit is not None and pauses.waited > limit:
            return False
        elif is_waiting():
            pauses.sleep()
    return True


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


class Waiting(Protocol):
    """Whoever may have to wait for other workers.

    Attributes:
        waiting_since: `time.monotonic` when it began; None while it does not wait.
    """

    waiting_since: float | None

    def waits_for(self) -> str:
        """The names of the gradients, and of the operation."""
        ...


class Watch:
    """Says what is waited for, once each time, when it takes long. A thread: whoever waits may do so inside Horovod."""

    def __init__(self, long: float = LONG) -> None:
        self._long = long
        self._watched: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, who: Waiting) -> None:
        """Notes that ``who`` waits from now on, unless it did already."""
        if who.waiting_since is not None:
            return
        who.waiting_since = time.monotonic()
        with self._lock:
            self._watched.setdefault(who, 0.0)
            if self._thread is None or not self._thread.is_alive():  # as after a fork
                self._thread = threading.Thread(target=self._look, name="horovod_quant watch", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while True:
            time.sleep(self._long / 4)
            with self._lock:
                watched = list(self._watched.items())
            for who, told in watched:
                since = who.waiting_since
                if since is not None and since != told and time.monotonic() - since > self._long:
                    _log.warning("%s", _complaint(who, time.monotonic() - since))
                    with self._lock:
                        self._watched[who] = since


def _complaint(who: Waiting, seconds: float) -> str:
    return (
        f"horovod_quant: {who.waits_for()}: no progress for {seconds:.0f} s, because other workers have not done the "
        f"same. It continues while every worker is in step() or synchronize() of this optimizer, which others may "
        f"reach late. It never will if a worker has skipped that call, has left the training loop without hvd.join(), "
        f"or waits for something that this worker does after its own step(): another optimizer's step(), or any other "
        f"Horovod operation, named or not; do these in the same order on all workers"
    )


WATCH = Watch()
