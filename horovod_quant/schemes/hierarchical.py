"""Hierarchical reduction: intra-node averages, and another scheme inter-node.

Source: Peng et al., BinSGDM (ICLR 2023 submission; Birder, NeurIPS 2023), for their 1-bit allreduce; here for every
scheme. A node is a host, or any group of workers with a fast connection between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

from horovod_quant.kernels.layout import TILE
from horovod_quant.kernels.segments import segment_kernels
from horovod_quant.reductions.base import whole_batch
from horovod_quant.reductions.hierarchical import HierarchicalReduction, between
from horovod_quant.reductions.shards import owned_range
from horovod_quant.schemes.base import (
    Collective,
    Decoded,
    Exchange,
    Gradient,
    Scheme,
    Workers,
    require_whole_nodes,
)
from horovod_quant.schemes.inside import FLOAT32, Inside, intra_codec, nmse_inside, require_inside


@dataclass(frozen=True)
class Hierarchical(Scheme):
    """Scheme that averages intra-node and runs ``inner`` inter-node.

    1. An intra-node alltoall sends each worker all values of the shard that it reduces, in float32, in float16, or as
       the codes of ``QSGD(bits=8)``, with correlated rounding among the node's workers.
    2. The worker averages them, in the order of the node's workers.
    3. The workers that reduce the same shard, one per node, run ``inner`` on it.
    4. An intra-node allgather distributes the arrays received from other nodes, and all workers decode them.
       It distributes the averages in float32 instead if they have no more bytes, or ``inner`` cannot decode elsewhere.

    With one worker per node the result is bit-identical to that of ``inner``. On a single node ``inner`` quantizes
    nothing, unless it requires an optimizer: BinSGDM, whose bits are the update, binarizes the mean. Buckets and random
    bits are those of the whole tensors, so the result does not depend on which worker reduces which shard.

    Args:
        inner: the inter-node scheme.
        inside: format of step 1. ``8`` is unbiased; ``"float16"`` rounds to nearest, and a magnitude of 65,520 or more,
            which it cannot represent, becomes NaN on all workers, as infinities do.

    Attributes:
        nodes: number of nodes, which `for_workers` sets. It decides the arrays of step 4.
    """

    inner: Scheme
    inside: Inside = FLOAT32
    nodes: int = field(default=2, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inside", require_inside(self.inside))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Collectives of nodes with several workers, see `for_workers`.

        By default of two nodes.
        """
        return self._reduction().collectives_of(Workers(0, self.nodes))

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        return self._reduction().run(gradients, workers, kernels)

    def _reduction(self) -> HierarchicalReduction:
        return HierarchicalReduction(intra_codec(self.inside), self.inner, self._unit)

    @property
    def _unit(self) -> int:
        """Length of the smallest range: whole buckets and whole tiles."""
        return lcm(getattr(self.inner, "bucket_size", TILE), TILE)

    def for_workers(self, workers: Workers) -> Scheme:
        require_whole_nodes(workers.size, workers.local_size)
        if workers.local_size == 1:
            return self.inner.for_workers(workers)
        self.inner.check_workers(workers.nodes)
        quantizes = workers.nodes > 1 or self.inner.own_optimizer
        inner = self.inner.for_workers(between(workers)) if quantizes else Unquantized()
        found = Hierarchical(inner, self.inside)
        object.__setattr__(found, "nodes", workers.nodes)
        return found

    def owned(self, name: str, elements: int, workers: Workers) -> tuple[int, int]:
        """Return this worker's range, about 1 / local_size of the elements."""
        return owned_range(name, elements, workers.local_size, workers.local_rank, self._unit)

    def levels_left(self, workers: int, hosts: int) -> int | None:
        return self.inner.levels_left(hosts, hosts)

    def expected_nmse(self, workers: int, hosts: int) -> float | None:
        nmse = self.inner.expected_nmse(hosts, hosts)
        return None if nmse is None else nmse + nmse_inside(self.inside, workers // hosts)

    def fixed_length_proxy(self) -> Scheme:
        return Hierarchical(self.inner.fixed_length_proxy(), self.inside)

    def host_requirement(self) -> str | None:
        return self.inner.host_requirement()

    def compressor_call(self, *options: str) -> str:
        return self.inner.compressor_call("hierarchical=True", *options)


def inner_of(scheme: Scheme) -> Scheme:
    """Return the inter-node scheme, or a flat scheme unchanged."""
    return scheme.inner if isinstance(scheme, Hierarchical) else scheme


@dataclass(frozen=True)
class Unquantized(Scheme):
    """Scheme of a single node, which leaves the averages unchanged."""

    collectives = ()

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        batch = whole_batch(gradients)

        def decode(tensors: Sequence[int], factor: Any, outs: Sequence[Any]) -> Sequence[Any]:
            return segment_kernels(kernels).scale([batch.values[i] for i in tensors], factor, outs)

        yield from ()
        return Decoded(1, decode=decode)
