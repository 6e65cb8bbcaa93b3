"""Performs requests over ``torch.distributed``, in process groups that belong to the package alone.

A process group orders its collectives by when they are launched. Those of PyTorch's own groups are launched by the
script's threads, so requests that another thread performs need groups that nobody else uses.
"""

from __future__ import annotations

import datetime
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist

from horovod_quant.schemes.base import (
    ALL,
    CROSS,
    LOCAL,
    UNEVEN_HOSTS,
    Allgather,
    Allreduce,
    Alltoall,
    Decoded,
    Exchange,
    Request,
    Workers,
    require_whole_nodes,
    split_gathered,
    split_points,
    split_ragged,
)

_ERROR = "error"
_LONGEST_NOTE = 1000
"""Characters of an error that other ranks are told, at most."""


class Connection:
    """One process group that nobody else uses.

    Gloo closes its sockets, which ends what other ranks wait for, only when the last reference is gone. So no method
    keeps the group in a local variable, which the traceback of an error would hold.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        store: of rank 0, with a prefix of its own.
        rank, size: of this worker in the group.
        timeout: of each collective.
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
        """The elementwise sum or maximum, in the tensor's own memory; sparse tensors can be added over Gloo."""
        if self.size > 1:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
            self._group.allreduce([tensor], options).wait()
        return tensor

    def allgather(self, tensor: torch.Tensor, lengths: Sequence[int] | None = None) -> torch.Tensor:
        """All tensors, one after another; ``lengths`` where they differ."""
        if self.size == 1:
            return tensor
        if lengths is None or len(set(lengths)) == 1:
            whole = tensor.new_empty(self.size * len(tensor))
            if len(tensor):
                self._group._allgather_base(whole, tensor).wait()
            return whole
        return torch.cat(self._exchange([tensor] * self.size, lengths))

    def alltoall(self, tensor: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
        """The pieces that are meant for this worker, in rank order; all workers have the same splits."""
        at = split_points(splits)
        pieces = [tensor[at[i] : at[i + 1]] for i in range(self.size)]
        return self._exchange(pieces, [splits[self.rank]] * self.size)

    def _exchange(self, pieces: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
        """From each worker the piece that it sends to this one."""
        size, rank = self.size, self.rank
        at = split_points([0 if i == rank else length for i, length in enumerate(lengths)])
        whole = pieces[rank].new_empty(at[-1])
        received = [whole[at[i] : at[i + 1]] for i in range(size)]
        received[rank] = pieces[rank]
        self._tag = (self._tag + 1) % 2**30
        if self._is_gloo:
            # Receives first, then one send after another, to another worker on each rank: close to what the bytes
            # need, where Gloo's own alltoall takes half as long again between four hosts.
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
            own = [len(part) if i != rank else 0 for i, part in enumerate(received)]
            self._group.alltoall_base(whole, sent, own, sizes, dist.AllToAllOptions()).wait()
        return received


class Note:
    """What the first rank that failed has left for the others, in the store that they share.

    Args:
        store: with a prefix of its own.
        rank: that the others are told.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank

    def leave(self, error: BaseException) -> None:
        """Leaves it, unless another rank has."""
        text = f"rank {self._rank}: {type(error).__name__}: {error}"[:_LONGEST_NOTE]
        try:
            self._store.compare_set(_ERROR, "", text)
        except RuntimeError:  # rank 0, which has the store, is gone
            return

    def read(self) -> str | None:
        """What was left; None if nothing was, or its keeper is gone."""
        try:
            return self._store.get(_ERROR).decode() if self._store.check([_ERROR]) else None
        except RuntimeError:
            return None


class Groups(NamedTuple):
    """Who takes part, and the connection of each group of workers.

    Attributes:
        workers: this worker among the others. Its rank may differ from the one in PyTorch's group: the workers of a
            node have consecutive ones here.
        connections: by the names in `horovod_quant.schemes.base`.
        note: for errors.
    """

    workers: Workers
    connections: Mapping[str, Connection]
    note: Note

    def close(self) -> None:
        """Ends what other ranks wait for."""
        for connection in self.connections.values():
            connection.close()

    def perform(self, request: Request) -> Any:
        """The answer to a request of a scheme; waits for the other workers. The request's array is spent.

        Its array is numpy's or a tensor, and so are those of the answer.
        """
        connection = self.connections[request.group]
        array = request.array
        if isinstance(array, torch.Tensor):
            tensor, like = array, _itself
        else:
            tensor, like = torch.from_numpy(array), torch.Tensor.numpy
        if isinstance(request, Allreduce):
            return like(connection.allreduce_(tensor, request.op))
        if isinstance(request, Alltoall):
            return [like(piece) for piece in connection.alltoall(tensor, request.splits)]
        if isinstance(request, Allgather):
            if request.ragged:
                own = torch.tensor([len(tensor)], dtype=torch.int64, device=tensor.device)
                lengths = connection.allgather(own).tolist()
                return split_ragged(like(connection.allgather(tensor, lengths)))
            return split_gathered(like(connection.allgather(tensor, request.lengths)), request)
        raise TypeError(f"not a request that torch.distributed can perform: {request!r}")

    def drive(self, exchange: Exchange, sending: Callable[[Request], None] = lambda request: None) -> Decoded:
        """Runs an exchange to its end.

        Args:
            exchange: of a scheme, on numpy arrays or tensors.
            sending: called with each request before it is performed.
        """
        answer = None
        while True:
            try:
                request = exchange.send(answer)
            except StopIteration as stop:
                return stop.value
            sending(request)
            answer = self.perform(request)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def connect(
    group: Any = None,
    hierarchical: bool | int = False,
    backend: str = "gloo",
    ranks: Sequence[int] | None = None,
) -> Groups:
    """Connects the members of a process group anew; all of them call it.

    Args:
        group: PyTorch's process group; None for the default one.
        hierarchical: True where hosts are nodes, or the number of consecutive ranks of a node.
        backend: of the new groups, ``"gloo"`` or ``"nccl"``.
        ranks: of those members that are connected, this one among them, in the order of their new ranks; by default
            all. Members may have different ones, as long as each has the ranks of those that it names.

    Raises:
        ValueError: the workers are no whole number of nodes.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    # The name is rank 0's: a counter would differ where some ranks have connected more often.
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, (uuid.uuid4().hex, _host()), group=group)
    order = list(range(size)) if ranks is None else list(ranks)
    store = dist.PrefixStore(
        f"horovod_quant/{everyone[0][0]}/{order[0]}", dist.distributed_c10d._get_default_store()
    )
    nodes = _nodes(order, [everyone[i][1] for i in order], hierarchical)
    number = next(i for i, node in enumerate(nodes) if rank in node)
    place, local_size = nodes[number].index(rank), len(nodes[number])
    workers = Workers(local_size * number + place, len(order), local_size=local_size)
    timeout = timeout_of(group)

    def connection(kind: str, which: int, own: int, count: int) -> Connection:
        return Connection(backend, dist.PrefixStore(f"{kind}/{which}", store), own, count, timeout)

    connections = {ALL: connection(ALL, 0, workers.rank, workers.size)}
    if local_size > 1:
        connections[LOCAL] = connection(LOCAL, number, place, local_size)
        connections[CROSS] = connection(CROSS, place, number, len(nodes))
    return Groups(workers, connections, Note(store, dist.get_rank()))


def _nodes(order: Sequence[int], hosts: Sequence[str], hierarchical: bool | int) -> list[list[int]]:
    """The ranks of each node."""
    if hierarchical is False:
        return [[rank] for rank in order]
    if hierarchical is not True:
        require_whole_nodes(len(order), hierarchical)
        return [list(order[i : i + hierarchical]) for i in range(0, len(order), hierarchical)]
    by_host: dict[str, list[int]] = {}
    for rank, host in zip(order, hosts):
        by_host.setdefault(host, []).append(rank)
    if len({len(node) for node in by_host.values()}) != 1:
        raise ValueError(UNEVEN_HOSTS)
    return list(by_host.values())


def _host() -> str:
    """The same for the workers that a launcher has started on one node, and for no others."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def timeout_of(group: Any = None) -> datetime.timedelta | None:
    """That of a process group's collectives; None where this PyTorch does not tell."""
    found = group if group is not None else dist.group.WORLD
    for device in getattr(found, "_device_types", ()):
        options = getattr(found._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, datetime.timedelta):
            return timeout
    return None
