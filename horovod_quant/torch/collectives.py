"""Launch and collection of Horovod's collectives for a group of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

import torch

from horovod_quant.frontends.nodes import Nodes
from horovod_quant.kernels.layout import split
from horovod_quant.schemes.base import (
    Allgather,
    Allreduce,
    Alltoall,
    Collective,
    Scheme,
    Workers,
    split_gathered,
)
from horovod_quant.torch.memory import Memory
from horovod_quant.transports.emulate_with_allreduce import collectives_of_emulation, emulate_with_allreduce
from horovod_quant.transports.pairwise_via_allreduce import collectives_of_pairwise, pairwise_via_allreduce
from horovod_quant.transports.split_sums import (
    collectives_of_split_sums,
    group_of_sums,
    is_faster,
    split_sums,
)

if TYPE_CHECKING:
    from horovod_quant.torch.exchange import PendingTensor


def needs_all_workers(members: Sequence[PendingTensor], nodes: Nodes, memory: Memory) -> bool:
    """True if the reduction fails once a worker has joined.

    After ``hvd.join()`` Horovod only adds zeros to sums for it.
    """
    workers = nodes.workers
    if workers.size == 1:
        return False
    scheme = members[0].scheme.for_workers(workers)
    needs_all = any(collective.needs_all_workers for collective in scheme.collectives)
    return needs_all or split_sums_among(members, scheme, workers, memory) > 0


def adapted(
    members: Sequence[PendingTensor], nodes: Nodes, memory: Memory, workers: Workers
) -> tuple[Sequence[Collective], Callable[[Any], Any]]:
    """Return a group's collectives, and the rewrite of its requests to them.

    ``workers`` are those of ``nodes`` that participate.
    """
    import horovod.torch as hvd

    scheme = members[0].scheme.for_workers(workers)
    if workers.size < nodes.workers.size:
        emulated = [Collective(Allreduce, "int64")] * collectives_of_emulation(scheme)
        return emulated, lambda reduction: emulate_with_allreduce(reduction, workers)
    if adding := split_sums_among(members, scheme, workers, memory):
        by_alltoalls = collectives_of_split_sums(scheme.collectives)
        return by_alltoalls, lambda reduction: split_sums(reduction, adding)
    if not (hvd.mpi_enabled() or memory.takes_tensors):  # Gloo, not MPI or NCCL
        pairwise = collectives_of_pairwise(scheme.collectives, workers)
        return pairwise, lambda reduction: pairwise_via_allreduce(reduction, workers)
    return scheme.collectives, lambda reduction: reduction


def split_sums_among(
    members: Sequence[PendingTensor], scheme: Scheme, workers: Workers, memory: Memory
) -> int:
    """Return the number of workers that add, or 0.

    It is 0 unless two collectives are faster than one allreduce.
    """
    import horovod.torch as hvd

    group = group_of_sums(scheme)
    if group is None or memory.takes_tensors:
        return 0
    adding = workers.size_of(group)
    local_bytes = sum(member.bytes for member in members) * adding // workers.size
    return adding if is_faster(adding, local_bytes) and hvd.mpi_enabled() else 0


def active_workers(ranks: Sequence[int], nodes: Nodes) -> Workers:
    """Return the active workers, renumbered from 0."""
    workers = nodes.workers
    if len(ranks) == workers.size:
        return workers
    if workers.local_size > 1:
        require_all(ranks, workers.size)
    return Workers(ranks.index(workers.rank), len(ranks), workers.custom_reduction)


def require_all(ranks: Sequence[int], size: int) -> None:
    """Raise RuntimeError if only some ranks of nodes are active."""
    if gone := sorted(set(range(size)) - set(ranks)):
        raise RuntimeError(
            f"hierarchical: workers {gone} have called hvd.join(), and their nodes' groups cannot continue "
            f"without them; use hierarchical=False, or the same number of batches on every worker"
        )


def launch(request: Any, name: str, process_set: Any) -> Any:
    import horovod.torch as hvd

    array = request.array
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    if isinstance(request, Allreduce):
        op = hvd.Max if request.op == "max" else hvd.Sum
        return hvd.allreduce_async_(tensor, name=name, op=op, process_set=process_set)
    if isinstance(request, Allgather):
        return hvd.allgather_async(tensor, name=name, process_set=process_set)
    if isinstance(request, Alltoall):
        splits = torch.tensor(list(request.splits), dtype=torch.int32, device="cpu")
        return hvd.alltoall_async(tensor, splits, name=name, process_set=process_set)
    raise TypeError(f"not a request that Horovod can perform: {request!r}")


def launch_nothing(name: str, collective: Collective, process_set: Any) -> Any:
    """Launch a collective that never matches the real one.

    No other array has three dimensions.
    """
    import horovod.torch as hvd

    unlike_all = torch.zeros((process_set.size(), 1, 1), dtype=torch.int64, device="cpu")
    if collective.request is Allreduce:
        return hvd.allreduce_async_(unlike_all, name=name, op=hvd.Sum, process_set=process_set)
    if collective.request is Allgather:
        return hvd.allgather_async(unlike_all, name=name, process_set=process_set)
    return hvd.alltoall_async(unlike_all, name=name, process_set=process_set)


def collect(request: Any, output: Any) -> Any:
    if isinstance(request, Allreduce):
        return _like(request, output)
    if isinstance(request, Allgather):
        return split_gathered(_like(request, output), request)
    received, lengths = output
    return split(_like(request, received), lengths.tolist())


def _like(request: Any, output: torch.Tensor) -> Any:
    """Return Horovod's output as an array of the request's type."""
    return output if isinstance(request.array, torch.Tensor) else output.numpy()
