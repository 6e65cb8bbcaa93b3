"""Gathers and alltoalls as sums of integers, for transports on which some workers only add zeros to sums.

That is what Horovod lets a worker do that has called ``hvd.join()``; its allgathers and alltoalls need everybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_quant.kernels.layout import ceil_div
from horovod_quant.schemes.base import (
    Allgather,
    Allreduce,
    Alltoall,
    Exchange,
    Scheme,
    Workers,
    map_requests,
    split_points,
    split_ragged,
    validated,
)


def collectives_of_emulation(scheme: Scheme) -> int:
    """Number of collectives of `emulate_with_allreduce`: gathered bytes of unknown lengths take two."""
    return len(scheme.collectives) + sum(c.dtype == "uint8" for c in scheme.collectives)


def emulate_with_allreduce(exchange: Exchange, workers: Workers) -> Exchange:
    """An exchange that asks for allreduces alone, with the same bits.

    Every worker fills its own place of an array with places for all, which makes it ``workers.size`` times as large.

    Args:
        exchange: of a scheme without groups, on numpy arrays, that asks for no reduction of its own.
        workers: those that take part.
    """

    def answer(request: Any) -> Any:
        if isinstance(request, Allgather) and request.ragged:
            return split_ragged(np.concatenate((yield from _gather_bytes(request, workers))))
        if isinstance(request, Allgather):
            lengths = request.lengths or [len(request.array)] * workers.size
            return (yield from _gather(request.array, lengths, request.parts, workers))
        if isinstance(request, Alltoall):
            at = split_points(request.splits)
            own = slice(at[workers.rank], at[workers.rank + 1])
            lengths = [len(request.array)] * workers.size
            everything = yield from _gather(request.array, lengths, request.parts, workers)
            return [array[own] for array in everything]
        return (yield request)

    return map_requests(exchange, answer)


def _gather(array: np.ndarray, lengths: Sequence[int], parts: Sequence[float], workers: Workers) -> Any:
    """Everybody's array of integers; all know the lengths."""
    at = split_points(lengths)
    places = np.zeros(at[-1], array.dtype)
    places[at[workers.rank] : at[workers.rank + 1]] = array
    places = yield from validated(Allreduce(places, "sum", [workers.size * part for part in parts]), workers)
    return [places[at[i] : at[i + 1]] for i in range(workers.size)]


def _gather_bytes(request: Allgather, workers: Workers) -> Any:
    """Everybody's bytes: first their numbers, then themselves in whole int32 words."""
    own = np.array([len(request.array)], np.int64)
    counts = yield from _gather(own, [1] * workers.size, [0.0] * len(request.parts), workers)
    lengths = [int(count[0]) for count in counts]
    words = np.zeros(ceil_div(len(request.array), 4), np.int32)
    words.view(np.uint8)[: len(request.array)] = request.array
    padded = [ceil_div(length, 4) for length in lengths]
    everything = yield from _gather(words, padded, request.parts, workers)
    return [array.view(np.uint8)[:length] for array, length in zip(everything, lengths)]
