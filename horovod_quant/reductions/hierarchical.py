"""Nested reductions: intra-node averages, and any inter-node reduction."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from horovod_quant.codecs.base import Codec
from horovod_quant.codecs.floats import Floats
from horovod_quant.kernels.arrays import Part, no_part
from horovod_quant.kernels.entropy import CorruptPayloadError
from horovod_quant.kernels.layout import split
from horovod_quant.kernels.segments import Rounder, Source, segment_kernels
from horovod_quant.reductions.base import Reduction, segments_batch
from horovod_quant.reductions.requests import (
    CROSS,
    LOCAL,
    Allgather,
    Allreduce,
    Alltoall,
    Collective,
    Request,
    Workers,
    map_requests,
    ragged_payload,
    split_ragged,
    validated,
)
from horovod_quant.reductions.shards import Division, ranges_of
from horovod_quant.reductions.tensors import Decoded, Exchange, Gradient, TensorInfo

FLOAT32, WORDS, BYTES = "float32", "int32", "uint8"
"""Dtypes of the last intra-node allgather: averages, or arrays received from other nodes, of known lengths or not."""

_LARGE = 2**20
"""Elements of the tensor that decides the last allgather for all tensors."""


@dataclass(frozen=True)
class HierarchicalReduction:
    """Hierarchical reduction: averages intra-node, and runs ``inter`` inter-node.

    1. Encode. 2. Intra-node alltoall. 3. Average. 4. ``inter``. 5. Intra-node allgather. 6. Decode.
    Each worker of a node reduces a range of the elements of each tensor: it averages the values of its node, and runs
    ``inter`` on the averages with the workers of other nodes that reduce the same ranges.

    Args:
        intra: codec of step 2. Rounding is correlated among the workers of a node.
        inter: the inter-node reduction.
        unit: ranges begin at multiples of this number of elements.
    """

    intra: Codec
    inter: Reduction
    unit: int

    def returned(self, workers: Workers) -> str:
        """Return the dtype of step 5.

        It is that of averages, float32, unless received arrays are shorter and decodable.
        """
        lengths = self.inter.received_lengths([_LARGE], between(workers))
        if lengths is None or sum(n * np.dtype(dtype).itemsize for n, dtype in lengths) >= 4 * _LARGE:
            return FLOAT32
        return BYTES if any(np.dtype(dtype) == BYTES for _, dtype in lengths) else WORDS

    def collectives_of(self, workers: Workers) -> tuple[Collective, ...]:
        among_nodes = self.inter.collectives if workers.nodes > 1 else ()
        inter = [collective._replace(group=CROSS) for collective in among_nodes]
        last = Collective(Allgather, self.returned(workers), group=LOCAL)
        return (Collective(Alltoall, self.intra.dtype, group=LOCAL), *inter, last)

    def run(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        ranges = ranges_of(
            tuple([gradient.keys.name for gradient in gradients]),
            tuple([gradient.elements for gradient in gradients]),
            workers.local_size,
            self.unit,
        )
        rounder = Rounder(f"inside {workers.node}", workers.local_rank, workers.local_size)
        pieces = yield from validated(
            ranges.alltoall(self.intra, gradients, rounder, kernels, LOCAL), workers
        )
        averages = self._averaged(gradients, ranges, pieces, workers, kernels)
        answer = _between_nodes if workers.nodes > 1 else _sent_back
        found = yield from map_requests(self.inter.run(averages, between(workers), kernels), answer)
        if self.returned(workers) == FLOAT32:
            return (yield from self._gather_averages(found, ranges, workers, kernels))
        infos = [each.info for each in gradients]
        return (yield from self._gather_received(found, infos, ranges, workers, kernels))

    def _averaged(
        self,
        gradients: Sequence[Gradient],
        ranges: Division,
        pieces: Sequence[Any],
        workers: Workers,
        kernels: Any,
    ) -> list[Gradient]:
        """Return the node's averages of the elements that this worker reduces."""
        local = ranges.of[workers.local_rank]
        batch = segments_batch(gradients, local, with_values=False)
        averages = self.intra.averages(kernels, pieces, self.intra.offsets(batch.elements), batch)
        return [
            gradient.replaced(average, segment.start)
            for gradient, average, segment in zip(gradients, averages, local)
        ]

    def _gather_averages(
        self, found: Decoded, ranges: Division, workers: Workers, kernels: Any
    ) -> Generator[Request, Any, Decoded]:
        tensors = range(ranges.tensors)
        floats = Floats(FLOAT32)
        averages = segment_kernels(kernels).pack(
            [segment.elements for segment in ranges.of[workers.local_rank]],
            lambda outs: found.decode(tensors, 1.0 / workers.nodes, outs),
        )
        sizes = [4.0 * count / workers.local_size for count in ranges.lengths_by_tensor(floats)]
        gathered = yield from validated(
            Allgather(averages, sizes, ranges.lengths(floats), group=LOCAL), workers
        )

        def decode(tensors: Sequence[int], factor: Any, outs: Sequence[Any]) -> Sequence[Any]:
            def decode_part(source: Source, parts: Sequence[Any]) -> Sequence[Any]:
                return segment_kernels(kernels).scale(source[0], factor * workers.size, parts)

            sources = []
            for owner, at, segments in ranges.parts_of(floats, tensors):
                pieces = [gathered[owner][i : i + each.elements] for i, each in zip(at, segments)]
                sources.append((pieces, at, segments))
            return segment_kernels(kernels).decode_sources(outs, sources, decode_part)

        return Decoded(workers.size, exchanged_again=found.exchanged_again, decode=decode)

    def _gather_received(
        self, found: Decoded, infos: Sequence[TensorInfo], ranges: Division, workers: Workers, kernels: Any
    ) -> Generator[Request, Any, Decoded]:
        """Gather the arrays received from other nodes."""
        inter_workers = between(workers)
        layouts = [
            self.inter.received_lengths([segment.elements for segment in segments], inter_workers) or ()
            for segments in ranges.of
        ]
        is_ragged = self.returned(workers) == BYTES
        received = self._received(found, layouts[workers.local_rank], is_ragged)
        if is_ragged:
            payload = ragged_payload(*map(ragged_payload, received))
            sizes = ranges.shares([len(payload)], [workers.local_rank])
            bodies = yield from validated(Allgather(payload, sizes, ragged=True, group=LOCAL), workers)
            pieces = [_split_body(body, len(layout)) for body, layout in zip(bodies, layouts)]
        else:
            filled: list[Part] = [
                (length, dtype, partial(_as_it_is, array))
                for array, (length, dtype) in zip(received, layouts[workers.local_rank])
            ]
            words = kernels.pack([*filled, no_part(np.int32)])
            lengths = [sum(length for length, _ in layout) for layout in layouts]
            shares = ranges.shares([4 * length for length in lengths], range(workers.local_size))
            sizes = [size / workers.local_size for size in shares]
            arrays = yield from validated(Allgather(words, sizes, lengths, group=LOCAL), workers)
            pieces = [_split_words(array, layout, kernels) for array, layout in zip(arrays, layouts)]
        owners = []
        for piece, segments in zip(pieces, ranges.of):
            owned = [TensorInfo(info.keys, each.elements, each.start) for info, each in zip(infos, segments)]
            owners.append(self.inter.decode_received(piece, owned, inter_workers, kernels))

        def decode(tensors: Sequence[int], factor: Any, outs: Sequence[Any]) -> Sequence[Any]:
            def decode_part(source: Source, parts: Sequence[Any]) -> Sequence[Any]:
                owner, indices, _ = source
                return owner.decode(indices, factor * workers.local_size, parts)

            sources = [
                (owners[rank], [tensors[i] for i, _, _ in segments], segments)
                for rank, _, segments in ranges.parts_of(self.intra, tensors)
            ]
            return segment_kernels(kernels).decode_sources(outs, sources, decode_part)

        return Decoded(workers.size, exchanged_again=found.exchanged_again, decode=decode)

    def _received(self, found: Decoded, layout: Sequence[tuple[int, Any]], is_ragged: bool) -> Sequence[Any]:
        """Return the arrays that this worker has received from other nodes.

        Raises:
            TypeError: their number or lengths differ from ``inter.received_lengths``.
        """
        promised = "one array" if len(layout) == 1 else f"{len(layout)} arrays"
        if found.received is None or len(found.received) != len(layout):
            raise TypeError(
                f"{self.inter}: received_lengths promises {promised}, and begin has returned "
                f"{'none' if found.received is None else len(found.received)}; use received= of Decoded"
            )
        lengths = [array.shape[0] for array in found.received]
        if not is_ragged and lengths != [length for length, _ in layout]:
            raise TypeError(
                f"{self.inter}: received_lengths promises arrays of {[length for length, _ in layout]} elements, and "
                f"begin has returned {lengths}"
            )
        return found.received


def _as_it_is(array: Any, out: Any) -> Any:
    return array


def _split_words(array: Any, layout: Sequence[tuple[int, Any]], kernels: Any) -> list[Any]:
    """Split words into the consecutive arrays."""
    pieces = split(array, [length for length, _ in layout])
    return [
        kernels.view(piece, dtype) if np.dtype(dtype) != WORDS else piece
        for piece, (_, dtype) in zip(pieces, layout)
    ]


def _split_body(body: np.ndarray, count: int) -> list[np.ndarray]:
    pieces = split_ragged(body)
    if len(pieces) != count:
        raise CorruptPayloadError(f"corrupt payload: {len(pieces)} arrays in it where {count} were expected")
    return pieces


def between(workers: Workers) -> Workers:
    """Return the workers that reduce the same ranges, one per node.

    Without custom reductions.
    """
    return Workers(workers.node, workers.nodes)


def _between_nodes(request: Any) -> Any:
    """Return the request for the group CROSS."""
    return (yield request._replace(group=CROSS))


def _sent_back(request: Any) -> Any:
    """Return the collective's result for a single node."""
    yield from ()
    return request.array if isinstance(request, Allreduce) else [request.array]
