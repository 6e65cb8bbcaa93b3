"""Reduction of exponential levels on a scale of all workers.

Sums are rounded again.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from horovod_quant.codecs.base import REDUCER
from horovod_quant.kernels.arrays import Part, no_part, whole_tiles
from horovod_quant.kernels.buffer_view import as_array
from horovod_quant.kernels.formats import norm_offsets
from horovod_quant.kernels.layout import TILE, buckets, split, split_points, tiles
from horovod_quant.kernels.reference import per_element, store_float32
from horovod_quant.kernels.segments import Batch, Rounder, Segment
from horovod_quant.reductions.base import whole_batch, worker_rounder
from horovod_quant.reductions.integer_allreduce import bytes_between, collective_of_norms, shared_norms
from horovod_quant.reductions.requests import (
    Allgather,
    Alltoall,
    Collective,
    CustomAllreduce,
    Workers,
    validated,
)
from horovod_quant.reductions.shards import shards_of
from horovod_quant.reductions.tensors import Decoded, Exchange, Gradient, TensorInfo


@dataclass(frozen=True)
class ExponentialReduction:
    """Exponential reduction: allreduce the norms, encode, reduce, decode.

    It reduces by an alltoall, an average that the reducer of each shard rounds again, and an allgather; or, on a
    transport with custom reductions (MPI), by one that rounds the sum of each pair again.

    Args:
        bits: width of a code.
        norm: ``"max"`` or ``"l2"``, over all workers.
        bucket_size: number of elements that share a norm.
        correlated: true if the workers round with correlated random bits.
    """

    bits: int
    norm: str
    bucket_size: int
    correlated: bool = False

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return (collective_of_norms(self.norm), Collective(Alltoall, "int32"), Collective(Allgather, "int32"))

    def run(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        batch = whole_batch(gradients)
        norms = yield from shared_norms(batch, self.norm, self.bucket_size, workers, kernels)
        if workers.custom_reduction:
            return (yield from self._pairwise(batch, norms, workers, kernels))
        shards = shards_of(batch.elements, workers.size, TILE)
        tile_counts = [sum(tiles(segment.elements) for segment in segments) for segments in shards.of]
        splits = list(map(self._words, tile_counts))
        sizes = [4 * self._words(tiles(count)) for count in batch.elements]
        received = yield from validated(
            Alltoall(self._encoded(batch, norms, workers, kernels), splits, sizes), workers
        )
        request = Allgather(
            self._reduced(shards.of[workers.rank], batch, received, workers, kernels),
            [size / workers.size for size in sizes],
            splits,
        )
        del received  # before the gathered shards arrive
        gathered = kernels.concatenate((yield from validated(request, workers)))
        return self.decode_received([norms, gathered], [each.info for each in gradients], workers, kernels)

    def received_lengths(self, elements: Sequence[int], workers: Workers) -> Sequence[tuple[int, Any]]:
        """Return the lengths of the norms and of the reducers' codes."""
        norms = norm_offsets(tuple(elements), self.bucket_size)[-1]
        return [(norms, np.float32), (self._words(sum(map(tiles, elements))), np.int32)]

    def decode_received(
        self, received: Sequence[Any], tensors: Sequence[TensorInfo], workers: Workers, kernels: Any
    ) -> Decoded:
        norms, words = received
        elements = tuple([tensor.elements for tensor in tensors])
        norm_at = norm_offsets(elements, self.bucket_size)
        code_at = split_points([self._words(tiles(count)) for count in elements])

        def write(i: int, factor: Any, out: Any) -> Any:
            local, scales = words[code_at[i] : code_at[i + 1]], norms[norm_at[i] : norm_at[i + 1]]
            total = factor * workers.size
            return kernels.decode_exponential([local], [scales], self.bucket_size, self.bits, total, out)

        return Decoded(workers.size, write, received=received)

    def _words(self, tile_count: int) -> int:
        return tile_count * 32 * self.bits

    def _encoded(self, batch: Batch, norms: Any, workers: Workers, kernels: Any) -> Any:
        rounder = worker_rounder("worker", workers, self.correlated)
        norm_at = norm_offsets(batch.elements, self.bucket_size)

        def encode(i: int, out: Any) -> Any:
            key, scale = rounder.key(batch.chains[i], batch.steps[i]), norms[norm_at[i] : norm_at[i + 1]]
            values = as_array(batch.values[i])
            return kernels.encode_exponential(
                values, scale, self.bucket_size, self.bits, key, batch.starts[i], out
            )

        parts: list[Part] = []
        for i, count in enumerate(batch.elements):
            parts += whole_tiles(count, self.bits, partial(encode, i))
        return kernels.pack([*parts, no_part(np.int32)])

    def _reduced(
        self, shard: Sequence[Segment], batch: Batch, received: Sequence[Any], workers: Workers, kernels: Any
    ) -> Any:
        """Return the codes of the workers' averages, for this rank's shard."""

        def average(at: int, piece: Segment, out: Any) -> Any:
            count = tiles(piece.elements)
            codes = [words[at : at + self._words(count)] for words in received]
            units = [np.ones(count, np.float32)] * workers.size
            total = kernels.empty(piece.elements)
            total = kernels.decode_exponential(codes, units, TILE, self.bits, 1.0, total)
            key = Rounder(REDUCER).key(batch.chains[piece.tensor], batch.steps[piece.tensor])
            size = np.full(count, workers.size, np.float32)
            start = batch.starts[piece.tensor] + piece.start
            return kernels.encode_exponential(total, size, TILE, self.bits, key, start, out)

        parts: list[Part] = []
        at, most = 0, kernels.TILES_AT_A_TIME * TILE
        for segment in shard:
            for start in range(segment.start, segment.stop, most):
                piece = Segment(segment.tensor, start, min(segment.stop, start + most))
                parts += whole_tiles(piece.elements, self.bits, partial(average, at, piece))
                at += self._words(tiles(piece.elements))
        return kernels.pack([*parts, no_part(np.int32)])

    def _pairwise(
        self, batch: Batch, norms: Any, workers: Workers, kernels: Any
    ) -> Generator[Any, Any, Decoded]:
        """Reduce pair by pair with the transport's custom reduction.

        n - 1 additions can raise the largest level by n - 1; the indices travel as int8 or int16, which has room.
        """
        highest = (1 << (self.bits - 1)) - 1 + workers.size - 1
        if highest > 32767:
            raise ValueError(f"{workers.size} workers are too many to reduce exponential levels pairwise")
        dtype = np.int8 if highest <= 127 else np.int16
        count, at = len(batch.elements), tuple(split_points(batch.elements))
        local_norms = split(norms, [buckets(elements, self.bucket_size) for elements in batch.elements])
        rounder = worker_rounder("worker", workers, self.correlated)
        digits = np.empty(at[-1], dtype)
        for i in range(count):
            digits[at[i] : at[i + 1]] = kernels.round_exponential(
                as_array(batch.values[i]),
                local_norms[i],
                self.bucket_size,
                self.bits,
                rounder.key(batch.chains[i], batch.steps[i]),
            )

        def combine(left: np.ndarray, right: np.ndarray, low: int, high: int) -> np.ndarray:
            result = np.empty_like(left)
            for i in range(count):
                local = slice(at[i], at[i + 1])
                key = batch.chains[i].key(f"reduction {low}", batch.steps[i], high)
                left_digits, right_digits = left[local].astype(np.int32), right[local].astype(np.int32)
                result[local] = kernels.add_exponential(left_digits, right_digits, key)
            return result

        request = CustomAllreduce(digits, combine, bytes_between(at, digits.itemsize))
        total = yield from validated(request, workers)

        def write(i: int, factor: Any, out: np.ndarray) -> np.ndarray:
            values = kernels.exponential_values(total[at[i] : at[i + 1]].astype(np.int32), self.bits)
            scales = kernels.decoding_scales(local_norms[i], 1, factor)
            return store_float32(values * per_element(scales, self.bucket_size, len(out)), out)

        return Decoded(workers.size, write)
