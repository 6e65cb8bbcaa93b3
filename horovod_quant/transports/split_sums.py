"""A sum of integers in two steps, for transports whose allreduce of large arrays is slow.

Open MPI's default allreduce of some MB takes twice as long on Ethernet as its bytes need; its alltoall does not. Sums
of integers do not depend on the order of the summands, so the bits are the same.
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

# With two workers, and for less, Open MPI's allreduce is as fast as two alltoalls.
_WORKERS = 3
_GRADIENT_BYTES = 4 * 2**20


def is_faster(size: int, gradient_bytes: int) -> bool:
    """Whether under MPI two alltoalls are faster than an allreduce; the same on all workers.

    Args:
        size: number of workers that add.
        gradient_bytes: of the float32 gradients whose integers are added.
    """
    return size >= _WORKERS and gradient_bytes >= _GRADIENT_BYTES


def group_of_sums(scheme: Scheme) -> str | None:
    """The group that an exchange asks for a sum of integers; it asks for one sum at most."""
    for collective in scheme.collectives:
        if collective.request is Allreduce and collective.dtype == INTEGERS:
            return collective.group
    return None


def collectives_of_split_sums(collectives: Sequence[Collective]) -> list[Collective]:
    """Those of `split_sums`, from an exchange's own."""
    split: list[Collective] = []
    for each in collectives:
        is_sum = each.request is Allreduce and each.dtype == INTEGERS
        split += [each._replace(request=Alltoall, op="")] * 2 if is_sum else [each]
    return split


def split_sums(exchange: Exchange, size: int) -> Exchange:
    """An exchange whose sums of integers are done by two alltoalls, hence with one collective more.

    1. every worker gets everybody's integers of 1/n of the array, and adds them;
    2. it sends the sums to everybody.

    Args:
        exchange: of a scheme, on numpy arrays.
        size: number of workers that add.
    """

    def answer(request: Any) -> Any:
        if isinstance(request, Allreduce) and request.array.dtype == INTEGERS:
            return (yield from _sum(request, size))
        return (yield request)

    return map_requests(exchange, answer)


def _sum(request: Allreduce, size: int) -> Any:
    array = request.array  # spent after the first alltoall, as an allreduce in place would spend it
    shortest, longer = divmod(len(array), size)
    splits = [shortest + (worker < longer) for worker in range(size)]
    pieces = yield Alltoall(array, splits, request.parts, request.group)
    check_pieces(pieces, [splits[0] if pieces and len(pieces[0]) > shortest else shortest] * size)
    own, *others = pieces
    for other in others:
        np.add(own, other, out=own)
    # Memory that is there already: pages of new memory cost more than the sum.
    copies = array if len(own) == shortest else np.empty(size * len(own), array.dtype)
    copies = copies[: size * len(own)]
    copies.reshape(size, -1)[:] = own
    pieces = yield Alltoall(copies, [len(own)] * size, request.parts, request.group)
    check_pieces(pieces, splits)
    return _joined(pieces)


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    """The array that consecutive pieces are cut from; or a copy, where they come one by one."""
    whole = pieces[0].base
    if isinstance(whole, np.ndarray) and whole.shape == (sum(map(len, pieces)),):
        return whole
    return np.concatenate(pieces)
