"""Separate numbering of a script's unnamed operations.

Horovod names an unnamed operation by the number of operations that the worker has started before, named or not, so
unnamed operations match only if all workers have started the same number. The progress thread starts operations at
times that differ between workers. From the first compressor on, this module therefore names an unnamed operation by the
number of unnamed ones before it in its process set.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from typing import Any, Callable

from horovod_quant.transports.progress import PROGRESS, Job

_INNER = (
    "_allreduce_async", "_grouped_allreduce_async", "_allgather_async", "_grouped_allgather_async", "_broadcast_async",
    "_alltoall_async", "_reducescatter_async", "_grouped_reducescatter_async",
)  # fmt: skip
"""Functions of ``horovod.torch.mpi_ops`` that all unnamed operations go through."""

_STALLED = (
    "the unnamed operation {name} has not been answered for {seconds} s. From its first compressor on, a worker "
    "numbers its unnamed Horovod operations separately; a worker that has created no compressor of horovod_quant, or "
    "created it earlier or later in the script, uses other numbers, and this one waits indefinitely. Give the "
    "operation a name, or create a compressor at the same point of the script on every worker"
)

_lock = threading.Lock()


class _Numbers:
    """Number of unnamed operations since ``hvd.init()``, by process set.

    Attributes:
        met: the process sets with a completed numbered operation, so that all their workers use the same numbers.
    """

    def __init__(self, session: Any) -> None:
        self.session = session
        self.met: set[int] = set()
        self._counts: dict[int, itertools.count[int]] = {}

    def next(self, process_set: int) -> int:
        return next(self._counts.setdefault(process_set, itertools.count()))


_numbers = _Numbers(None)
_wrapped: set[str] = set()


def number_unnamed_operations() -> None:
    """Wrap Horovod's inner functions, once."""
    from horovod.torch import mpi_ops

    with _lock:
        for name in _INNER:
            inner = getattr(mpi_ops, name, None)  # older releases have fewer
            if inner is not None and name not in _wrapped:
                setattr(mpi_ops, name, _numbered(inner, mpi_ops))
                _wrapped.add(name)


def _numbered(inner: Callable[..., Any], mpi_ops: Any) -> Callable[..., Any]:
    parameters = list(inspect.signature(inner).parameters)
    at, process_set_at = parameters.index("name"), parameters.index("process_set")

    @functools.wraps(inner)
    def numbered(*arguments: Any, **keywords: Any) -> Any:
        unnamed = len(arguments) > process_set_at and arguments[at] is None
        if not unnamed:
            return inner(*arguments, **keywords)
        process_set = arguments[process_set_at].process_set_id
        numbers = _current(mpi_ops)
        name = f"noname.horovod_quant.{process_set}.{numbers.next(process_set)}"
        handle = inner(*arguments[:at], name, *arguments[at + 1 :], **keywords)
        if process_set not in numbers.met:
            PROGRESS.hand(_First(handle, name, process_set, numbers, mpi_ops))
        return handle

    return numbered


def _current(mpi_ops: Any) -> _Numbers:
    global _numbers
    session = mpi_ops._handle_map
    numbers = _numbers
    if numbers.session is not session:
        with _lock:
            if _numbers.session is not session:
                _numbers = _Numbers(session)
            numbers = _numbers
    return numbers


class _First(Job):
    """A process set's first numbered operation, watched until it is answered."""

    def __init__(self, handle: Any, name: str, process_set: int, numbers: _Numbers, mpi_ops: Any) -> None:
        super().__init__(name)
        self._handle, self._process_set = handle, process_set
        self._numbers, self._mpi_ops = numbers, mpi_ops

    def poll(self) -> bool:
        session = self._mpi_ops._handle_map
        # A caller that has waited for it has removed its handle.
        return (
            session is not self._numbers.session
            or self._handle not in session
            or self._mpi_ops.poll(self._handle)
        )

    def advance(self) -> bool:
        self._numbers.met.add(self._process_set)
        return True

    def stalled(self, seconds: float) -> str | None:
        return _STALLED.format(name=self.name, seconds=f"{seconds:.0f}")
