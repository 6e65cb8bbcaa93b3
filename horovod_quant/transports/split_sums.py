"""Integer sums by two alltoalls.

They are for transports whose allreduce of large arrays is slow. On Ethernet, Open MPI's default allreduce of some MB
takes 2× the time that its bytes need; its alltoall does not. Sums of integers do not depend on the order of the
summands, so the results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_quant.schemes.base import (
    Allreduce,
    Alltoall,
    Collective,
    Exchange,
    Scheme,
    check_pieces,
    map_requests,
)

INTEGERS = "int32"

# With two workers, or fewer bytes, Open MPI's allreduce is as fast as two alltoalls.
_WORKERS = 3
_GRADIENT_BYTES = 4 * 2**20


def is_faster(size: int, gradient_bytes: int) -> bool:
    """True if under MPI two alltoalls are faster than an allreduce.

    The same on all workers.

    Args:
        size: number of workers that add.
        gradient_bytes: bytes of the float32 gradients whose integers are added.
    """
    return size >= _WORKERS and gradient_bytes >= _GRADIENT_BYTES


def group_of_sums(scheme: Scheme) -> str | None:
    """Return the group of a scheme's sum of integers, or None.

    A scheme has at most one such sum.
    """
    for collective in scheme.collectives:
        if collective.request is Allreduce and collective.dtype == INTEGERS:
            return collective.group
    return None


def collectives_of_split_sums(collectives: Sequence[Collective]) -> list[Collective]:
    """Return the collectives after `split_sums`, from a scheme's collectives."""
    split: list[Collective] = []
    for each in collectives:
        is_sum = each.request is Allreduce and each.dtype == INTEGERS
        split += [each._replace(request=Alltoall, op="")] * 2 if is_sum else [each]
    return split


def split_sums(exchange: Exchange, size: int) -> Exchange:
    """Replace sums of integers by two alltoalls each.

    1. every worker receives all workers' integers of 1/n of the array, and adds them;
    2. it sends the sums to all workers.

    Args:
        exchange: the requests of a scheme, on numpy arrays.
        size: number of workers that add.
    """

    def answer(request: Any) -> Any:
        if isinstance(request, Allreduce) and request.array.dtype == INTEGERS:
            return (yield from _sum(request, size))
        return (yield request)

    return map_requests(exchange, answer)


def _sum(request: Allreduce, size: int) -> Any:
    array = request.array  # overwritten after the first alltoall, as by an allreduce in place
    shortest, longer = divmod(len(array), size)
    splits = [shortest + (worker < longer) for worker in range(size)]
    pieces = yield Alltoall(array, splits, request.parts, request.group)
    check_pieces(pieces, [splits[0] if pieces and len(pieces[0]) > shortest else shortest] * size)
    total, *others = pieces
    for other in others:
        np.add(total, other, out=total)
    # Reuse memory: the page faults of new memory cost more than the sum.
    copies = array if len(total) == shortest else np.empty(size * len(total), array.dtype)
    copies = copies[: size * len(total)]
    copies.reshape(size, -1)[:] = total
    pieces = yield Alltoall(copies, [len(total)] * size, request.parts, request.group)
    check_pieces(pieces, splits)
    return _joined(pieces)


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    """Return the pieces as one array.

    It is the array that they are views of, or a copy if they are separate.
    """
    whole = pieces[0].base
    if isinstance(whole, np.ndarray) and whole.shape == (sum(map(len, pieces)),):
        return whole
    return np.concatenate(pieces)
