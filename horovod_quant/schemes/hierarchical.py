"""The hierarchical exchange: gradients are averaged inside a node, and another scheme runs between the nodes.

Peng et al., BinSGDM (ICLR 2023 submission; Birder, NeurIPS 2023), for their 1-bit allreduce; here for every scheme. A
node is a host, or any group of workers with a fast connection between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import hypot, lcm
from typing import Any, NamedTuple

import numpy as np

from horovod_quant.kernels.arrays import no_part
from horovod_quant.kernels.entropy import CorruptPayloadError
from horovod_quant.kernels.layout import TILE
from horovod_quant.reductions.shards import owned_range
from horovod_quant.schemes.base import (
    CROSS,
    LOCAL,
    Allgather,
    Allreduce,
    Alltoall,
    Collective,
    Decoded,
    Exchange,
    Extent,
    Gradient,
    Scheme,
    Workers,
    answered,
    checked,
    ragged_payload,
    require_whole_nodes,
    split_points,
    split_ragged,
)
from horovod_quant.schemes.inside import (
    FLOAT32,
    Inside,
    error_inside,
    length_to_send,
    mean_of_sent,
    parts_to_send,
    require_inside,
    sent_type,
)

_WORDS, _BYTES = "int32", "uint8"
"""Types of what was received between the nodes and travels inside one: of lengths that are known, or not. Averages
are `FLOAT32`.
"""

_LARGE = 2**20
"""Elements of a tensor by which it is decided what travels: all tensors' exchanges must have the same collectives."""


@dataclass(frozen=True)
class Hierarchical(Scheme):
    """``inner`` between nodes; each node takes part as one worker that has the mean of its workers' gradients.

    1. An alltoall inside the node sends each worker all values of the elements that it owns, in float32, in float16, or
       as QSGDinf's codes of 8 bits in buckets of 256, with joint rounding among the node's workers.
    2. The worker averages them, in the order of the node's workers.
    3. The workers that own the same elements, one per node, run ``inner`` on them.
    4. An allgather inside the node distributes what they have received between the nodes, and everybody decodes it all.
       The averages travel instead, in float32, where they have no more bytes, or ``inner`` cannot decode elsewhere.

    With one worker per node the exchange is that of ``inner``, bit for bit. On a single node ``inner`` quantizes
    nothing, unless it has its own optimizer: BinSGDM, whose bits are the update, binarizes the mean. Buckets and random
    bits are those of the whole tensors, so the result does not depend on which worker owns what.

    Args:
        inner: the scheme between nodes.
        inside: what travels in step 1. ``8`` is unbiased; ``"float16"`` rounds to nearest, and a magnitude of 65,520 or
            more, which it does not hold, becomes NaN on all workers, as infinities do.

    Attributes:
        nodes: their number, where `for_workers` has told it. It decides what travels in step 4.
    """

    inner: Scheme
    inside: Inside = FLOAT32
    nodes: int = field(default=2, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inside", require_inside(self.inside))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Those of nodes with several workers, see `for_workers`; by default, of two nodes."""
        between = [collective._replace(group=CROSS) for collective in self.inner.collectives]
        returned = Collective(Allgather, self._returned(Workers(0, self.nodes)), group=LOCAL)
        return (Collective(Alltoall, sent_type(self.inside), group=LOCAL), *between, returned)

    def for_workers(self, workers: Workers) -> Scheme:
        require_whole_nodes(workers.size, workers.local_size)
        if workers.local_size == 1:
            return self.inner.for_workers(workers)
        self.inner.check_workers(workers.nodes)
        if workers.nodes > 1:
            inner = self.inner.for_workers(_between(workers))
        else:
            inner = _Single(self.inner) if self.inner.own_optimizer else _Exact()
        found = Hierarchical(inner, self.inside)
        object.__setattr__(found, "nodes", workers.nodes)
        return found

    def owned(self, name: str, elements: int, workers: Workers) -> tuple[int, int]:
        """Whole buckets and whole tiles, about 1 / local_size of the elements."""
        bucket_size = getattr(self.inner, "bucket_size", TILE)
        return owned_range(name, elements, workers.local_size, workers.local_rank, lcm(bucket_size, TILE))

    def levels_left(self, workers: int, hosts: int) -> int | None:
        return self.inner.levels_left(hosts, hosts)

    def relative_error(self, workers: int, hosts: int) -> float | None:
        error = self.inner.relative_error(hosts, hosts)
        return None if error is None else hypot(error, error_inside(self.inside, workers // hosts))

    def of_known_lengths(self) -> Scheme:
        return Hierarchical(self.inner.of_known_lengths(), self.inside)

    def host_requirement(self) -> str | None:
        return self.inner.host_requirement()

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        whole = [gradient.extent for gradient in gradients]
        shares = _Shares(
            workers,
            [self._extents(whole, workers._replace(rank=place)) for place in range(workers.local_size)],
        )
        pieces = yield from checked(self._to_owners(gradients, shares, kernels), workers)

        means = mean_of_sent(self.inside, pieces, [own.elements for own in shares.own], kernels)
        at = shares.offsets(workers.local_rank)
        parts = [
            gradient.replaced(means[at[i] : at[i + 1]], own.start)
            for i, (gradient, own) in enumerate(zip(gradients, shares.own))
        ]
        exchange = self.inner.begin(parts, _between(workers), kernels)
        found = yield from answered(exchange, _between_nodes)

        returned = self._returned(_between(workers))
        if returned == FLOAT32:
            write = yield from _gather_averages(found, shares, kernels)
        else:
            write = yield from self._gather_received(found, returned == _BYTES, shares, kernels)
        return Decoded(workers.size, write, found.exchanged_again)

    def _extents(self, whole: Sequence[Extent], owner: Workers) -> list[Extent]:
        """What a worker owns of some gradients."""
        ranges = [self.owned(extent.keys.name, extent.elements, owner) for extent in whole]
        return [Extent(extent.keys, stop - start, start) for extent, (start, stop) in zip(whole, ranges)]

    def _to_owners(self, gradients: Sequence[Gradient], shares: _Shares, kernels: Any) -> Alltoall:
        """The request that brings each of a node's workers what it owns."""
        parts = [
            part
            for extents in shares.extents
            for gradient, own in zip(gradients, extents)
            for part in parts_to_send(self.inside, gradient, own, shares.workers, kernels)
        ]
        dtype = np.dtype(sent_type(self.inside))
        lengths = [
            [length_to_send(self.inside, own.elements) for own in extents] for extents in shares.extents
        ]
        sizes = [float(dtype.itemsize * sum(of_owners)) for of_owners in zip(*lengths)]
        return Alltoall(kernels.assemble([*parts, no_part(dtype)]), list(map(sum, lengths)), sizes, LOCAL)

    def _returned(self, between: Workers) -> str:
        """Type of what travels inside a node in the end; the same for all tensors and workers."""
        parts = self.inner.received_parts([_LARGE], between)
        if parts is None or sum(length * np.dtype(dtype).itemsize for length, dtype in parts) >= 4 * _LARGE:
            return FLOAT32
        return _BYTES if any(np.dtype(dtype) == _BYTES for _, dtype in parts) else _WORDS

    def _gather_received(self, found: Decoded, ragged: bool, shares: _Shares, kernels: Any) -> Any:
        """Gathers what has come from other nodes; returns what decodes all of it."""
        workers, between = shares.workers, _between(shares.workers)
        layouts = [
            self.inner.received_parts([extent.elements for extent in extents], between) or ()
            for extents in shares.extents
        ]
        received = self._received(found, layouts[workers.local_rank], ragged)
        if ragged:
            payload = ragged_payload(*map(ragged_payload, received))
            parts = shares.by_gradient([len(payload)], [shares.own])
            bodies = yield from checked(Allgather(payload, parts, ragged=True, group=LOCAL), workers)
            pieces = [_split_body(body, len(layout)) for body, layout in zip(bodies, layouts)]
        else:
            filled = [
                (length, dtype, partial(_as_it_is, array))
                for array, (length, dtype) in zip(received, layouts[workers.local_rank])
            ]
            words = kernels.assemble([*filled, no_part(np.int32)])
            lengths = [sum(length for length, _ in layout) for layout in layouts]
            parts = [
                size / workers.local_size
                for size in shares.by_gradient([4 * length for length in lengths], shares.extents)
            ]
            arrays = yield from checked(Allgather(words, parts, lengths, group=LOCAL), workers)
            pieces = [_split_words(array, layout, kernels) for array, layout in zip(arrays, layouts)]
        opened = [
            self.inner.opened(piece, extents, between, kernels)
            for piece, extents in zip(pieces, shares.extents)
        ]

        def write(i: int, factor: float, out: Any) -> Any:
            of_means = factor * workers.local_size
            owners = [owner for owner in shares.in_order(i) if shares.extents[owner][i].elements]
            return kernels.decode_parts(
                out,
                [
                    (shares.extents[owner][i].elements, partial(opened[owner].write, i, of_means))
                    for owner in owners
                ],
            )

        return write

    def _received(self, found: Decoded, layout: Sequence[tuple[int, Any]], ragged: bool) -> Sequence[Any]:
        """What this worker has received between the nodes.

        Raises:
            TypeError: it is not what ``inner`` has promised.
        """
        promised = "one array" if len(layout) == 1 else f"{len(layout)} arrays"
        if found.received is None or len(found.received) != len(layout):
            raise TypeError(
                f"{self.inner}: received_parts promises {promised}, and begin has returned "
                f"{'none' if found.received is None else len(found.received)}; use received= of Decoded"
            )
        lengths = [array.shape[0] for array in found.received]
        if not ragged and lengths != [length for length, _ in layout]:
            raise TypeError(
                f"{self.inner}: received_parts promises arrays of {[length for length, _ in layout]} elements, and "
                f"begin has returned {lengths}"
            )
        return found.received


class _Shares(NamedTuple):
    """Who owns what inside a node: for each of its workers, the part of each gradient."""

    workers: Workers
    extents: Sequence[Sequence[Extent]]

    @property
    def own(self) -> Sequence[Extent]:
        return self.extents[self.workers.local_rank]

    @property
    def counts(self) -> list[int]:
        """Elements that each worker owns."""
        return [sum(extent.elements for extent in extents) for extents in self.extents]

    def offsets(self, owner: int) -> list[int]:
        """Where a worker's parts begin, one after another."""
        return split_points([extent.elements for extent in self.extents[owner]])

    def in_order(self, i: int) -> list[int]:
        """The workers by their parts of a gradient."""
        found = [(extents[i].start, extents[i].stop, owner) for owner, extents in enumerate(self.extents)]
        return [owner for _, _, owner in sorted(found)]

    def by_gradient(self, sizes: Sequence[int], owners: Sequence[Sequence[Extent]]) -> list[float]:
        """Bytes of some workers' arrays that belong to each gradient, in proportion to the elements."""
        found = [0.0] * len(self.own)
        for size, extents in zip(sizes, owners):
            total = sum(extent.elements for extent in extents)
            for i, extent in enumerate(extents):
                found[i] += size * extent.elements / max(total, 1)
        return found


def _gather_averages(found: Decoded, shares: _Shares, kernels: Any) -> Any:
    """Gathers averages in float32; returns what writes all of them."""
    workers = shares.workers

    def decode(i: int, elements: int, out: Any) -> Any:
        return found.write(i, 1.0 / workers.nodes, kernels.target(elements) if out is None else out)

    filled = [
        (own.elements, np.float32, partial(decode, i, own.elements)) for i, own in enumerate(shares.own)
    ]
    averages = kernels.assemble([*filled, no_part(np.float32)])
    parts = [
        4.0 * sum(extents[i].elements for extents in shares.extents) / workers.local_size
        for i in range(len(shares.own))
    ]
    gathered = yield from checked(Allgather(averages, parts, shares.counts, group=LOCAL), workers)
    offsets = [shares.offsets(owner) for owner in range(workers.local_size)]

    def write(i: int, factor: float, out: Any) -> Any:
        pieces = [gathered[owner][offsets[owner][i] : offsets[owner][i + 1]] for owner in shares.in_order(i)]
        return kernels.scale(pieces, factor * workers.size, out)

    return write


def _as_it_is(array: Any, out: Any) -> Any:
    return array


def _split_words(array: Any, layout: Sequence[tuple[int, Any]], kernels: Any) -> list[Any]:
    """The arrays that were sent one after another."""
    at = split_points([length for length, _ in layout])
    pieces = [array[at[i] : at[i + 1]] for i in range(len(layout))]
    return [
        kernels.view(piece, dtype) if np.dtype(dtype) != _WORDS else piece
        for piece, (_, dtype) in zip(pieces, layout)
    ]


def _split_body(body: np.ndarray, count: int) -> list[np.ndarray]:
    pieces = split_ragged(body)
    if len(pieces) != count:
        raise CorruptPayloadError(f"corrupt payload: {len(pieces)} arrays in it where {count} were expected")
    return pieces


def inner_of(scheme: Scheme) -> Scheme:
    """The scheme between the nodes; a flat one itself."""
    return scheme.inner if isinstance(scheme, Hierarchical) else scheme


@dataclass(frozen=True)
class _Exact(Scheme):
    """One worker's exchange with nobody: the gradients as they are."""

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return ()

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        def write(i: int, factor: float, out: Any) -> Any:
            return kernels.scale([gradients[i].values], factor, out)

        yield from ()
        return Decoded(1, write)


@dataclass(frozen=True)
class _Single(Scheme):
    """One worker's exchange with itself."""

    inner: Scheme

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return ()

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        return (yield from answered(self.inner.begin(gradients, workers, kernels), _alone))

    def received_parts(self, elements: Sequence[int], workers: Workers) -> Sequence[tuple[int, Any]] | None:
        return self.inner.received_parts(elements, workers)

    def opened(
        self, received: Sequence[Any], extents: Sequence[Extent], workers: Workers, kernels: Any
    ) -> Decoded:
        return self.inner.opened(received, extents, workers, kernels)


def _between(workers: Workers) -> Workers:
    """Those that own the same elements, one of each node. Reductions of one's own are not asked for."""
    return Workers(workers.node, workers.nodes)


def _alone(request: Any) -> Any:
    """What a single worker gets."""
    yield from ()
    return request.array if isinstance(request, Allreduce) else [request.array]


def _between_nodes(request: Any) -> Any:
    """The request, to the group CROSS."""
    return (yield request._replace(group=CROSS))
