"""Simulator of n workers: the reference of all transports.

All workers are in one process. It is also a tool to study the nmse of schemes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_quant import kernels as kernel_backends
from horovod_quant.kernels import notices
from horovod_quant.kernels.keys import RngKey
from horovod_quant.kernels.layout import split
from horovod_quant.schemes.base import (
    ALL,
    LOCAL,
    Allgather,
    Allreduce,
    Alltoall,
    BinaryState,
    CustomAllreduce,
    Gradient,
    Scheme,
    Workers,
    require_whole_nodes,
    split_ragged,
)
from horovod_quant.transports.traffic import sent_bytes

Merge = tuple[int, int, int]
"""Step of a reduction: ``(low, middle, high)`` merges sums of ranks low..middle-1 and middle..high-1."""


class Result(NamedTuple):
    """Result of a simulated reduction.

    Attributes:
        decoded: for each worker, the list of its decoded gradients (float32, flat).
        bytes_sent: bytes that one worker sends on average, by collective: ``"allreduce"``; ``"local alltoall"`` and
            ``"cross allreduce"`` where only the workers of a node, or one per node, participate.
        nmse: ``||decoded - exact||^2 / ||exact||^2`` over all elements of the group, where exact is ``factor`` times
            the float64 sum over the workers; 0 where both are zero, inf where only exact is.
        exchanged_again: number of buckets that were resent because a sum overflowed its field (Global-QSGD with
            ``rotate=True``); in a hierarchical reduction, of the first node's first worker.
    """

    decoded: list[list[np.ndarray]]
    bytes_sent: dict[str, float]
    nmse: float
    exchanged_again: int = 0

    @property
    def error(self) -> float:
        """Former name of ``nmse``."""
        notices.deprecated("Result.error is now Result.nmse")
        return self.nmse


def run(
    scheme: Scheme,
    gradients: Sequence[Any],
    *,
    seed: int = 0,
    names: Sequence[str] | None = None,
    step: int = 0,
    factor: float | None = None,
    states: Sequence[Sequence[BinaryState]] | None = None,
    kernels: str = "auto",
    custom_reduction: bool = False,
    merges: Sequence[Merge] | None = None,
    local_size: int = 1,
) -> Result:
    """Reduce gradients among simulated workers.

    Args:
        scheme: one of `horovod_quant.schemes`.
        gradients: one entry per worker: a flat array of d elements, or a list of arrays (a group of tensors). They are
            cast to float32, not changed.
        seed: seed of the keys.
        names: names of the group's tensors; ``"0"``, ``"1"``, ... by default.
        step: number of the step.
        factor: factor applied to the sum over workers; 1 / n by default, which gives the average.
        states: BinSGDM's state for each worker and tensor, updated in place, for the elements given by
            ``scheme.owned``.
        kernels: backend of the kernels.
        custom_reduction: whether the simulated transport offers custom reductions (as MPI does).
        merges: the order in which a custom reduction merges; left to right by default.
        local_size: number of workers per node, for hierarchical reductions; the workers of a node are consecutive.

    Raises:
        ValueError: there are no workers, their gradients differ in shape, or they do not fill whole nodes.
    """
    groups = [list(local) if isinstance(local, (list, tuple)) else [local] for local in gradients]
    if not groups or any(
        [np.shape(a) for a in local] != [np.shape(a) for a in groups[0]] for local in groups
    ):
        raise ValueError("gradients: give those of at least one worker, with the same shapes for each")
    size, count = len(groups), len(groups[0])
    require_whole_nodes(size, local_size)
    names = [str(i) for i in range(count)] if names is None else list(names)
    factor = 1.0 / size if factor is None else factor
    backend = kernel_backends.get(kernels)
    with np.errstate(over="ignore"):
        groups = [[np.ascontiguousarray(a, np.float32).reshape(-1) for a in local] for local in groups]

    exchanges = []
    workers = [Workers(rank, size, custom_reduction, local_size) for rank in range(size)]
    scheme = scheme.for_workers(workers[0])
    for rank, local in enumerate(groups):
        members = [
            Gradient(local[i], RngKey(seed, names[i]), step, states[rank][i] if states else None)
            for i in range(count)
        ]
        exchanges.append(scheme.begin(members, workers[rank], backend))

    bytes_sent: dict[str, float] = {}
    answers: list[Any] = [None] * size
    finished: list[Any] = []
    while not finished:
        requests = []
        for rank, exchange in enumerate(exchanges):
            try:
                requests.append(exchange.send(answers[rank]))
            except StopIteration as stop:
                finished.append(stop.value)
        if finished:
            break
        group = requests[0].group
        collective = ("" if group == ALL else f"{group} ") + type(requests[0]).__name__.lower()
        sent = sum(sum(sent_bytes(request, workers[0].size_of(group))) for request in requests) / size
        bytes_sent[collective] = bytes_sent.get(collective, 0.0) + sent
        answers = _answers(requests, local_size, merges)

    decoded = [[np.empty(len(a), np.float32) for a in local] for local in groups]
    for rank, result in enumerate(finished):
        for i in range(count):
            result.write(i, factor, decoded[rank][i])
    again = sum(finished[0].exchanged_again)
    return Result(decoded, bytes_sent, _nmse(groups, decoded[0], factor), again)


def _members(group: str, size: int, local_size: int) -> list[range]:
    """Return the ranks of each group of a kind."""
    if group == ALL:
        return [range(size)]
    if group == LOCAL:
        return [range(first, first + local_size) for first in range(0, size, local_size)]
    return [range(first, size, local_size) for first in range(local_size)]


def _answers(requests: list[Any], local_size: int, merges: Sequence[Merge] | None) -> list[Any]:
    answers: list[Any] = [None] * len(requests)
    for ranks in _members(requests[0].group, len(requests), local_size):
        for rank, answer in zip(ranks, _perform([requests[rank] for rank in ranks], merges)):
            answers[rank] = answer
    return answers


def _perform(requests: list[Any], merges: Sequence[Merge] | None) -> list[Any]:
    first = requests[0]
    if isinstance(first, Allreduce):
        stacked = np.stack([request.array for request in requests])
        if first.op == "max":
            return [stacked.max(axis=0)] * len(requests)
        return [np.add.reduce(stacked, axis=0, dtype=first.array.dtype)] * len(requests)
    if isinstance(first, Allgather):
        arrays = [request.array for request in requests]
        return [split_ragged(np.concatenate(arrays)) if first.ragged else arrays] * len(requests)
    if isinstance(first, Alltoall):
        pieces = [[piece.copy() for piece in split(each.array, each.splits)] for each in requests]
        return [list(received) for received in zip(*pieces)]
    if isinstance(first, CustomAllreduce):
        return [_reduce(requests, merges)] * len(requests)
    raise TypeError(f"not a request: {first!r}")


def _reduce(requests: list[CustomAllreduce], merges: Sequence[Merge] | None) -> np.ndarray:
    size = len(requests)
    partial = {(rank, rank + 1): request.array for rank, request in enumerate(requests)}
    for low, middle, high in merges or [(0, middle, middle + 1) for middle in range(1, size)]:
        left, right = partial.pop((low, middle)), partial.pop((middle, high))
        partial[low, high] = requests[0].combine(left, right, low, high)
    return partial[0, size]


def _nmse(groups: list[list[np.ndarray]], decoded: list[np.ndarray], factor: float) -> float:
    squared = size = 0.0
    for i, estimate in enumerate(decoded):
        exact = factor * np.sum([local[i] for local in groups], axis=0, dtype=np.float64)
        squared += float(np.sum((estimate - exact) ** 2))
        size += float(np.sum(exact**2))
    if not squared:
        return 0.0
    return squared / size if size else np.inf
