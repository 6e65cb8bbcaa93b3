"""Transport over ``torch.distributed``, in process groups that only this package uses.

A process group orders its collectives by launch. The script's threads launch those of PyTorch's groups, so requests
from another thread need separate groups.
"""

from __future__ import annotations

import datetime
import itertools
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from horovod_quant.kernels.layout import split
from horovod_quant.schemes.base import (
    ALL,
    CROSS,
    LOCAL,
    Allgather,
    Allreduce,
    Alltoall,
    Request,
    Workers,
    nodes_of,
    split_ragged,
)

_ERROR = "error"
_LONGEST_NOTE = 1000
"""Maximum number of characters of an error that other ranks receive."""


class Connection:
    """One process group that only this object uses.

    Gloo closes its sockets, which ends the waits of other ranks, only when the last reference is gone. So no method
    keeps the group in a local variable, which the traceback of an error would keep alive.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        store: the store of rank 0, with a unique prefix.
        rank, size: this worker's rank, and the size of the group.
        timeout: the timeout of each collective.
    """

    def __init__(
        self, backend: str, store: Any, rank: int, size: int, timeout: datetime.timedelta | None
    ) -> None:
        self.rank, self.size = rank, size
        self._is_gloo = backend == "gloo"
        self._tag = 0
        self._group: Any = None
        if size == 1:
            return
        if self._is_gloo:
            options = {} if timeout is None else {"timeout": timeout}
            self._group = dist.ProcessGroupGloo(store, rank, size, **options)
        else:
            settings = dist.ProcessGroupNCCL.Options()
            if timeout is not None:
                settings._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, settings)

    def close(self) -> None:
        self._group = None

    def allreduce_(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Compute the elementwise sum or maximum in place.

        Gloo also adds sparse tensors.
        """
        if self.size > 1:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
            self._group.allreduce([tensor], options).wait()
        return tensor

    def allgather(self, tensor: torch.Tensor, lengths: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return all tensors in rank order; needs ``lengths`` if they differ."""
        if self.size == 1:
            return [tensor]
        if lengths is None:
            lengths = [len(tensor)] * self.size
        # Between two ranks Gloo's allgather takes 1.5 times what the bytes need.
        if len(set(lengths)) > 1 or (self._is_gloo and self.size == 2):
            return self._exchange([tensor] * self.size, lengths)
        whole = tensor.new_empty(self.size * len(tensor))
        if len(tensor):
            self._group._allgather_base(whole, tensor).wait()
        return list(whole.chunk(self.size))

    def alltoall(self, tensor: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
        """Return the pieces for this worker, in rank order.

        All workers have the same splits.
        """
        if self.size == 1:
            return [tensor]
        return self._exchange(split(tensor, splits), [splits[self.rank]] * self.size)

    def _exchange(self, pieces: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
        """Return the piece that each worker sends to this one."""
        size, rank = self.size, self.rank
        received_sizes = [0 if i == rank else length for i, length in enumerate(lengths)]
        whole = pieces[rank].new_empty(sum(received_sizes))
        received = split(whole, received_sizes)
        received[rank] = pieces[rank]
        self._tag = (self._tag + 1) % 2**30
        if self._is_gloo:
            # First all receives, then one send after another, each rank to a different one. This takes little more
            # than the bytes need, and Gloo's alltoall 50% more between four hosts.
            arriving = [
                self._group.recv([received[i]], i, self._tag) for i in range(size) if i != rank and lengths[i]
            ]
            for distance in range(1, size):
                other = (rank + distance) % size
                if len(pieces[other]):
                    self._group.send([pieces[other]], other, self._tag).wait()
            for work in arriving:
                work.wait()
        else:
            sent = torch.cat([piece[:0] if i == rank else piece for i, piece in enumerate(pieces)])
            sizes = [0 if i == rank else len(piece) for i, piece in enumerate(pieces)]
            self._group.alltoall_base(whole, sent, received_sizes, sizes, dist.AllToAllOptions()).wait()
        return received


class Note:
    """Error message of the first failed rank.

    It is in the store that all ranks share.

    Args:
        store: the store, with a unique prefix.
        rank: this worker's rank in the message.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank

    def leave(self, error: BaseException) -> None:
        """Store the message, unless another rank has."""
        text = f"rank {self._rank}: {type(error).__name__}: {error}"[:_LONGEST_NOTE]
        try:
            self._store.compare_set(_ERROR, "", text)
        except RuntimeError:  # rank 0, which has the store, is gone
            return

    def read(self) -> str | None:
        """Return the message, or None.

        It is also None if rank 0 is gone.
        """
        try:
            return self._store.get(_ERROR).decode() if self._store.check([_ERROR]) else None
        except RuntimeError:
            return None


class Groups(NamedTuple):
    """The participating workers, and the connection of each group of workers.

    Attributes:
        workers: the number of workers and the local rank. The rank may differ from the one in PyTorch's group: the
            workers of a node have consecutive ranks here.
        connections: the connections, by the groups' names in `horovod_quant.schemes.base`.
        note: the first error.
    """

    workers: Workers
    connections: Mapping[str, Connection]
    note: Note

    def close(self) -> None:
        """Close all connections, which ends the waits of other ranks."""
        for connection in self.connections.values():
            connection.close()

    def perform(self, request: Request) -> Any:
        """Perform a scheme's request and return its output.

        Waits for the other workers. The output has numpy arrays or tensors, as the request, whose array may be
        overwritten.
        """
        connection = self.connections[request.group]
        array = request.array
        if isinstance(array, torch.Tensor):
            tensor, like = array, lambda output: output
        else:
            tensor, like = torch.from_numpy(array), torch.Tensor.numpy
        if isinstance(request, Allreduce):
            return like(connection.allreduce_(tensor, request.op))
        if isinstance(request, Alltoall):
            return [like(piece) for piece in connection.alltoall(tensor, request.splits)]
        if isinstance(request, Allgather):
            if request.ragged:
                length = torch.tensor([len(tensor)], dtype=torch.int64, device=tensor.device)
                lengths = torch.cat(connection.allgather(length)).tolist()
                return split_ragged(like(torch.cat(connection.allgather(tensor, lengths))))
            return [like(piece) for piece in connection.allgather(tensor, request.lengths)]
        raise TypeError(f"not a request that torch.distributed can perform: {request!r}")


def connect(
    group: Any = None,
    hierarchical: bool | int = False,
    backend: str = "gloo",
    ranks: Sequence[int] | None = None,
) -> Groups:
    """Create new connections between the members of a process group.

    All of them must call it.

    Args:
        group: PyTorch's process group; None for the default one.
        hierarchical: True where hosts are nodes, or the number of consecutive ranks of a node.
        backend: the backend of the new groups, ``"gloo"`` or ``"nccl"``.
        ranks: the ranks of the members to connect, including this one, in the order of their new ranks; by default
            all. Members may pass different ranks, but the members named in one list must pass the same list.

    Raises:
        ValueError: the number of workers is not a multiple of a node's workers, or arguments differ between workers.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    # Rank 0 chooses the name: a counter would differ if some ranks have connected more often.
    everyone: list[Any] = [None] * size
    # With other nodes or another backend a worker would make other connections, for which the rest would wait.
    own = {"hierarchical": repr(hierarchical), "backend": repr(backend)}
    dist.all_gather_object(everyone, (uuid.uuid4().hex, _host(), own), group=group)
    order = list(range(size)) if ranks is None else list(ranks)
    for name, value in own.items():
        if any(everyone[i][2][name] != value for i in order):
            raise ValueError(
                f"{name}={value} here, but not on all other workers; use the same arguments and environment "
                f"variables on all workers"
            )
    store = dist.PrefixStore(
        f"horovod_quant/{everyone[0][0]}/{order[0]}", dist.distributed_c10d._get_default_store()
    )
    nodes = nodes_of(order, hierarchical, [everyone[i][1] for i in order])
    position = [*itertools.chain(*nodes)].index(rank)
    workers = Workers(position, len(order), local_size=len(nodes[0]))
    timeout = timeout_of(group)

    def connection(kind: str, which: int, new_rank: int, count: int) -> Connection:
        return Connection(backend, dist.PrefixStore(f"{kind}/{which}", store), new_rank, count, timeout)

    connections = {ALL: connection(ALL, 0, workers.rank, workers.size)}
    if workers.local_size > 1:
        connections[LOCAL] = connection(LOCAL, workers.node, workers.local_rank, workers.local_size)
        connections[CROSS] = connection(CROSS, workers.local_rank, workers.node, workers.nodes)
    return Groups(workers, connections, Note(store, dist.get_rank()))


def _host() -> str:
    """Return a name that is unique to one node's workers.

    A launcher has started these workers on the node.
    """
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def timeout_of(group: Any = None) -> datetime.timedelta | None:
    """Return the timeout of a process group's collectives.

    Returns None if PyTorch does not expose it.
    """
    found = group if group is not None else dist.group.WORLD
    for device in getattr(found, "_device_types", ()):
        options = getattr(found._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, datetime.timedelta):
            return timeout
    return None
