"""Allgathers and alltoalls of two workers as sums.

They are for transports that send in one direction at a time. Gloo's allgather and alltoall send alternately in both
directions; its allreduce has several small messages under way (docs/advise.md). Two workers that add their arrays, and
then subtract the local ones, have each other's array. This sends the same number of bytes, in both directions at once.
Integers wrap around, so the results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import numpy as np

from horovod_quant.kernels.layout import split
from horovod_quant.schemes.base import (
    Allgather,
    Allreduce,
    Alltoall,
    Collective,
    Exchange,
    Workers,
    map_requests,
    validated,
)

Gathering = Union[Allgather, Alltoall]


def collectives_of_pairwise(collectives: Sequence[Collective], workers: Workers) -> tuple[Collective, ...]:
    """Return the collectives after `pairwise_via_allreduce`, from a scheme's collectives."""
    return tuple(
        collective._replace(request=Allreduce, dtype="int32", op="sum", swap=True)
        if _is_swapped(collective.request, collective.dtype, workers.size_of(collective.group))
        else collective
        for collective in collectives
    )


def pairwise_via_allreduce(exchange: Exchange, workers: Workers) -> Exchange:
    """Replace gathers of two workers by bit-identical sums.

    They send the same number of bytes.

    Args:
        exchange: the requests of a scheme, on numpy arrays.
        workers: the participating workers.
    """

    def answer(request: Any) -> Any:
        if is_swapped(request, workers):
            return (yield from _swap(request, workers))
        return (yield request)

    return map_requests(exchange, answer)


def is_swapped(request: Any, workers: Workers) -> bool:
    """True if `pairwise_via_allreduce` replaces the request by a sum."""
    if not isinstance(request, (Allgather, Alltoall)):
        return False
    return _is_swapped(type(request), request.array.dtype, workers.size_of(request.group))


def as_sum(request: Any, array: Any) -> Allreduce:
    """Return the sum of ``array`` that replaces a gather.

    An alltoall sends only the other worker's half.
    """
    share = 0.5 if isinstance(request, Alltoall) else 1.0
    return Allreduce(array, "sum", [share * part for part in request.parts], request.group)


def _is_swapped(request: type, dtype: Any, size: int) -> bool:
    # Not for bytes: the other worker does not know their number.
    return size == 2 and request in (Allgather, Alltoall) and dtype in ("int32", "float32")


def _swap(request: Gathering, workers: Workers) -> Any:
    rank = workers.rank_in(request.group)
    if isinstance(request, Alltoall):
        pieces = split(request.array, request.splits)
        kept, sent = pieces[rank], pieces[1 - rank]
        expected = len(kept)
    else:
        kept = sent = request.array
        expected = len(sent) if request.lengths is None else request.lengths[1 - rank]
    other = yield from _other(sent.view(np.int32), expected, request, workers)
    received = other.view(request.array.dtype)
    return [received, kept] if rank else [kept, received]


def _other(local: np.ndarray, expected: int, request: Gathering, workers: Workers) -> Any:
    """Return the other worker's integers."""
    words = np.empty(max(len(local), expected, 1), np.int32)
    words[: len(local)] = local
    words[len(local) :] = 0
    total = yield from validated(as_sum(request, words), workers)
    # Only a transport that adds in place returns an array that may be overwritten.
    other = total if np.may_share_memory(total, words) else total.copy()
    common = min(len(local), expected)
    other[:common] -= local[:common]
    return other[:expected]
