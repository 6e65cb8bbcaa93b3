"""A transport from outside the package, as docs/architecture.md describes one: a thread for each worker."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_quant import kernels
from horovod_quant.kernels.keys import RngKey
from horovod_quant.schemes.base import (
    ALL,
    LOCAL,
    Allgather,
    Allreduce,
    Alltoall,
    BinaryState,
    Gradient,
    Scheme,
    Workers,
    split_gathered,
    split_points,
)

States = Sequence[Sequence[BinaryState]]


class Threads:
    """What the threads share: a slot for the request of each worker, and a barrier."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)
        self.failure: BaseException | None = None

    def answer(self, request: Any, workers: Workers) -> Any:
        """The answer to the request of one worker; None is that of a worker that has finished."""
        self.slots[workers.rank] = request
        self.barrier.wait()
        kinds = {(type(each), getattr(each, "group", ALL)) for each in self.slots}
        if len(kinds) > 1:
            raise RuntimeError(f"the workers' requests differ: {kinds}")
        found = None if request is None else perform(request, self.slots, workers)
        self.barrier.wait()  # until all have read the slots
        return found

    def fail(self, error: BaseException) -> None:
        """End all threads; what they are then told is not the reason."""
        if self.failure is None and not isinstance(error, threading.BrokenBarrierError):
            self.failure = error
        self.barrier.abort()


def perform(request: Any, slots: Sequence[Any], workers: Workers) -> Any:
    rank, size, local_size = workers.rank, workers.size, workers.local_size
    members = {
        ALL: range(size),
        LOCAL: range(rank - rank % local_size, rank - rank % local_size + local_size),
    }.get(request.group, range(rank % local_size, size, local_size))
    requests = [slots[member] for member in members]
    if isinstance(request, Allreduce):
        reduce = np.maximum if request.op == "max" else np.add
        return reduce.reduce([each.array for each in requests], axis=0, dtype=request.array.dtype)
    if isinstance(request, Allgather):
        if request.ragged:
            return split_gathered(np.concatenate([each.array for each in requests]), request)
        return [each.array for each in requests]
    if isinstance(request, Alltoall):
        me, pieces = members.index(rank), []
        for each in requests:
            at = split_points(each.splits)
            pieces.append(each.array[at[me] : at[me + 1]])
        return pieces
    raise TypeError(f"not a request: {request!r}")


def exchange(
    scheme: Scheme,
    gradients: Sequence[Sequence[np.ndarray]],
    local_size: int = 1,
    states: States | None = None,
    backend: str = "auto",
) -> list[list[np.ndarray]]:
    """The average that each worker decodes, for each of its gradients."""
    size = len(gradients)
    chosen = kernels.get(backend)
    decoded: list[list[np.ndarray]] = [[] for _ in range(size)]
    shared = Threads(size)

    def work(rank: int) -> None:
        try:
            workers = Workers(rank, size, local_size=local_size)
            members = [
                Gradient(values, RngKey(seed=0, name=str(i)), state=states[rank][i] if states else None)
                for i, values in enumerate(gradients[rank])
            ]
            resolved = scheme.for_workers(workers)
            resolved.check_workers(size)
            generator = resolved.begin(members, workers, chosen)
            reply = None
            while True:
                try:
                    request = generator.send(reply)
                except StopIteration as stop:
                    shared.answer(None, workers)
                    outs = [np.empty_like(values) for values in gradients[rank]]
                    decoded[rank] = stop.value.decode(range(len(outs)), 1 / size, outs)
                    return
                reply = shared.answer(request, workers)
        except BaseException as error:
            shared.fail(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if shared.failure is not None:
        raise shared.failure
    return decoded
