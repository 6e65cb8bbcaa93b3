"""Scatter-reduce-allgather: each rank reduces a shard, and all ranks gather the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np

from horovod_quant.codecs.base import REDUCER, Codec
from horovod_quant.kernels.segments import Source, segment_kernels
from horovod_quant.reductions.base import received_batch, segments_batch, worker_rounder
from horovod_quant.reductions.requests import Allgather, Alltoall, Collective, Workers, validated
from horovod_quant.reductions.shards import Division, shards_of
from horovod_quant.reductions.tensors import Decoded, Exchange, Gradient, TensorInfo


@dataclass(frozen=True)
class ScatterReduceAllgather:
    """Scatter-reduce-allgather: reducers decode, average and encode the shards.

    1. Encode. 2. Alltoall. 3. The reducer of a shard decodes, averages and encodes. 4. Allgather. 5. Decode.
    The second rounding adds an nmse that does not shrink with the number of workers.

    Args:
        scatter: codec of the payloads for the reducers.
        gather: codec of the reducers' payloads.
        correlated: true if the workers round with correlated random bits.
    """

    scatter: Codec
    gather: Codec
    correlated: bool = False

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return (Collective(Alltoall, "int32"), Collective(Allgather, "int32"))

    def _shards(self, elements: Sequence[int], workers: Workers) -> Division:
        return shards_of(tuple(elements), workers.size, lcm(self.scatter.align, self.gather.align))

    def run(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        shards = self._shards([gradient.elements for gradient in gradients], workers)
        rounder = worker_rounder(self.scatter.domain, workers, self.correlated)
        received = yield from validated(shards.alltoall(self.scatter, gradients, rounder, kernels), workers)
        request = self._to_workers(gradients, shards, received, workers, kernels)
        gathered = yield from validated(request, workers)
        return self.decode_received(gathered, [each.info for each in gradients], workers, kernels)

    def _to_workers(
        self,
        gradients: Sequence[Gradient],
        shards: Division,
        received: Sequence[Any],
        workers: Workers,
        kernels: Any,
    ) -> Allgather:
        batch = segments_batch(gradients, shards.of[workers.rank], with_values=False)
        at = self.scatter.offsets(batch.elements)
        payload = self.scatter.reduce(kernels, received, at, batch, self.gather)
        sizes = [4 * length / workers.size for length in shards.lengths_by_tensor(self.gather)]
        return Allgather(payload, sizes, shards.lengths(self.gather))

    def received_lengths(self, elements: Sequence[int], workers: Workers) -> Sequence[tuple[int, Any]]:
        shards = self._shards(elements, workers)
        return [(length, np.int32) for length in shards.lengths(self.gather)]

    def decode_received(
        self, received: Sequence[Any], tensors: Sequence[TensorInfo], workers: Workers, kernels: Any
    ) -> Decoded:
        shards = self._shards([tensor.elements for tensor in tensors], workers)

        def decode(indices: Sequence[int], factor: Any, outs: Sequence[Any]) -> Sequence[Any]:
            of_codes = factor if self.gather.of_sums else factor * workers.size

            def decode_shard(source: Source, parts: Sequence[Any]) -> Sequence[Any]:
                payloads, at, segments = source
                batch = received_batch([tensors[i] for i in indices], segments)
                return self.gather.decode(kernels, payloads, at, batch, REDUCER, of_codes, parts)

            sources = [
                ([received[part.rank]], part.at, part.segments)
                for part in shards.parts_of(self.gather, indices)
            ]
            return segment_kernels(kernels).decode_sources(outs, sources, decode_shard)

        return Decoded(workers.size, decode=decode, received=received)
