"""How Elias codes travel: cut into streams, which follow their lengths and the norms in a worker's payload."""

from __future__ import annotations

import numpy as np

from horovod_quant.kernels.entropy import CorruptPayloadError
from horovod_quant.schemes.base import split_points

STREAM_ELEMENTS = 2**28
"""Elements of a tensor that share an Elias stream: whole tiles; `entropy` counts no more than twice as many."""


def stream_bounds(elements: int) -> list[tuple[int, int]]:
    """Which of a tensor's elements share an Elias stream."""
    starts = range(0, max(elements, 1), STREAM_ELEMENTS)
    return [(start, min(start + STREAM_ELEMENTS, elements)) for start in starts]


def open_body(body: np.ndarray, norm_count: int, streams: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Norms and code streams of one worker's Elias payload."""
    norms_end = 8 * streams + 4 * norm_count
    if len(body) < norms_end:
        raise CorruptPayloadError(f"corrupt payload: {len(body)} bytes do not hold the lengths and norms")
    lengths = body[: 8 * streams].copy().view("<i8").tolist()
    norms = body[8 * streams : norms_end].copy().view(np.float32)
    if min(lengths, default=0) < 0 or norms_end + sum(lengths) != len(body):
        raise CorruptPayloadError(f"corrupt payload: streams of {lengths} bytes in {len(body)} bytes")
    at = [norms_end + offset for offset in split_points(lengths)]
    return norms, [body[at[i] : at[i + 1]] for i in range(streams)]
