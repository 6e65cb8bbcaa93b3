"""Requests of a reduction to its transport, and its workers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Callable, NamedTuple, Union

import numpy as np

from horovod_quant.kernels.entropy import CorruptPayloadError
from horovod_quant.kernels.layout import split

ALL, LOCAL, CROSS = "all", "local", "cross"
"""Groups of workers: all; those of one node; those with the same local rank, one per node."""


class Workers(NamedTuple):
    """Rank and number of workers, and the capabilities of their transport.

    The ``local_size`` workers of a node have consecutive ranks; it is 1 unless the reduction is hierarchical.
    """

    rank: int
    size: int
    custom_reduction: bool = False
    local_size: int = 1

    @property
    def local_rank(self) -> int:
        """Rank of this worker in its node, the group LOCAL."""
        return self.rank % self.local_size

    @property
    def node(self) -> int:
        """Number of this worker's node: its rank in the group CROSS."""
        return self.rank // self.local_size

    @property
    def nodes(self) -> int:
        return self.size // self.local_size

    def rank_in(self, group: str) -> int:
        """Return this worker's rank in its group of a kind."""
        return {ALL: self.rank, LOCAL: self.local_rank, CROSS: self.node}[group]

    def size_of(self, group: str) -> int:
        """Return the number of workers in this worker's group of a kind."""
        return {ALL: self.size, LOCAL: self.local_size, CROSS: self.nodes}[group]


# Requests. ``parts`` are the bytes of ``array`` that belong to each gradient of the group: what `stats` reports.
# ``group`` is the group of the n participating workers.


class Allreduce(NamedTuple):
    """Allreduce, a sum or maximum.

    Answered with an array of the same shape.
    """

    array: np.ndarray
    op: str
    parts: Sequence[float]
    group: str = ALL


class Allgather(NamedTuple):
    """Allgather; answered with a list of n arrays in rank order.

    ``lengths`` are the lengths of the n arrays where they differ. ``ragged``: the lengths are unknown, and each array
    is a uint8 payload made by `ragged_payload`; the answer has the bodies, without their lengths: see `split_gathered`.
    """

    array: np.ndarray
    parts: Sequence[float]
    lengths: Sequence[int] | None = None
    ragged: bool = False
    group: str = ALL


class Alltoall(NamedTuple):
    """Alltoall of pieces of ``splits`` elements, piece j for worker j.

    Answered with a list of the n pieces for this worker, in rank order. Each has the length of this worker's split,
    except with `transports.split_sums`, which only PyTorch uses.
    """

    array: np.ndarray
    splits: Sequence[int]
    parts: Sequence[float]
    group: str = ALL


class CustomAllreduce(NamedTuple):
    """Reduction by ``combine(left, right, low, high)``, only with ``Workers.custom_reduction``.

    ``left`` and ``right`` are reductions of adjacent ranges of ranks, together ``low .. high - 1``.
    """

    array: np.ndarray
    combine: Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]
    parts: Sequence[float]
    group: str = ALL


Request = Union[Allreduce, Allgather, Alltoall, CustomAllreduce]


class Collective(NamedTuple):
    """Type, dtype, operation and group of a request, known in advance.

    ``swap``: True for a sum that replaces a gather, see `transports.pairwise_via_allreduce`.
    """

    request: type
    dtype: str
    op: str = ""
    group: str = ALL
    swap: bool = False

    @property
    def needs_all_workers(self) -> bool:
        """True if the collective fails when a worker has called ``hvd.join()``."""
        return self.request is not Allreduce or self.group != ALL or self.swap


def ragged_payload(*body: np.ndarray) -> np.ndarray:
    """Return a uint8 payload: the body's length, 8 bytes, and the body."""
    return np.concatenate([np.array([sum(map(len, body))], "<i8").view(np.uint8), *body])


def drive(reduction: Generator[Request, Any, Any], answer: Callable[[Any], Any]) -> Any:
    """Answer a reduction's requests with ``answer(request)``; return its result."""
    reply: Any = None
    while True:
        try:
            request = reduction.send(reply)
        except StopIteration as stop:
            return stop.value
        reply = answer(request)


def map_requests(
    exchange: Generator[Request, Any, Any], answer: Callable[[Any], Generator[Request, Any, Any]]
) -> Generator[Request, Any, Any]:
    """Replace a reduction's requests by those of the generator ``answer(request)``."""
    reply: Any = None
    while True:
        try:
            request = exchange.send(reply)
        except StopIteration as stop:
            return stop.value
        reply = yield from answer(request)


def validated(request: Request, workers: Workers) -> Generator[Request, Any, Any]:
    """Yield a request; return its answer after checking the lengths.

    Raises:
        ValueError: the answer has other lengths.
    """
    answer = yield request
    if isinstance(request, (Allreduce, CustomAllreduce)):
        if answer.shape[0] != request.array.shape[0]:
            raise ValueError(
                f"an allreduce returned {answer.shape[0]} elements where {request.array.shape[0]} were expected"
            )
        return answer
    size = workers.size_of(request.group)
    if isinstance(request, Alltoall):
        check_pieces(answer, [request.splits[workers.rank_in(request.group)]] * size)
    elif request.ragged:
        _check_count(answer, size)
    else:
        check_pieces(answer, request.lengths or [request.array.shape[0]] * size)
    return answer


def check_pieces(pieces: Sequence[Any], lengths: Sequence[int]) -> None:
    """Raise ValueError if a piece is missing or has the wrong length."""
    _check_count(pieces, len(lengths))
    for worker, (piece, length) in enumerate(zip(pieces, lengths)):
        if piece.shape[0] != length:
            raise ValueError(
                f"corrupt payload from worker {worker}: {piece.shape[0]} elements where {length} were expected; or "
                f"its tensor has a different shape"
            )


def _check_count(pieces: Sequence[Any], size: int) -> None:
    if len(pieces) != size:
        raise ValueError(f"payloads came from {len(pieces)} workers where {size} were expected")


def split_gathered(buffer: np.ndarray, request: Allgather) -> list[np.ndarray]:
    """Cut the concatenation that an allgather returns into the workers' arrays.

    Raises:
        ValueError: the lengths do not add up to the buffer.
    """
    if request.ragged:
        return split_ragged(buffer)
    if request.lengths is not None:
        lengths = list(request.lengths)
    else:
        local = max(len(request.array), 1)
        lengths = [local] * (len(buffer) // local)
    if sum(lengths) != len(buffer):
        raise ValueError(f"an allgather returned {len(buffer)} elements where {sum(lengths)} were expected")
    return split(buffer, lengths)


def split_ragged(buffer: np.ndarray) -> list[np.ndarray]:
    """Undo the concatenation of ragged payloads; return their bodies.

    Raises:
        ValueError: the lengths do not add up to the buffer.
    """
    bodies: list[np.ndarray] = []
    position = 0
    while position < len(buffer):
        header = buffer[position : position + 8]
        length = int(header.copy().view("<i8")[0]) if len(header) == 8 else -1
        if not 0 <= length <= len(buffer) - position - 8:
            raise CorruptPayloadError(
                f"corrupt payload from worker {len(bodies)}: a length of {length} at byte {position}"
            )
        bodies.append(buffer[position + 8 : position + 8 + length])
        position += 8 + length
    return bodies
