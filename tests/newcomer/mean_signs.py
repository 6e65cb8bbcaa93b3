"""A scheme from outside the package, as docs/new-scheme.md describes one: with a codec of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from horovod_quant.codecs.base import Codec
from horovod_quant.kernels.arrays import no_part
from horovod_quant.kernels.buffer_view import as_array
from horovod_quant.kernels.layout import TILE, buckets, ceil_div
from horovod_quant.kernels.segments import Batch, Rounder
from horovod_quant.reductions.allgather import AllgatherReduce
from horovod_quant.schemes.base import Scheme, Workers, require_bucket_size


@dataclass(frozen=True)
class SignsAndMeans(Codec):
    """The mean magnitude of each bucket, float32, and then the sign of each element, one bit.

    Args:
        bucket_size: number of elements that share a mean.
    """

    bucket_size: int

    @property
    def align(self) -> int:
        return math.lcm(self.bucket_size, TILE)

    def words(self, elements: int) -> int:
        return buckets(elements, self.bucket_size) + ceil_div(elements, 32)

    def encode(self, kernels: Any, batch: Batch, rounder: Rounder) -> Any:
        parts: list[Any] = []
        for values, count in zip(map(as_array, batch.values), batch.elements):
            parts.append((buckets(count, self.bucket_size), np.float32, partial(self.means, kernels, values)))
            parts.append((ceil_div(count, 32), np.int32, partial(self.signs, kernels, values)))
        return kernels.pack([*parts, no_part(np.int32)])

    def means(self, kernels: Any, values: Any, out: Any) -> Any:
        """Infinite for a bucket with an element that is not finite."""
        full, rest = divmod(values.shape[0], self.bucket_size)
        sums = kernels.to_float32(kernels.bucket_magnitude_sums(values, self.bucket_size))
        means = [kernels.scale([sums[:full]], 1 / self.bucket_size, kernels.empty(full))]
        if rest:
            means.append(kernels.scale([sums[full:]], 1 / rest, kernels.empty(1)))
        return kernels.concatenate(means)

    def signs(self, kernels: Any, values: Any, out: Any) -> Any:
        return kernels.pack_flags(kernels.less(values, 0.0))

    def decode(
        self,
        kernels: Any,
        payloads: Sequence[Any],
        at: Sequence[int],
        batch: Batch,
        domain: str,
        factor: Any,
        outs: Sequence[Any],
    ) -> Sequence[Any]:
        results = []
        for count, start, chain, out in zip(batch.elements, at, batch.chains, outs):
            middle, end = start + buckets(count, self.bucket_size), start + self.words(count)
            means = [kernels.view(payload[start:middle], np.float32) for payload in payloads]
            codes = []
            for payload in payloads:
                # No kernel multiplies signs by the numbers of their buckets. But -1 and 1, rounded to the levels -1,
                # 0 and 1, stay what they are, whatever the random bits, and the decoder of such codes multiplies.
                signs = kernels.where(kernels.unpack_flags(payload[middle:end], count), -1.0, 1.0)
                ones = kernels.bucket_maxima(signs, self.bucket_size)
                codes.append(
                    kernels.encode_uniform_codes(signs, ones, self.bucket_size, 2, chain.key(domain, 0))
                )
            results.append(
                kernels.decode_uniform_codes(codes, means, self.bucket_size, 2, factor, as_array(out))
            )
        return results


@dataclass(frozen=True)
class MeanSigns(Scheme):
    """One bit an element: its sign, times the mean magnitude of its bucket.

    Args:
        bucket_size: number of elements that share a mean.

    Raises:
        ValueError: ``bucket_size`` is no multiple of 32.
    """

    bucket_size: int = 1024

    def __post_init__(self) -> None:
        require_bucket_size(self.bucket_size)

    def reduction(self, workers: Workers) -> AllgatherReduce:
        return AllgatherReduce(SignsAndMeans(self.bucket_size))

    def levels_left(self, workers: int, hosts: int) -> int:
        return 1

    def expected_nmse(self, workers: int, hosts: int) -> float:
        return (1 - 2 / math.pi) * (1 - 1 / self.bucket_size)
