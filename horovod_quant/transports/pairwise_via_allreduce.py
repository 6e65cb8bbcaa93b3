"""Gathers and alltoalls of two workers as sums, for transports on which the two directions of such a one take turns.

So they do under Gloo, whose allreduce has several small messages under way (docs/advise.md). Two workers who add their
arrays, and then take away their own, have each other's: by as many bytes, sent both ways at once. Integers wrap
around, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import numpy as np

from horovod_quant.schemes.base import (
    Allgather,
    Allreduce,
    Alltoall,
    Collective,
    Exchange,
    Workers,
    map_requests,
    split_points,
    validated,
)

Gathering = Union[Allgather, Alltoall]


def gathers_take_turns(*, mpi: bool, on_device: bool = False) -> bool:
    """Whether two workers gather faster by sums: where Gloo performs the collectives.

    Args:
        mpi: whether Horovod runs with MPI.
        on_device: whether its collectives get tensors of a GPU, which are NCCL's.
    """
    return not (mpi or on_device)


def collectives_of_pairwise(collectives: Sequence[Collective], workers: Workers) -> tuple[Collective, ...]:
    """Those of `pairwise_via_allreduce`, from an exchange's own."""
    return tuple(
        collective._replace(request=Allreduce, dtype="int32", op="sum", swap=True)
        if _is_swapped(collective.request, collective.dtype, workers.size_of(collective.group))
        else collective
        for collective in collectives
    )


def pairwise_via_allreduce(exchange: Exchange, workers: Workers) -> Exchange:
    """An exchange with the same bits and bytes, in which two workers add instead of gathering.

    Args:
        exchange: of a scheme, on numpy arrays.
        workers: who takes part.
    """

    def answer(request: Any) -> Any:
        if is_swapped(request, workers):
            return (yield from _swap(request, workers))
        return (yield request)

    return map_requests(exchange, answer)


def is_swapped(request: Any, workers: Workers) -> bool:
    """Whether `pairwise_via_allreduce` asks for a sum instead."""
    if not isinstance(request, (Allgather, Alltoall)):
        return False
    return _is_swapped(type(request), request.array.dtype, workers.size_of(request.group))


def as_sum(request: Any, array: Any) -> Allreduce:
    """The sum of ``array`` in place of a gather; of an alltoall's array only the other worker's half is sent."""
    share = 0.5 if isinstance(request, Alltoall) else 1.0
    return Allreduce(array, "sum", [share * part for part in request.parts], request.group)


def _is_swapped(request: type, dtype: Any, size: int) -> bool:
    # Not bytes, whose number the other worker does not know.
    return size == 2 and request in (Allgather, Alltoall) and dtype in ("int32", "float32")


def _swap(request: Gathering, workers: Workers) -> Any:
    rank = workers.rank_in(request.group)
    if isinstance(request, Alltoall):
        at = split_points(request.splits)
        kept, sent = (request.array[at[i] : at[i + 1]] for i in (rank, 1 - rank))
        expected = len(kept)
    else:
        kept = sent = request.array
        expected = len(sent) if request.lengths is None else request.lengths[1 - rank]
    other = yield from _other(sent.view(np.int32), expected, request, workers)
    received = other.view(request.array.dtype)
    return [received, kept] if rank else [kept, received]


def _other(own: np.ndarray, expected: int, request: Gathering, workers: Workers) -> Any:
    """The other worker's integers."""
    words = np.empty(max(len(own), expected, 1), np.int32)
    words[: len(own)] = own
    words[len(own) :] = 0
    total = yield from validated(as_sum(request, words), workers)
    # What a transport that adds in place leaves is nobody else's.
    other = total if np.may_share_memory(total, words) else total.copy()
    common = min(len(own), expected)
    other[:common] -= own[:common]
    return other[:expected]
