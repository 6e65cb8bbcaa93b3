"""Runs the exchange of one group of gradients over Horovod's asynchronous collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple, Union

import numpy as np
import torch

from horovod_quant.frontends.nodes import Nodes
from horovod_quant.frontends.stats import TrafficCounter
from horovod_quant.kernels.buffer_view import BufferView
from horovod_quant.schemes.base import (
    LOCAL,
    Allgather,
    Allreduce,
    Alltoall,
    BinaryState,
    Decoded,
    Gradient,
    Scheme,
    Workers,
    split_gathered,
)
from horovod_quant.torch.device_memory import Copying
from horovod_quant.torch.memory import Memory
from horovod_quant.torch.waiting import wait
from horovod_quant.transports.emulate_with_allreduce import collectives_of_emulation, emulate_with_allreduce
from horovod_quant.transports.pairwise_via_allreduce import gathers_take_turns, pairwise_via_allreduce
from horovod_quant.transports.split_sums import group_of_sums, is_faster, split_sums
from horovod_quant.transports.traffic import sent_bytes

OpenState = tuple[BinaryState, Sequence[tuple[torch.Tensor, torch.Tensor]]]


class Member(NamedTuple):
    """What groups are made from: a gradient's name, scheme and bytes."""

    name: str
    scheme: Scheme
    bytes: int


class Submission:
    """A parameter's gradient that waits for its exchange: one step's after another's.

    Args:
        gradient: what the scheme gets, but for its state.
        scheme: the scheme that exchanges it.
        open_state: gives the state of the elements from the first number to before the second, when it is also told
            the process set that keeps the state of all.

    Attributes:
        name: of the gradient.
        bytes: of its elements.
        destination, array: what the result is decoded into, see `horovod_quant.torch.memory.Place`.
        state_copies: pairs (the state where it is kept, the copy that the exchange updates).
        taken: what `Memory.taken` has returned.
    """

    # No object is made for a gradient after its first step: see `Gradient`.
    __slots__ = (
        "_open_state", "array", "bytes", "destination", "gradient", "group", "index", "name", "scheme", "state_copies",
        "taken",
    )  # fmt: skip

    destination: torch.Tensor

    def __init__(
        self,
        gradient: Gradient,
        scheme: Scheme,
        open_state: Callable[[int, int, Any], OpenState] | None = None,
    ) -> None:
        self.gradient = gradient
        self.name = gradient.keys.name
        self.bytes = gradient.held.nbytes
        self.taken: Any = None
        self.scheme = scheme
        self._open_state = open_state
        self.state_copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self.group: Group | None = None
        self.index = 0

    def fill(self, values: Any, step: int) -> None:
        """Takes the elements of another step's gradient, after `empty`."""
        self.gradient.held = values
        self.gradient.step = step

    def decode_into(self, destination: torch.Tensor, array: Any) -> None:
        self.destination = destination
        self.array = array

    def empty(self) -> None:
        """Lets go of a gradient whose result has been delivered, and of the group, which refers to this."""
        if type(self.taken) is BufferView:
            self.taken.let_go()
        else:
            self.taken = None
        del self.gradient.held, self.destination, self.array
        self.gradient.state = self.group = None
        self.state_copies = ()

    def opened(self, scheme: Scheme, nodes: Nodes) -> Gradient:
        """The gradient with its state, of what this worker keeps."""
        if self._open_state is not None:
            start, stop = scheme.owned(self.name, self.gradient.elements, nodes.workers)
            others = nodes.process_sets[LOCAL] if nodes.workers.local_size > 1 else None
            self.gradient.state, self.state_copies = self._open_state(start, stop, others)
        return self.gradient


_SMALL = 2**16
"""Bytes: where gradients have fewer, decoding a group at once saves more than waiting for them one by one."""

AnyMember = Union[Member, Submission]


class Group:
    """Gradients that share their collectives, and where their exchange stands.

    Args:
        members: the gradients, in the same order on every worker.
        name: of the group's collectives, the same on every worker.
        memory: where the gradients are.
        nodes: Horovod's workers that take part.
        traffic: counts what this worker sends for each gradient.
        present: tells the ranks of those workers that have not called ``hvd.join()``, for which it may wait; asked only
            where `needs_everybody` says so.

    Raises:
        RuntimeError: a worker of a hierarchical exchange has called ``hvd.join()``.
    """

    def __init__(
        self,
        members: Sequence[Submission],
        name: str,
        memory: Memory,
        nodes: Nodes,
        traffic: TrafficCounter,
        present: Callable[[], Sequence[int]],
    ) -> None:
        import horovod.torch as hvd

        self.names = tuple(member.name for member in members)
        self._members = members
        mean_bytes = sum(member.bytes for member in members) / len(members)
        self._decodes_together = memory.decodes_together or mean_bytes < _SMALL
        self._has_ended = hvd.poll
        self._name = name
        self._memory = memory
        self._nodes = nodes
        self._traffic = traffic
        self._decoded: Decoded | None = None
        self._stage = 0
        self._request: Any = None
        self._handle: Any = None
        self._copying: Copying | None = None
        self._delivered: dict[int, float] = {}
        self.handles: list[int] = []

        workers = nodes.workers
        if needs_everybody(members, nodes, memory):
            workers = _those(present(), nodes)
        scheme = members[0].scheme.for_workers(workers)
        self._stages = stages_of(members, nodes, memory)
        gradients = [member.opened(scheme, nodes) for member in members]
        memory.catch_up()
        some_are_gone = workers.size < nodes.workers.size
        exchange = memory.resumed(memory.begun(scheme, gradients, workers), some_are_gone)
        if some_are_gone:
            self._stages = collectives_of_emulation(scheme)
            exchange = emulate_with_allreduce(exchange, workers)
        elif adding := _split_sums_among(members, scheme, workers, memory):
            exchange = split_sums(exchange, adding)
        elif gathers_take_turns(mpi=hvd.mpi_enabled(), on_device=memory.takes_tensors):
            exchange = pairwise_via_allreduce(exchange, workers)
        self._exchange = exchange
        for index, member in enumerate(members):
            member.group, member.index = self, index

    @property
    def launched(self) -> int:
        """How many collectives have been launched."""
        return self._stage

    @property
    def in_last_stage(self) -> bool:
        """Whether every collective has been launched, or will be when what it sends has been copied."""
        return self._stage + (self._copying is not None) == self._stages

    @property
    def all_launched(self) -> bool:
        return self._stage == self._stages

    def start(self) -> None:
        """Computes and launches the first stage."""
        self._resume(None)

    def launch_copied(self) -> None:
        """Launches the collective whose input is being copied, if there is one; waits for the copy."""
        if self._copying is not None:
            self._copying = None
            self._resume(None)

    def poll(self) -> bool:
        """Whether the stage in flight has ended; waits for nothing."""
        if self._copying is not None:
            if not self._copying.has_arrived():
                return False
            self.launch_copied()
        return self._handle is None or self._has_ended(self._handle)

    def advance(self) -> None:
        """Waits for the stage in flight; computes and launches the next one, if there is one."""
        self.launch_copied()
        with self._memory.working():
            answer = _collect(self._request, self._handle)
        self._resume(answer)

    def decoded(self) -> Decoded:
        """The result; waits for the last stage."""
        if self._decoded is None:
            self.advance()
            assert self._decoded is not None, "a scheme launched more collectives than it declares"
        return self._decoded

    def deliver(self, index: int, factor: float) -> None:
        """Decodes a member's sum, times ``factor``, into its destination; the others', too, if that is one launch."""
        if self._delivered.get(index) == factor:
            return
        if self._decodes_together and not self._delivered:
            self.deliver_all(factor)
        self._deliver([index], factor)

    def deliver_all(self, factor: float) -> None:
        """Does so with every member, before it is asked for; again then, should the factor turn out to be another."""
        self._deliver(range(len(self._members)), factor)

    def _deliver(self, indices: Iterable[int], factor: float) -> None:
        decoded = self.decoded()
        wanted = [i for i in indices if self._delivered.get(i) != factor]
        if not wanted:
            return
        # What the caller's stream still reads of the destinations comes first.
        self._memory.catch_up()
        with self._memory.working():
            # On a GPU the kernels' stream may write this number: another one may read it too early.
            scaled = factor / int(decoded.active)
            places = [self._members[i] for i in wanted]
            if len(places) == len(self._members):
                self._memory.write_all(decoded, scaled, places)
            else:
                for i, place in zip(wanted, places):
                    self._memory.write(decoded, i, scaled, place)
            self._delivered.update(dict.fromkeys(wanted, factor))
        self._memory.hand_over()

    def _resume(self, answer: Any) -> None:
        try:
            request: Any = self._exchange.send(answer)
        except StopIteration as stop:
            self._decoded = decoded = stop.value
            for member, buckets in zip(self.names, decoded.exchanged_again):
                self._traffic.count_again(member, buckets)
            self._request = self._handle = None
            return
        if isinstance(request, Copying):
            self._copying = request
            return
        sent = sent_bytes(request, self._nodes.workers.size_of(request.group))
        varies = isinstance(request, Allgather) and request.ragged
        count = self._traffic.count_all if varies else self._traffic.count_group
        count(self.names, sent)
        name = f"{self._name}.{self._stage}"
        with self._memory.working():
            self._handle = _launch(request, name, self._nodes.process_sets[request.group])
        self.handles.append(self._handle)
        self._request = request
        self._stage += 1


def needs_everybody(members: Sequence[AnyMember], nodes: Nodes, memory: Memory) -> bool:
    """Whether an exchange fails if some worker has called ``hvd.join()``: Horovod then lets it add zeros to sums."""
    workers = nodes.workers
    if workers.size == 1:
        return False
    scheme = members[0].scheme.for_workers(workers)
    if any(collective.needs_everybody for collective in scheme.collectives):
        return True
    return _split_sums_among(members, scheme, workers, memory) > 0


def stages_of(members: Sequence[AnyMember], nodes: Nodes, memory: Memory) -> int:
    """How many collectives a group's exchange takes, one after another, while every worker is there."""
    workers = nodes.workers
    scheme = members[0].scheme.for_workers(workers)
    return len(scheme.collectives) + (_split_sums_among(members, scheme, workers, memory) > 0)


def _split_sums_among(members: Sequence[AnyMember], scheme: Scheme, workers: Workers, memory: Memory) -> int:
    """How many workers add integers, if that is faster in two steps; else 0."""
    import horovod.torch as hvd

    group = group_of_sums(scheme)
    if group is None or memory.takes_tensors:
        return 0
    adding = workers.size_of(group)
    own_bytes = sum(member.bytes for member in members) * adding // workers.size
    return adding if is_faster(adding, own_bytes) and hvd.mpi_enabled() else 0


def _those(ranks: Sequence[int], nodes: Nodes) -> Workers:
    """The workers that are there, numbered anew."""
    workers = nodes.workers
    if len(ranks) == workers.size:
        return workers
    if workers.local_size > 1:
        gone = sorted(set(range(workers.size)) - set(ranks))
        raise RuntimeError(
            f"hierarchical: workers {gone} have called hvd.join(), and their nodes' groups cannot continue "
            f"without them; use hierarchical=False, or the same number of batches on every worker"
        )
    return Workers(ranks.index(workers.rank), len(ranks), workers.custom_reduction)


def _launch(request: Any, name: str, process_set: Any) -> Any:
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


def _collect(request: Any, handle: Any) -> Any:
    import horovod.torch as hvd

    wait(handle)
    output = hvd.synchronize(handle)
    if isinstance(request, Allreduce):
        return _like(request, output)
    if isinstance(request, Allgather):
        return split_gathered(_like(request, output), request)
    received, lengths = output
    at = np.concatenate([[0], np.cumsum(lengths.numpy())])
    array = _like(request, received)
    return [array[at[i] : at[i + 1]] for i in range(len(lengths))]


def _like(request: Any, output: torch.Tensor) -> Any:
    """What Horovod returned, as the request's array."""
    return output if isinstance(request.array, torch.Tensor) else output.numpy()
