"""The hierarchical exchange: full precision inside a node, another scheme between the nodes.

Peng et al., BinSGDM (ICLR 2023 submission; Birder, NeurIPS 2023), for their 1-bit allreduce; here for every scheme. A
node is a host, or any group of workers with a fast connection between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any

import numpy as np

from horovod_quant.kernels.arrays import no_part
from horovod_quant.kernels.layout import TILE
from horovod_quant.schemes.base import (
    CROSS,
    LOCAL,
    Allgather,
    Allreduce,
    Alltoall,
    Collective,
    Decoded,
    Exchange,
    Gradient,
    Scheme,
    Workers,
    answered,
    checked,
    require_whole_nodes,
    split_points,
)
from horovod_quant.schemes.chunks import owned_range


@dataclass(frozen=True)
class Hierarchical(Scheme):
    """``inner`` between nodes; each node takes part as one worker that has the mean of its workers' gradients.

    1. An alltoall inside the node sends each worker all values of the elements that it owns, in float32.
    2. The worker averages them, in the order of the node's workers.
    3. The workers that own the same elements, one per node, run ``inner`` on them.
    4. They decode the average, and an allgather inside the node distributes it, in float32.

    With one worker per node the exchange is that of ``inner``, bit for bit. On a single node nothing is quantized,
    unless the scheme has its own optimizer: BinSGDM, whose bits are the update, binarizes the mean. Buckets and random
    bits are those of the whole tensors, so the result does not depend on which worker owns what.

    Args:
        inner: the scheme between nodes.
    """

    inner: Scheme

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Those of nodes with several workers, see `for_workers`."""
        inside = Collective(Alltoall, "float32", group=LOCAL), Collective(Allgather, "float32", group=LOCAL)
        between = [collective._replace(group=CROSS) for collective in self.inner.collectives]
        return (inside[0], *between, inside[1])

    def for_workers(self, workers: Workers) -> Scheme:
        require_whole_nodes(workers.size, workers.local_size)
        if workers.local_size == 1:
            return self.inner.for_workers(workers)
        self.inner.check_workers(workers.nodes)
        if workers.nodes > 1:
            return Hierarchical(self.inner.for_workers(_between(workers)))
        return Hierarchical(_Single(self.inner) if self.inner.own_optimizer else _Exact())

    def owned(self, name: str, elements: int, workers: Workers) -> tuple[int, int]:
        """Whole buckets and whole tiles, about 1 / local_size of the elements."""
        bucket_size = getattr(self.inner, "bucket_size", TILE)
        return owned_range(name, elements, workers.local_size, workers.local_rank, lcm(bucket_size, TILE))

    def levels_left(self, workers: int, hosts: int) -> int | None:
        return self.inner.levels_left(hosts, hosts)

    def relative_error(self, workers: int, hosts: int) -> float | None:
        return self.inner.relative_error(hosts, hosts)

    def of_known_lengths(self) -> Scheme:
        return Hierarchical(self.inner.of_known_lengths())

    def host_requirement(self) -> str | None:
        return self.inner.host_requirement()

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        node = [workers._replace(rank=local_rank) for local_rank in range(workers.local_size)]
        ranges = [
            [self.owned(gradient.keys.name, gradient.elements, owner) for gradient in gradients]
            for owner in node
        ]
        offsets = [split_points([stop - start for start, stop in owned]) for owned in ranges]
        splits = [at[-1] for at in offsets]
        sizes = [4.0 * gradient.elements for gradient in gradients]

        values = [
            (stop - start, np.float32, partial(kernels.to_float32, gradient.values[start:stop]))
            for owned in ranges
            for gradient, (start, stop) in zip(gradients, owned)
        ]
        pieces = yield from checked(
            Alltoall(kernels.assemble([*values, no_part(np.float32)]), splits, sizes, LOCAL), workers
        )

        mean, own = kernels.mean(pieces), offsets[workers.local_rank]
        parts = [
            gradient._replace(values=mean[own[i] : own[i + 1]], start=ranges[workers.local_rank][i][0])
            for i, gradient in enumerate(gradients)
        ]
        exchange = self.inner.begin(parts, _between(workers), kernels)
        average = yield from answered(exchange, _between_nodes)

        def decode(i: int, out: Any) -> Any:
            out = kernels.target(own[i + 1] - own[i]) if out is None else out
            return average.write(i, 1.0 / workers.nodes, out)

        decoded = [(own[i + 1] - own[i], np.float32, partial(decode, i)) for i in range(len(gradients))]
        shares = [size / workers.local_size for size in sizes]
        gathered = yield from checked(
            Allgather(kernels.assemble([*decoded, no_part(np.float32)]), shares, splits, group=LOCAL), workers
        )

        def write(i: int, factor: float, out: Any) -> Any:
            owners = sorted(range(workers.local_size), key=lambda owner: ranges[owner][i])
            found = [gathered[owner][offsets[owner][i] : offsets[owner][i + 1]] for owner in owners]
            return kernels.scale(found, factor * workers.size, out)

        return Decoded(workers.size, write, average.exchanged_again)


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
