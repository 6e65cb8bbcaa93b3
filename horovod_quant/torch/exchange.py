"""Reduction of one group of gradients over Horovod's asynchronous collectives."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Callable

import torch

from horovod_quant.frontends.nodes import Nodes
from horovod_quant.frontends.stats import TrafficCounter
from horovod_quant.kernels.buffer_view import BufferView
from horovod_quant.schemes.base import (
    LOCAL,
    BinaryState,
    Collective,
    Decoded,
    Gradient,
    Scheme,
    Workers,
)
from horovod_quant.torch.collectives import (
    active_workers,
    adapted,
    collect,
    launch,
    launch_nothing,
    needs_all_workers,
)
from horovod_quant.torch.control import ActiveRankQuery, HorovodJob
from horovod_quant.torch.device import Copying
from horovod_quant.torch.memory import Destination, Memory
from horovod_quant.torch.ranges import named_range
from horovod_quant.transports.progress import PROGRESS
from horovod_quant.transports.traffic import sent_bytes

if TYPE_CHECKING:
    from horovod_quant.torch.tensor_plan import TensorPlan

OpenState = tuple[BinaryState, Sequence[tuple[torch.Tensor, torch.Tensor]]]


class PendingTensor(Destination):
    """A parameter's gradient that waits for its group; reused in every step.

    Between ``compress`` and ``decompress`` Horovod keeps it as the gradient's context.

    Args:
        plan: the gradient's plan.
        gradient: the scheme's input, without its state.
        scheme: the scheme that reduces it.
        on_start: called with the step once, when the group's collectives start.
        open_state: returns the state of the elements ``start`` to ``stop - 1``. Its third argument is the process set
            whose members together have the whole state; None if this worker has it.

    Attributes:
        name: the gradient's name.
        bytes: size of its elements.
        version: PyTorch's version counter of the gradient tensor.
        destination, array: the memory for the result, see `horovod_quant.torch.memory.Destination`.
        state_copies: pairs (stored state, the copy that the reduction updates).
        taken: what `Memory.taken` has returned.
        group: the group that reduces it, as member number ``index``; None before.
        fingerprint: the fingerprint in the control tensor.
        control_tensor: the tensor that Horovod reduces in place of the gradient.
    """

    # No object is made for a gradient after its first step: see `Gradient`.
    __slots__ = (
        "_on_start", "_open_state", "bytes", "control_tensor", "fingerprint", "gradient", "group", "index", "name",
        "plan", "scheme", "state_copies", "taken", "version",
    )  # fmt: skip

    control_tensor: torch.Tensor

    def __init__(
        self,
        plan: TensorPlan,
        gradient: Gradient,
        scheme: Scheme,
        on_start: Callable[[int], None],
        open_state: Callable[[int, int, Any], OpenState] | None = None,
    ) -> None:
        self.plan = plan
        self.fingerprint = plan.fingerprint
        self.gradient = gradient
        self.name = gradient.keys.name
        self.bytes = gradient.buffer.nbytes
        self.version = 0
        self.taken: Any = None
        self.scheme = scheme
        self._on_start = on_start
        self._open_state = open_state
        self.state_copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self.group: Group | None = None
        self.index = 0

    def empty(self) -> None:
        """Release the delivered gradient, and its group, which refers to this object."""
        if type(self.taken) is BufferView:
            self.taken.release()
        else:
            self.taken = None
        del self.gradient.buffer, self.destination, self.array
        self.gradient.state = self.group = None
        self.state_copies = ()

    def opened(self, scheme: Scheme, nodes: Nodes) -> Gradient:
        """Return the gradient with the state of its local elements.

        To be called as its collectives start.
        """
        self._on_start(self.gradient.step)
        if self._open_state is not None:
            start, stop = scheme.owned(self.name, self.gradient.elements, nodes.workers)
            others = nodes.process_sets[LOCAL] if nodes.workers.local_size > 1 else None
            self.gradient.state, self.state_copies = self._open_state(start, stop, others)
        return self.gradient


def version_of(tensor: torch.Tensor) -> int:
    """Return PyTorch's version counter, which tensors of ``torch.inference_mode`` do not have."""
    return 0 if tensor.is_inference() else tensor._version


_SMALL = 2**16
"""Mean gradient bytes below which decoding a group at once is faster."""


_STALLED = (
    "{names}: no progress for {seconds} s, because other workers have not submitted these gradients yet. The reduction "
    "continues once every worker reaches them, in a backward pass or in step() or synchronize() of this optimizer. It "
    "cannot continue if a worker has skipped that call, has left the training loop without hvd.join(), or waits for a "
    "Horovod operation, named or not, that this worker starts only after its own step(), such as the step() of another "
    "optimizer. Call step() and other Horovod operations in the same order on all workers"
)


class Prospects:
    """Expectations that the groups of an optimizer's steps share.

    Attributes:
        factor: the factor by which Horovod multiplied the last sum, and probably the next one; None before the first.
        awaited: whether a caller waits for a group, or soon will.
    """

    def __init__(self) -> None:
        self.factor: float | None = None
        self.awaited = False


class Group(HorovodJob):
    """Gradients that share collectives, and the progress of their reduction.

    A caller creates it when the gradients have arrived, and delivers them once it has a result. In between it belongs
    to the progress thread, whose calls no signal handler interrupts.

    Args:
        members: the gradients, in the same order on every worker.
        name: the prefix of its collectives' names, the same on every worker.
        memory: the kind of memory that has the gradients.
        nodes: returns Horovod's workers that participate, given the active ranks if they are known; may wait for them.
        traffic: counts the bytes that this worker sends for each gradient.
        query: the step's active-rank query, with the workers that have not called ``hvd.join()``; None for one worker.
        must_agree: whether to wait for the query in any case, because the workers' arguments may still differ; else
            only where `needs_all_workers` is true.
        prospects: the optimizer's expectations.

    Attributes:
        void: True if nothing was sent, because the workers have cut their gradients into groups by different orders.
    """

    def __init__(
        self,
        members: Sequence[PendingTensor],
        name: str,
        memory: Memory,
        nodes: Callable[[Sequence[int] | None], Nodes],
        traffic: TrafficCounter,
        query: ActiveRankQuery | None,
        must_agree: bool,
        prospects: Prospects,
    ) -> None:
        super().__init__(name)
        self.names = tuple(member.name for member in members)
        self._members = members
        mean_bytes = sum(member.bytes for member in members) / len(members)
        self._decodes_together = memory.decodes_together or mean_bytes < _SMALL
        self._memory = memory
        self._find_nodes = nodes
        self._decodes_early = False
        self._traffic = traffic
        self._query = query
        self._must_agree = must_agree
        self._prospects = prospects
        self._ready = memory.mark()
        self._has_begun = False
        self._exchange: Any = None
        self._decoded: Decoded | None = None
        self._stage = 0
        self._stages = 0
        self._request: Any = None
        self._handle: Any = None
        self._copying: Copying | None = None
        self._delivered: dict[int, float] = {}
        self._delivering = threading.Lock()
        self._is_handed_over = False
        self._cancelled_by: BaseException | None = None
        self._closing: Closing | None = None
        self._failed = False
        self.void = False
        for index, member in enumerate(members):
            member.group, member.index = self, index

    @property
    def has_result(self) -> bool:
        return self._decoded is not None or self.ended

    # ---- what the progress thread calls ----------------------------------------------------------------------

    def ready(self) -> bool:
        if self._cancelled_by is None:
            if self._exchange is None:
                return self.may_begin() and self._knows_who_is_active()
            if self._copying is not None:
                return self._copying.has_arrived()
        return self._handle is None or self._mpi_ops.poll(self._handle)

    def _knows_who_is_active(self) -> bool:
        query = self._query
        if query is None or query.ended:
            return True
        return not (self._must_agree or self._needs_all_workers)

    def advance(self) -> bool:
        """Advance by one stage.

        Begins, or collects a collective's output and launches the next one, or decodes the result.

        Raises:
            RuntimeError: the workers' arguments differ, or one of a hierarchical reduction has called ``hvd.join()``.
            HorovodInternalError: a collective has failed, on all workers.
        """
        try:
            return self._advance()
        except Exception:
            if self._has_begun:
                self._close()
            raise

    def _advance(self) -> bool:
        with torch.no_grad():
            if self._cancelled_by is not None:
                if self._handle is not None:
                    self._synchronized()
                raise self._cancelled_by
            if self._exchange is None:
                with self.stage_range("encode"):
                    return self._begin()
            if self._decoded is not None:
                self.decode_all()
                return True
            answer = None
            if self._copying is not None:
                self._copying = None
            else:
                answer = collect(self._request, self._synchronized())
            with self.stage_range("compute"):
                self._resume(answer)
        return self._is_over()

    def _synchronized(self) -> Any:
        """Return the output of the collective that is under way."""
        handle, self._handle = self._handle, None
        try:
            return self._mpi_ops.synchronize(handle)
        except BaseException:
            self._failed = True
            raise

    def _begin(self) -> bool:
        """Encode, and launch the first collective.

        Return True if nothing remains to do.
        """
        query = self._query
        if query is not None and query.ended:
            if query.error is not None:
                raise query.error
            if self._must_agree and not query.same_order:
                self.void = True
                return True
        nodes, workers = self._nodes, self._workers()
        members, memory = self._members, self._memory
        self._has_begun = True
        scheme = members[0].scheme.for_workers(workers)
        collectives, rewritten = adapted(members, nodes, memory, workers)
        self._stages = len(collectives)
        memory.wait_for(self._ready)
        with memory.working():  # it may copy states
            gradients = [member.opened(scheme, nodes) for member in members]
        some_are_gone = workers.size < nodes.workers.size
        self._exchange = rewritten(memory.resumed(memory.begun(scheme, gradients, workers), some_are_gone))
        self._decodes_early = memory.decodes_early(members)
        self._resume(None)
        return self._is_over()

    @functools.cached_property
    def _nodes(self) -> Nodes:
        query = self._query
        return self._find_nodes(query.ranks if query is not None and query.ended else None)

    @functools.cached_property
    def _needs_all_workers(self) -> bool:
        return needs_all_workers(self._members, self._nodes, self._memory)

    def _workers(self) -> Workers:
        """Return the participating workers.

        These are only the active ones if an inactive one would make collectives fail.
        """
        if self._query is not None and self._needs_all_workers:
            return active_workers(self._query.ranks, self._nodes)
        return self._nodes.workers

    def _is_over(self) -> bool:
        """True if the progress thread is done.

        It decodes early only with a known factor.
        """
        if self._decoded is None:
            return False
        self.urgent = False
        return self._prospects.factor is None or not self._decodes_early

    def decode_all(self) -> None:
        """Decode with the factor of the step before.

        `deliver` decodes again if the factor differs.
        """
        factor = self._prospects.factor
        assert factor is not None
        with self._delivering:
            if not self._delivered:
                self._decode(range(len(self._members)), factor)

    def stalled(self, seconds: float) -> str | None:
        if not self._prospects.awaited:
            return None
        more = f" and {len(self.names) - 1} more gradients" if len(self.names) > 1 else ""
        return _STALLED.format(names=f"the reduction of {self.names[0]}{more}", seconds=f"{seconds:.0f}")

    def stages_to_close(self) -> Sequence[tuple[str, Collective, Any]]:
        """Return the next collectives, with names and process sets.

        Other workers may have launched them. To be called after this group has ended.
        """
        if self.void:
            return []
        try:
            nodes = self._nodes
        except RuntimeError:  # the same on all workers, none of which has begun
            return []
        collectives, _ = adapted(self._members, nodes, self._memory, self._workers())
        left = list(enumerate(collectives))[self._stage :]
        if nodes.workers.local_size == 1:
            # All workers are at this collective or the one before, and a failed one has failed on all of them.
            left = [] if self._failed else left[:1]
        return [(f"{self.name}.{i}", each, nodes.process_sets[each.group]) for i, each in left]

    @property
    def _scheme(self) -> Scheme:
        return self._members[0].scheme

    def stage_range(self, what: str) -> AbstractContextManager[Any]:
        """Return the named range of a part of the present stage."""
        return named_range(what, self.name, self._scheme, self._stage)

    # ---- what callers call -----------------------------------------------------------------------------------

    def cancel(self, error: BaseException) -> Closing | None:
        """Launch no further collectives, since the step has failed.

        Return the job that ends others' collectives.
        """
        self._cancelled_by = error
        self._close()
        return self._closing

    def _close(self) -> None:
        if self._closing is None and self._query is not None:
            self._closing = Closing(self, self._query)
            PROGRESS.hand(self._closing)

    def deliver(self, index: int, factor: float) -> None:
        """Decode a member's sum times ``factor`` into its destination.

        Decodes all members where that takes a single kernel launch, or where they are small.
        """
        memory = self._memory
        if self._delivered.get(index) != factor:
            self._is_handed_over = False
            # The caller's stream may still read the destinations.
            memory.catch_up()
            with self._delivering:
                together = self._decodes_together and not self._delivered
                indices = range(len(self._members)) if together else [index]
                self._decode([i for i in indices if self._delivered.get(i) != factor], factor)
        if not self._is_handed_over:  # also after an exception that came before
            memory.hand_over()
            self._is_handed_over = True

    def _decode(self, indices: Sequence[int], factor: float) -> None:
        decoded = self._decoded
        assert decoded is not None
        if not indices:
            return
        with named_range("decode", self.name, self._scheme), self._memory.working():
            # Inside working(): on a GPU the kernels' stream may write this number, which others may read too early.
            scaled = factor / int(decoded.active)
            self._memory.decode(decoded, indices, scaled, [self._members[i] for i in indices])
        # Not before: kernels of a GPU are launched at the end of working().
        self._delivered.update(dict.fromkeys(indices, factor))

    def _resume(self, answer: Any) -> None:
        try:
            request: Any = self._exchange.send(answer)
        except StopIteration as stop:
            self._decoded = decoded = stop.value
            for member, buckets in zip(self.names, decoded.exchanged_again):
                self._traffic.count_again(member, buckets)
            self._request = self._handle = None
            assert self._stage <= self._stages, "a scheme launched more collectives than it declares"
            return
        if isinstance(request, Copying):
            self._copying = request
            return
        sent = sent_bytes(request, self._nodes.workers.size_of(request.group))
        self._traffic.count_group(self.names, sent)
        name = f"{self.name}.{self._stage}"
        with self._memory.working():
            self._handle = launch(request, name, self._nodes.process_sets[request.group])
        self._request = request
        self._stage += 1


class Closing(HorovodJob):
    """Job that ends collectives which others launched for a cancelled group.

    Such collectives must not stay pending: a later one of the same name would match them, and Horovod crashes if those
    workers then call ``hvd.join()``. This job launches arrays of a shape that no group uses, so that Horovod fails the
    collective on all workers. If all workers were at the same collective, all launch this one, and it succeeds.

    Args:
        group: the cancelled group; this job begins when it has ended.
        query: the group's active-rank query.
    """

    def __init__(self, group: Group, query: ActiveRankQuery) -> None:
        super().__init__(group.name)
        self._group = group
        self._query = query
        self._handles: list[Any] | None = None

    def ready(self) -> bool:
        if self._handles is None:
            return self._query.ended and self.may_begin()
        return all(map(self._mpi_ops.poll, self._handles))

    def advance(self) -> bool:
        """Launch the collectives; when they are complete, end."""
        mpi_ops = self._mpi_ops
        if self._handles is None:
            if self._query.error is not None:  # all workers had this error before any of them had begun
                return True
            self._handles = [launch_nothing(*stage) for stage in self._group.stages_to_close()]
            return not self._handles
        for handle in self._handles:
            with contextlib.suppress(mpi_ops.HorovodInternalError):
                mpi_ops.synchronize(handle)  # the failure ends others' collectives
        return True
