"""Background thread that averages buckets one after another, and handles errors."""

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
_ENDED = "the thread that averages gradients has ended; a forked process has none"

_THREADS: dict[threading.Thread, queue.SimpleQueue[Any]] = {}
"""Running threads and their jobs."""
os.register_at_fork(after_in_child=_THREADS.clear)  # a forked process has none of the threads


class _Promise:
    """Future of a tensor that a job fills, for DDP.

    A callback raises the job's error: if the future had it as an exception, users would see a failed cast instead.
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
        """Complete the future, with an error if there is one."""
        self._error = error
        self._kept.set_result(self._tensor)


class Guard:
    """Runner of jobs that stops at the first failure, and reports it.

    Args:
        groups: the jobs' connections; closed when a job fails, which ends the other workers' waits.

    Attributes:
        failure: the message about the first error; None as long as there is none.
    """

    def __init__(self, groups: Groups) -> None:
        self.failure: str | None = None
        self._groups = groups

    def require_sound(self) -> None:
        """Raise RuntimeError if a job has failed."""
        if self.failure is not None:
            raise RuntimeError(
                f"gradients cannot be averaged any more, since an earlier step failed: {self.failure}"
            )

    def run(self, job: Callable[[], None]) -> BaseException | None:
        """Run a job and return its error, or None."""
        if self.failure is not None:
            return RuntimeError(self.failure)
        try:
            job()
            return None
        except BaseException as problem:
            return self.fail(problem)

    def fail(self, problem: BaseException) -> BaseException:
        """Record the first error, and return the exception to raise.

        This ends the other workers' waits.
        """
        note = self._groups.note
        note.leave(problem)
        traceback.clear_frames(problem.__traceback__)  # frames may keep connections open
        self._groups.close()
        first = note.read()
        local = f"{type(problem).__name__}: {problem}"
        self.failure = first or local
        if first is None or local.startswith(first.partition(": ")[2]):  # which may be cut
            return problem
        return RuntimeError(f"another worker has failed first, {first}")

    def close(self, device: torch.device) -> None:
        """Close the jobs' connections.

        NCCL's abort collectives that still run: after sound jobs this waits for the GPU.
        """
        if device.type == "cuda" and self.failure in (None, _ENDED):
            torch.cuda.synchronize(device)
        self._groups.close()


class Driver:
    """Background thread that runs jobs one after another until one fails.

    Args:
        groups: the jobs' connections.
        device: the gradients' device. On a GPU jobs run on a separate stream.

    Attributes:
        guard: has the first error.
    """

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.guard = Guard(groups)
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Neither the thread nor what ends it may keep this alive.
        self._thread = threading.Thread(
            target=_work, args=(self._jobs, self.guard), name="horovod_quant.ddp", daemon=True
        )
        _THREADS[self._thread] = self._jobs
        self._thread.start()
        weakref.finalize(self, _end, self._jobs, self._thread, self.guard, device, os.getpid())

    def submit(self, job: Callable[[], None], tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Queue a job, and return the future of its tensor.

        Raises:
            RuntimeError: an earlier job has failed, or the thread has ended.
        """
        self._require_running()
        promise = _Promise(tensor)
        if self._stream is not None:  # the caller's stream has computed the tensor
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        self._jobs.put((self._perform, job, promise))
        self._require_running()  # a thread that has ended meanwhile completes no future
        return promise.future

    def _require_running(self) -> None:
        if self.guard.failure is None and not self._thread.is_alive():
            self.guard.failure = _ENDED
        self.guard.require_sound()

    def _perform(self, job: Callable[[], None], promise: _Promise) -> None:
        with torch.cuda.stream(self._stream):  # no effect for None
            promise.keep(self.guard.run(job))


def _work(jobs: queue.SimpleQueue[Any], guard: Guard) -> None:
    """Run the thread, and complete every future at its end.

    DDP waits for them without a limit.
    """
    job: Any = None
    try:
        while (job := jobs.get()) is not None:
            perform, *arguments = job
            perform(*arguments)
            job = perform = arguments = None  # release them while waiting for the next one
    except BaseException as problem:
        guard.fail(problem)
        raise
    finally:
        guard.failure = guard.failure or _ENDED  # first, so that `submit` sees it where this misses the job
        while job is not None or not jobs.empty():
            if job is not None:
                job[2].keep(RuntimeError(guard.failure))
            job = None if jobs.empty() else jobs.get()
        _THREADS.pop(threading.current_thread(), None)


@atexit.register
def _end_all() -> None:
    """End all threads at exit.

    One that outlives the interpreter aborts the process when it returns from PyTorch.
    """
    for thread, jobs in list(_THREADS.items()):
        jobs.put(None)
        thread.join(_SECONDS_AT_EXIT)


def _end(
    jobs: queue.SimpleQueue[Any],
    thread: threading.Thread,
    guard: Guard,
    device: torch.device,
    process: int,
) -> None:
    """End the thread, except in a forked process, which has none."""
    if os.getpid() != process:
        return
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(_SECONDS_AT_EXIT)
    guard.close(device)
