"""Integer allreduce: one scale for all workers, and one sum."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from horovod_quant.codecs.shared_scale import SharedScaleSums
from horovod_quant.kernels.formats import Sums, norm_offsets
from horovod_quant.kernels.segments import Batch, segment_kernels
from horovod_quant.reductions.base import whole_batch, worker_rounder
from horovod_quant.reductions.requests import Allreduce, Collective, Request, Workers, validated
from horovod_quant.reductions.tensors import Decoded, Exchange, Gradient, TensorInfo


@dataclass(frozen=True)
class IntegerAllreduce:
    """Integer allreduce: allreduce the norms, encode, allreduce the integers, decode.

    Args:
        codec: codec of the integers.
        correlated: true if the workers round with correlated random bits.
    """

    codec: SharedScaleSums
    correlated: bool = False

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return (collective_of_norms(self.codec.norm), Collective(Allreduce, "int32", "sum"))

    def run(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        batch = whole_batch(gradients)
        norms = yield from shared_norms(batch, self.codec.norm, self.codec.bucket_size, workers, kernels)
        _, word_at = self.codec.offsets(batch.elements)
        rounder = worker_rounder(self.codec.domain, workers, self.correlated)
        words = self.codec.encode(kernels, batch, rounder, norms)
        words = yield from validated(Allreduce(words, "sum", bytes_between(word_at, 4)), workers)
        return self._decoded(Sums(words, norms, batch.elements, batch.table), kernels)

    def received_lengths(self, elements: Sequence[int], workers: Workers) -> Sequence[tuple[int, Any]]:
        """Return the lengths of norms, and of sums with the worker count."""
        norm_at, word_at = self.codec.offsets(tuple(elements))
        return [(norm_at[-1], np.float32), (word_at[-1] + 1, np.int32)]

    def decode_received(
        self, received: Sequence[Any], tensors: Sequence[TensorInfo], workers: Workers, kernels: Any
    ) -> Decoded:
        norms, words = received
        return self._decoded(Sums(words, norms, tuple([each.elements for each in tensors])), kernels)

    def _decoded(self, sums: Sums, kernels: Any) -> Decoded:
        def decode(tensors: Sequence[int], factor: Any, outs: Sequence[Any]) -> Sequence[Any]:
            return self.codec.decode(kernels, sums, tensors, factor, outs)

        return Decoded(sums.words[-1], decode=decode, received=[sums.norms, sums.words])


def collective_of_norms(norm: str) -> Collective:
    """Return the collective of `shared_norms`."""
    return (
        Collective(Allreduce, "float32", "max") if norm == "max" else Collective(Allreduce, "float64", "sum")
    )


def shared_norms(
    batch: Batch, norm: str, bucket_size: int, workers: Workers, kernels: Any
) -> Generator[Request, Any, Any]:
    """Return the norms of all buckets over all workers, float32."""
    at = norm_offsets(batch.elements, bucket_size)
    local = segment_kernels(kernels).norms(norm, bucket_size, batch)
    if norm == "max":
        return (yield from validated(Allreduce(local, "max", bytes_between(at, 4)), workers))
    sums = yield from validated(Allreduce(local, "sum", bytes_between(at, 8)), workers)
    return kernels.norms_of_square_sums(sums)


@lru_cache(maxsize=256)
def bytes_between(offsets: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    return tuple(item_bytes * (stop - start) for start, stop in zip(offsets, offsets[1:]))
