"""One thread that averages bucket after bucket, beside the backward pass, and what becomes of errors there."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import traceback
import weakref
from typing import Any, Callable

import torch

from horovod_quant.transports.torch_distributed import Groups

_SECONDS_AT_EXIT = 5.0

_THREADS: dict[threading.Thread, queue.SimpleQueue[Any]] = {}
"""Those that run, and their jobs."""
os.register_at_fork(after_in_child=_THREADS.clear)  # where none of them runs


class _Promise:
    """A tensor that a job will have filled, as the future that DDP waits for.

    An error is raised by a callback: one that was set as a future's own would reach the user as a failed cast.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        devices = [tensor.device] if tensor.is_cuda else None
        self._tensor = tensor
        self._error: BaseException | None = None
        self._kept: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self.future = self._kept.then(self._result)

    def _result(self, kept: Any) -> torch.Tensor:
        if self._error is not None:
            raise self._error
        return kept.value()

    def keep(self, error: BaseException | None) -> None:
        """Ends the waiting, with an error if there is one."""
        self._error = error
        self._kept.set_result(self._tensor)


class Guard:
    """Has no job done any more after one has failed, on any worker, and says which was the first.

    Args:
        groups: what jobs use; closed when one fails, which ends what other workers wait for.

    Attributes:
        failure: what the user is told of the first error; None as long as there is none.
    """

    def __init__(self, groups: Groups) -> None:
        self.failure: str | None = None
        self._groups = groups

    def require_sound(self) -> None:
        """Raises RuntimeError if a job has failed."""
        if self.failure is not None:
            raise RuntimeError(
                f"gradients cannot be averaged any more, since an earlier step failed: {self.failure}"
            )

    def run(self, job: Callable[[], None]) -> BaseException | None:
        """Does a job; returns its error."""
        if self.failure is not None:
            return RuntimeError(self.failure)
        try:
            job()
            return None
        except BaseException as problem:
            return self._failed(problem)

    def _failed(self, problem: BaseException) -> BaseException:
        """Notes the first error, ends what others wait for, and returns what to raise here."""
        note = self._groups.note
        note.leave(problem)
        traceback.clear_frames(problem.__traceback__)  # which may keep connections open
        self._groups.close()
        first = note.read()
        own = f"{type(problem).__name__}: {problem}"
        self.failure = first or own
        return (
            problem
            if first is None or own in first
            else RuntimeError(f"another worker has failed first, {first}")
        )


class Driver:
    """Performs jobs one after another, in a thread of its own, until one fails.

    Args:
        groups: what jobs use.
        device: of the gradients. On a GPU jobs have a stream of their own.

    Attributes:
        guard: knows the first error.
    """

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.guard = Guard(groups)
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Neither the thread nor what ends it may keep this alive.
        thread = threading.Thread(target=_work, args=(self._jobs,), name="horovod_quant.ddp", daemon=True)
        _THREADS[thread] = self._jobs
        thread.start()
        weakref.finalize(self, _end, self._jobs, thread, groups, os.getpid())

    def submit(self, job: Callable[[], None], tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Has a job done; returns the future tensor that it will have filled.

        Raises:
            RuntimeError: an earlier job has failed.
        """
        self.guard.require_sound()
        promise = _Promise(tensor)
        self._jobs.put((self._perform, job, promise))
        return promise.future

    def _perform(self, job: Callable[[], None], promise: _Promise) -> None:
        with torch.cuda.stream(self._stream):  # which does nothing for None
            promise.keep(self.guard.run(job))


def _work(jobs: queue.SimpleQueue[Any]) -> None:
    """The thread. Whatever ends it, every future is completed: DDP waits for them without a limit."""
    job: Any = None
    try:
        while (job := jobs.get()) is not None:
            perform, *arguments = job
            perform(*arguments)
            job = perform = arguments = None  # nothing is kept while waiting for the next one
    finally:
        while job is not None:
            job[2].keep(RuntimeError("the thread that averages gradients has ended"))
            job = None if jobs.empty() else jobs.get()
        _THREADS.pop(threading.current_thread(), None)


@atexit.register
def _end_all() -> None:
    """A thread that outlives the interpreter aborts the process when it comes back from PyTorch."""
    for thread, jobs in list(_THREADS.items()):
        jobs.put(None)
        thread.join(_SECONDS_AT_EXIT)


def _end(jobs: queue.SimpleQueue[Any], thread: threading.Thread, groups: Groups, process: int) -> None:
    """Ends the thread; not in a process that was forked, which has none."""
    if os.getpid() != process:
        return
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(_SECONDS_AT_EXIT)
    groups.close()
