"""Allgathers and alltoalls as sums of integers.

They are for transports on which some workers only add zeros to sums. In Horovod, workers that have called
``hvd.join()`` do so; allgathers and alltoalls need all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_quant.kernels.layout import ceil_div, split
from horovod_quant.schemes.base import (
    Allgather,
    Allreduce,
    Alltoall,
    Exchange,
    Scheme,
    Workers,
    map_requests,
    split_ragged,
    validated,
)


def collectives_of_emulation(scheme: Scheme) -> int:
    """Return the number of collectives of `emulate_with_allreduce`.

    Bytes of unknown lengths need two.
    """
    return len(scheme.collectives) + sum(c.dtype == "uint8" for c in scheme.collectives)


def emulate_with_allreduce(exchange: Exchange, workers: Workers) -> Exchange:
    """Replace a scheme's requests by allreduces, with bit-identical results.

    Every worker fills its slot of an array with one slot per worker, which makes the array ``workers.size``× larger.

    Args:
        exchange: the requests of a scheme without groups and custom reductions, on numpy arrays.
        workers: the participating workers.
    """

    def answer(request: Any) -> Any:
        if isinstance(request, Allgather) and request.ragged:
            return split_ragged(np.concatenate((yield from _gather_bytes(request, workers))))
        if isinstance(request, Allgather):
            lengths = request.lengths or [len(request.array)] * workers.size
            return (yield from _gather(request.array, lengths, request.parts, workers))
        if isinstance(request, Alltoall):
            lengths = [len(request.array)] * workers.size
            arrays = yield from _gather(request.array, lengths, request.parts, workers)
            return [split(array, request.splits)[workers.rank] for array in arrays]
        return (yield request)

    return map_requests(exchange, answer)


def _gather(array: np.ndarray, lengths: Sequence[int], parts: Sequence[float], workers: Workers) -> Any:
    """Return all workers' arrays of integers, whose lengths every worker knows."""
    slots = np.zeros(sum(lengths), array.dtype)
    split(slots, lengths)[workers.rank][:] = array
    slots = yield from validated(Allreduce(slots, "sum", [workers.size * part for part in parts]), workers)
    return split(slots, lengths)


def _gather_bytes(request: Allgather, workers: Workers) -> Any:
    """Gather all workers' bytes.

    First their numbers, then the bytes in int32 words.
    """
    local = np.array([len(request.array)], np.int64)
    counts = yield from _gather(local, [1] * workers.size, [0.0] * len(request.parts), workers)
    lengths = [int(count[0]) for count in counts]
    words = np.zeros(ceil_div(len(request.array), 4), np.int32)
    words.view(np.uint8)[: len(request.array)] = request.array
    padded = [ceil_div(length, 4) for length in lengths]
    arrays = yield from _gather(words, padded, request.parts, workers)
    return [array.view(np.uint8)[:length] for array, length in zip(arrays, lengths)]
