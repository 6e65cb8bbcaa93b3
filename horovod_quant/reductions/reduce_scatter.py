"""Reduce-scatter: each rank reduces its shard and keeps the result."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, Callable

from horovod_quant.codecs.base import Codec
from horovod_quant.reductions.allgather import AllgatherReduce
from horovod_quant.reductions.base import Reduction, whole_batch, worker_rounder
from horovod_quant.reductions.requests import Alltoall, Request, Workers, validated
from horovod_quant.reductions.scatter_reduce import ScatterReduceAllgather
from horovod_quant.reductions.tensors import Decoded, Gradient

ReduceScatter = Callable[[Sequence[Gradient], Workers, Any], Generator[Request, Any, Decoded]]
"""A reduce-scatter of gradients, by the kernels of a backend; see `reduce_scatter`."""


def reduce_scatter(
    codec: Codec, correlated: bool, gradients: Sequence[Gradient], workers: Workers, kernels: Any
) -> Generator[Request, Any, Decoded]:
    """Reduce-scatter: encode, alltoall; each rank decodes and adds its shard.

    The first half of `ScatterReduceAllgather`: gradients are rounded once.

    Args:
        codec: codec of the workers' payloads.
        correlated: True if the workers round with correlated random bits.
        gradients: for each rank, one after another, the tensors of its shard. All shards have tensors of the same
            lengths.
        workers: the participating workers.
        kernels: the backend.

    Returns:
        A `Decoded` of the tensors of this rank's shard.
    """
    count = len(gradients) // workers.size
    local = gradients[count * workers.rank : count * (workers.rank + 1)]
    at = codec.offsets(tuple([gradient.elements for gradient in local]))
    rounder = worker_rounder(codec.domain, workers, correlated)
    payload = codec.encode(kernels, whole_batch(gradients), rounder)
    sizes = [4 * workers.size * (stop - start) for start, stop in zip(at, at[1:])]
    request = Alltoall(payload, [at[-1]] * workers.size, sizes)
    payloads = yield from validated(request, workers)
    tensors = [gradient.info for gradient in local]
    return AllgatherReduce(codec).decode_received(payloads, tensors, workers, kernels)


def reduce_scatter_of(reduction: Reduction) -> ReduceScatter | None:
    """Return a reduce-scatter with a reduction's codec.

    It is None for payloads of unknown length.
    """
    if isinstance(reduction, AllgatherReduce):
        return partial(reduce_scatter, reduction.codec, reduction.correlated)
    if isinstance(reduction, ScatterReduceAllgather):
        return partial(reduce_scatter, reduction.scatter, reduction.correlated)
    return None
