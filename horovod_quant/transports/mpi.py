"""Transport over mpi4py for numpy arrays, without a framework or Horovod.

Unlike Horovod, MPI offers custom reductions. Global-QSGD with exponential levels uses one here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_quant import kernels as kernel_backends
from horovod_quant.kernels.keys import RngKey
from horovod_quant.reductions.requests import drive
from horovod_quant.schemes import Hierarchical
from horovod_quant.schemes.base import (
    ALL,
    CROSS,
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
    split_gathered,
)
from horovod_quant.transports.simulator import Merge

try:
    from mpi4py import MPI
except ImportError as error:
    raise ImportError("horovod_quant.mpi needs mpi4py: pip install mpi4py") from error


class Result(NamedTuple):
    """Result of a reduction over MPI.

    Attributes:
        decoded: the decoded gradients (float32, flat).
        merges: the order in which a custom reduction merged; empty without one.
        exchanged_again: number of resent buckets, see `horovod_quant.simulator.Result`.
    """

    decoded: list[np.ndarray]
    merges: list[Merge]
    exchanged_again: int = 0


def run(
    scheme: Scheme,
    gradients: Sequence[Any],
    *,
    seed: int = 0,
    names: Sequence[str] | None = None,
    step: int = 0,
    factor: float | None = None,
    states: Sequence[BinaryState] | None = None,
    kernels: str = "auto",
    custom_reduction: bool = True,
    comm: Any = None,
    local_size: int | None = None,
) -> Result:
    """Reduce a group of gradients; call it on every rank of ``comm``.

    Args:
        scheme: one of `horovod_quant.schemes`.
        gradients: the local tensors, in the same order on every rank. They are cast to float32, not changed.
        seed, names, step, kernels: as in `horovod_quant.simulator.run`.
        factor: factor applied to the sum over workers; 1 / n by default, which gives the average.
        states: BinSGDM's state of each tensor, updated in place.
        custom_reduction: whether to reduce exponential levels with an MPI operation that re-rounds pairwise; otherwise
            they are re-rounded once, by the reducer of a shard.
        comm: communicator; MPI.COMM_WORLD by default.
        local_size: number of consecutive ranks per node, for hierarchical reductions; by default nodes are hosts.

    Raises:
        ValueError: the nodes have different numbers of workers, or ``local_size`` does not divide them all.
    """
    comm = MPI.COMM_WORLD if comm is None else comm
    size = comm.Get_size()
    names = [str(i) for i in range(len(gradients))] if names is None else list(names)
    factor = 1.0 / size if factor is None else factor
    members = [
        Gradient(
            np.ascontiguousarray(values, np.float32).reshape(-1),
            RngKey(seed, names[i]),
            step,
            states[i] if states else None,
        )
        for i, values in enumerate(gradients)
    ]
    workers, communicators = _groups(comm, scheme, local_size)
    workers = workers._replace(custom_reduction=custom_reduction)
    scheme = scheme.for_workers(workers)
    exchange = scheme.begin(members, workers, kernel_backends.get(kernels))
    merges: list[Merge] = []
    result = drive(exchange, lambda request: _perform(communicators[request.group], request, merges))
    for group in (LOCAL, CROSS):  # a collective call, in the same order on every rank
        if group in communicators:
            communicators[group].Free()
    decoded = [np.empty(len(member.values), np.float32) for member in members]
    for i, out in enumerate(decoded):
        result.write(i, factor, out)
    return Result(decoded, merges, sum(result.exchanged_again))


def _groups(comm: Any, scheme: Scheme, local_size: int | None) -> tuple[Workers, dict[str, Any]]:
    """Return the participating workers, and the communicator of each group."""
    size, rank = comm.Get_size(), comm.Get_rank()
    if local_size is not None:
        require_whole_nodes(size, local_size)
    if not isinstance(scheme, Hierarchical):
        return Workers(rank, size), {ALL: comm}
    if local_size is None:
        local = comm.Split_type(MPI.COMM_TYPE_SHARED, key=rank)
    else:
        local = comm.Split(rank // local_size, rank)
    first_ranks = comm.allgather(local.bcast(rank))
    if len({first_ranks.count(first) for first in first_ranks}) > 1:
        raise ValueError(
            "hierarchical: some nodes have more workers than others; start the same number on every node"
        )
    node, local_rank = sorted(set(first_ranks)).index(first_ranks[rank]), local.Get_rank()
    workers = Workers(node * local.Get_size() + local_rank, size, local_size=local.Get_size())
    return workers, {ALL: comm, LOCAL: local, CROSS: comm.Split(local_rank, node)}


def _perform(comm: Any, request: Any, merges: list[Merge]) -> Any:
    if isinstance(request, Allreduce):
        result = np.empty_like(request.array)
        comm.Allreduce(request.array, result, op=MPI.MAX if request.op == "max" else MPI.SUM)
        return result
    if isinstance(request, Allgather):
        lengths = comm.allgather(len(request.array))
        buffer = np.empty(sum(lengths), request.array.dtype)
        comm.Allgatherv(request.array, [buffer, lengths])
        return split_gathered(buffer, request)
    if isinstance(request, Alltoall):
        size, local = comm.Get_size(), request.splits[comm.Get_rank()]
        dtype = request.array.dtype
        # mpi4py does not know float16.
        sent = request.array.view(np.int16) if dtype == np.float16 else request.array
        received = np.empty(size * local, sent.dtype)
        comm.Alltoallv([sent, list(request.splits)], [received, [local] * size])
        return list(received.view(dtype).reshape(size, local))
    if isinstance(request, CustomAllreduce):
        result, new_merges = _reduce(comm, request)
        merges.extend(new_merges)
        return result
    raise TypeError(f"not a request: {request!r}")


def _reduce(comm: Any, request: CustomAllreduce):
    """Perform an MPI_Allreduce with a custom operation.

    MPI chooses the bracketing of a non-commutative operation (the order of ranks is fixed). Each message carries the
    range of ranks that it has summed, which gives every node of the tree separate random bits, and the merges that
    led to it, so that the simulator can repeat them. The message is one element of a contiguous datatype, so that MPI
    does not split it.
    """
    size, rank = comm.Get_size(), comm.Get_rank()
    # Low and high; for a merge at middle m, its low and high at 2 + 2 m.
    header = np.zeros(2 + 2 * size, np.int32)
    header[:2] = rank, rank + 1
    message = np.concatenate([header.view(np.uint8), request.array.view(np.uint8)])
    header_bytes = header.nbytes

    def split(buffer: Any):
        raw = np.frombuffer(buffer, np.uint8)
        return raw[:header_bytes].view(np.int32), raw[header_bytes:].view(request.array.dtype)

    def operation(left_buffer: Any, result_buffer: Any, datatype: Any) -> None:
        left_header, left = split(left_buffer)
        result_header, right = split(result_buffer)
        (low, middle), high = left_header[:2].tolist(), int(result_header[1])
        right[...] = request.combine(left, right, low, high)
        result_header[2:] += left_header[2:]
        result_header[2 + 2 * middle : 4 + 2 * middle] = low, high
        result_header[:2] = low, high

    whole = MPI.BYTE.Create_contiguous(len(message)).Commit()
    reduction = MPI.Op.Create(operation, commute=False)
    try:
        result = np.empty_like(message)
        comm.Allreduce([message, 1, whole], [result, 1, whole], op=reduction)
    finally:
        reduction.Free()
        whole.Free()
    final_header, digits = split(result.data)
    by_middle = final_header[2:].reshape(size, 2).tolist()
    merges = [(by_middle[middle][0], middle, by_middle[middle][1]) for middle in range(1, size)]
    return digits, sorted(merges, key=lambda merge: merge[2] - merge[0])
