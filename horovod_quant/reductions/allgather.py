"""Allgather-reduce: every worker gets all payloads, and decodes and adds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_quant.codecs.base import Codec
from horovod_quant.codecs.elias import Body, EliasCodes
from horovod_quant.kernels.segments import Segment
from horovod_quant.reductions.base import received_batch, whole_batch, worker_rounder
from horovod_quant.reductions.requests import Allgather, Collective, Workers, ragged_payload, validated
from horovod_quant.reductions.tensors import Decoded, Exchange, Gradient, TensorInfo


@dataclass(frozen=True)
class AllgatherReduce:
    """Allgather-reduce: encode, allgather, decode all payloads and add in rank order.

    Args:
        codec: codec of the payloads.
        correlated: true if the workers round with correlated random bits.
    """

    codec: Codec
    correlated: bool = False

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return (Collective(Allgather, "int32"),)

    def run(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        elements = tuple([gradient.elements for gradient in gradients])
        rounder = worker_rounder(self.codec.domain, workers, self.correlated)
        payload = self.codec.encode(kernels, whole_batch(gradients), rounder)
        at = self.codec.offsets(elements)
        sizes = [4 * (stop - start) for start, stop in zip(at, at[1:])]
        # The length of an empty array does not tell the number of workers.
        lengths = None if at[-1] else [0] * workers.size
        payloads = yield from validated(Allgather(payload, sizes, lengths), workers)
        return self.decode_received(payloads, [each.info for each in gradients], workers, kernels)

    def received_lengths(self, elements: Sequence[int], workers: Workers) -> Sequence[tuple[int, Any]]:
        return [(self.codec.offsets(tuple(elements))[-1], np.int32)] * workers.size

    def decode_received(
        self, received: Sequence[Any], tensors: Sequence[TensorInfo], workers: Workers, kernels: Any
    ) -> Decoded:
        at = self.codec.offsets(tuple([tensor.elements for tensor in tensors]))

        def decode(indices: Sequence[int], factor: Any, outs: Sequence[Any]) -> Sequence[Any]:
            batch = received_batch(tensors, [Segment(i, 0, tensors[i].elements) for i in indices])
            starts = [at[i] for i in indices]
            return self.codec.decode(kernels, received, starts, batch, self.codec.domain, factor, outs)

        return Decoded(len(received), decode=decode, received=received)


@dataclass(frozen=True)
class RaggedAllgatherReduce:
    """`AllgatherReduce` with payloads whose lengths depend on the values.

    Args:
        codec: codec of the payloads.
        correlated: true if the workers round with correlated random bits.
    """

    codec: EliasCodes
    correlated: bool = False

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return (Collective(Allgather, "uint8"),)

    def run(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        bodies = yield from validated(self._request(gradients, workers, kernels), workers)
        return self.decode_received(bodies, [each.info for each in gradients], workers, kernels)

    def _request(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Allgather:
        rounder = worker_rounder(self.codec.domain, workers, self.correlated)
        parts, sizes = self.codec.encode(kernels, whole_batch(gradients), rounder)
        return Allgather(ragged_payload(*parts), sizes, ragged=True)

    def received_lengths(self, elements: Sequence[int], workers: Workers) -> Sequence[tuple[int, Any]]:
        return [(self.codec.most_bytes(elements), np.uint8)] * workers.size

    def decode_received(
        self, received: Sequence[Any], tensors: Sequence[TensorInfo], workers: Workers, kernels: Any
    ) -> Decoded:
        elements = [tensor.elements for tensor in tensors]
        bodies = [Body(body, self.codec, elements) for body in received]

        def write(i: int, factor: Any, out: Any) -> Any:
            return self.codec.decode(kernels, bodies, i, factor, out)

        return Decoded(len(bodies), write, received=received)
