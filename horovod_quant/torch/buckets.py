"""Groups of an optimizer's gradients, each launched when complete.

Three facts shape the rules. A worker's step must not wait for another worker where plain Horovod does not wait.
Gradients may arrive in a different order on every worker, in one backward pass, in several, or in ``synchronize()``.
And Horovod compresses every gradient of an optimizer's step, on every worker, before the first ``decompress``.

1. Groups are cut over the optimizer's parameters in reverse order, which all workers know
   (`horovod_quant.frontends.groups`). If the workers' orders differ, all workers learn it in their first step, and cut
   by names instead.
2. A group is submitted to the progress thread when its last gradient has arrived, in the middle of a pass, from the
   first step on. The thread then launches all of the group's stages while the script computes or waits in another
   operation. A gradient that is missing at the step's first ``decompress`` arrives on no worker; the group is then
   submitted without it.
3. The thread launches the active-rank query first. Collectives that fail if a worker has called ``hvd.join()`` wait
   for its answer. In the first step all collectives wait for it, since it also compares arguments.
4. At the end of a pass the caller sleeps, for a limited time, until the thread has finished its groups: Horovod's wait,
   which comes next, spins.
5. At any moment, workers' threads may be at different stages. This is safe, since all operations of the thread have
   names, and the script's unnamed operations are numbered separately (`horovod_quant.torch.unnamed`).
6. When a step fails on all workers, for example because gradients differ, workers may be at different stages. Each
   worker then answers every collective that others may have launched with one that makes Horovod fail it, so that no
   collective stays pending.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

import torch

from horovod_quant.frontends.groups import Member, cut
from horovod_quant.frontends.nodes import Nodes
from horovod_quant.frontends.stats import TrafficCounter
from horovod_quant.frontends.step_counts import REMEMBERED_NAMES
from horovod_quant.torch.control import ActiveRankQuery, Question
from horovod_quant.torch.exchange import Group, PendingTensor, Prospects, version_of
from horovod_quant.torch.memory import Memory
from horovod_quant.torch.ranges import named_range
from horovod_quant.torch.uncompiled import compiling, uncompiled
from horovod_quant.transports.progress import PROGRESS

_NO_PASS = -1


class Patience:
    """Adaptive time limit for an event that may never come.

    Shrinks after each timeout, grows after each success.
    """

    _LEAST = 2e-3

    def __init__(self, most: float = 1.0) -> None:
        self._most = most
        self.seconds = most

    def learn(self, in_vain: bool) -> None:
        self.seconds = max(self.seconds / 4, self._LEAST) if in_vain else min(self.seconds * 2, self._most)


PATIENCE = Patience()
"""Patience of all backward passes: another worker may run none in a step."""

_CLOSING_PATIENCE = 1.0
"""Seconds without progress after which a failed step stops waiting."""

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the calling backward pass; -1 outside any."""


def in_pass() -> bool:
    """True if the caller runs inside a backward pass."""
    return current_pass() != _NO_PASS


class _Step:
    """The gradients of one step.

    Attributes:
        query: the step's active-rank query; None for one worker.
        pending: the gradients that have not been delivered, by name.
        present: the names of each bucket's gradients that have arrived.
        groups: the groups made so far, by number.
        passes: the numbers of the step's backward passes.
        latest: the number of the pass that brought the latest gradient.
    """

    def __init__(self, query: ActiveRankQuery | None, buckets: int) -> None:
        self.query = query
        self.pending: dict[str, PendingTensor] = {}
        self.present: list[set[str]] = [set() for _ in range(buckets)]
        self.groups: dict[int, Group] = {}
        self.passes: set[int] = set()
        self.latest = _NO_PASS


class Buckets:
    """Step communication of one optimizer's gradients, or of tensors without an optimizer.

    Args:
        process_set: Horovod's workers that participate.
        nodes: returns the workers and their groups; may wait for other workers.
        memory: the kind of memory that has the gradients.
        traffic: counts the bytes that this worker sends for each gradient.
        label: part of the names of all its operations. It is the same on every worker, independent of the compressor's
            arguments, and no operations that may run at the same time have it.
        arguments: arguments that must be the same on all workers: see `horovod_quant.reductions.agreement`.
        group_bytes: bytes of gradients that share collectives.
        overlap: whether to submit groups in the backward pass, not at its end.
        expected: the gradients of each step, in the order in which they probably arrive; others share groups that start
            at the step's first ``decompress``.
        operations: number of operations that the optimizer itself launches in a step; 0 without an optimizer.
        is_under_way: returns whether Horovod has recorded a gradient of the current step.
        is_sparse: returns whether the gradient with a name is sparse, so that Horovod gathers it.
    """

    def __init__(
        self,
        process_set: Any,
        nodes: Callable[[Sequence[int] | None], Nodes],
        memory: Memory,
        traffic: TrafficCounter,
        label: str,
        arguments: Mapping[str, str],
        group_bytes: int,
        overlap: bool = True,
        expected: Sequence[Member] = (),
        operations: int = 0,
        is_under_way: Callable[[], bool] = lambda: True,
        is_sparse: Callable[[str], bool] = lambda name: False,
    ) -> None:
        from horovod.torch import mpi_ops

        self.memory = memory
        self._mpi_ops = mpi_ops
        self._process_set = process_set
        self._nodes = nodes
        self._traffic = traffic
        self._label = label
        self._arguments = arguments
        self._group_bytes = group_bytes
        self._overlap = overlap
        self._expected = expected
        self._operations = operations
        self._is_under_way = is_under_way
        self._is_sparse = is_sparse
        self._begin_session()

    def _begin_session(self) -> None:
        """Drop everything submitted before Horovod was initialized again.

        No worker will answer it.
        """
        self._session = self._mpi_ops._handle_map
        self._agreed = False  # on arguments, and on the order of gradients
        self._prospects = Prospects()
        self._question = Question(
            self._process_set, self._label, self._arguments, [member.name for member in self._expected]
        )
        self._step: _Step | None = None
        self._ending: _Step | None = None  # the step whose results the script is fetching
        self._last_passes = 1
        self._set_buckets(self._expected)

    def _set_buckets(self, expected: Sequence[Member]) -> None:
        self._names = cut(expected, self._group_bytes, self._operations)
        self._bucket_of = {name: index for index, names in enumerate(self._names) for name in names}

    # ---- gradients arrive ------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """True if a compressed gradient of this step has arrived."""
        return self._step is not None and self._session is self._mpi_ops._handle_map

    def arrive(self) -> _Step:
        """Begin a step with its first gradient.

        Launches the active-rank query. To be called for every gradient that Horovod passes to the compressor,
        compressed or not: workers whose arguments differ may compress different gradients.
        """
        if self._session is not self._mpi_ops._handle_map:
            self._begin_session()
        step = self._step
        if step is None:
            step = self._begin_step()
        # A direct call may fail on all workers while some of them compress nothing, for example integers.
        if self._operations:
            self._hand_query(step)
        return step

    def _hand_query(self, step: _Step) -> None:
        query = step.query
        if query is not None and not query.taken:
            PROGRESS.hand(query)

    def asked_before(self, name: str, tensor: torch.Tensor) -> PendingTensor | None:
        """Return the pending tensor of a submitted gradient, or None.

        To be called before a gradient is submitted. Horovod asks again if an exception, such as one raised by a signal
        handler, kept it from recording its first request.
        """
        step = self.arrive()
        number = current_pass()
        if number != step.latest:
            step = self._note_pass(step, number)
        before = step.pending.get(name)
        if before is None or before.group is None:
            return None
        if before.destination is tensor and before.version == version_of(tensor):
            return before
        self._give_up(step)
        return None

    def submit(self, pending: PendingTensor) -> None:
        """Add a gradient that has just arrived.

        Launch its group if it is complete.
        """
        step, name = self._step, pending.name
        assert step is not None
        step.pending[name] = pending
        index = self._bucket_of.get(name)
        if index is None:
            return
        present = step.present[index]
        present.add(name)
        if len(present) == len(self._names[index]) and (self._overlap or step.latest == _NO_PASS):
            self._hand_group(step, index, self._names[index])

    def _begin_step(self) -> _Step:
        query = ActiveRankQuery(self._question) if self._question.size > 1 else None
        step = self._step = _Step(query, len(self._names))
        self._ending = None
        return step

    def _give_up(self, step: _Step) -> _Step:
        """Restart the step.

        The script has reset Horovod's record of the step's gradients.
        """
        if step.groups:
            step = self._begin_step()
            self._hand_query(step)
        else:
            step.pending.clear()
            step.present = [set() for _ in self._names]
        return step

    def _note_pass(self, step: _Step, number: int) -> _Step:
        """Record that a gradient arrived in another backward pass.

        The gradient may also arrive outside any pass.
        """
        if number != _NO_PASS and number not in step.passes:
            if step.pending and not self._is_under_way():
                step = self._give_up(step)
            step.passes.add(number)
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._end_pass, step))
        step.latest = number
        return step

    def _hand_group(self, step: _Step, index: int, names: Sequence[str]) -> None:
        """Submit the group of those of the names that have arrived."""
        if index not in step.groups:
            step.groups[index] = Group(
                [step.pending[name] for name in names if name in step.pending],
                f"horovod_quant.{self._label}.{index}",
                self.memory,
                self._nodes,
                self._traffic,
                step.query,
                not self._agreed,
                self._prospects,
            )
        PROGRESS.hand(step.groups[index])

    # ---- the end of a backward pass --------------------------------------------------------------------------

    def _end_pass(self, step: _Step) -> None:
        if compiling() is not None:
            return uncompiled(self._end_pass, step)
        if step is not self._step or self._session is not self._mpi_ops._handle_map:
            return
        for index, names in enumerate(self._names):
            present = step.present[index]
            if index not in step.groups and present:
                missing = [name for name in names if name not in present]
                if all(map(self._is_sparse, missing)):
                    self._hand_group(step, index, names)
        if len(step.groups) == len(self._names) or len(step.passes) >= self._last_passes:
            self._sleep(list(step.groups.values()))

    def _sleep(self, groups: Sequence[Group]) -> None:
        """Sleep until groups have ended, with a time limit.

        Another worker may be late.
        """
        self._prospects.awaited = True
        late = next((group for group in groups if not group.ended), None)
        if late is not None:
            begin = time.perf_counter()
            with late.stage_range("wait"):
                done = PROGRESS.wait(groups, lambda: all(group.ended for group in groups), PATIENCE.seconds)
            self._traffic.seconds_waited += time.perf_counter() - begin
            PATIENCE.learn(in_vain=not done)

    # ---- decompress ------------------------------------------------------------------------------------------

    def close(self, pending: PendingTensor) -> None:
        """Close the step of a gradient and wait for the active-rank query.

        To be called before anything else when a result is requested: all gradients of the step have arrived.

        Raises:
            RuntimeError: the workers have different arguments.
        """
        step = self._step
        if step is not None and step.pending.get(pending.name) is pending:
            self._close(step)
        step = self._ending
        query = None if step is None else step.query
        if query is not None:
            self._wait_for(query)
            if query.error is not None:
                raise query.error

    def finish(self, pending: PendingTensor) -> Group:
        """Wait for a gradient's group and return it.

        Raises:
            RuntimeError: some workers have called ``hvd.join()`` where none may.
            HorovodInternalError: a collective has failed.
        """
        group = pending.group
        assert group is not None, f"{pending.name}: its step was given up"
        self._wait_for(group)
        if group.void:
            self._cut_by_name()
            group = pending.group
            assert group is not None
            self._wait_for(group)
        # A signal handler's exception in a wait does not cancel the step: the script may synchronize again.
        if group.error is not None:
            self._cancel(group.error)
            raise group.error
        return group

    def fail(self, pending: PendingTensor, error: Exception) -> None:
        """Cancel the step because the workers reduced different gradients under one name.

        To be called in place of `finish`. All workers detect it, but others may detect it at another gradient first,
        and wait for this one. So the step ends on all workers.
        """
        step = self._ending
        if step is not None and not self._agreed and step.query is not None and not step.query.same_order:
            self._cut_by_name()  # as the other workers do
        self._cancel(error)

    def _cancel(self, error: BaseException) -> None:
        """Cancel all collectives of a step that has failed on all workers."""
        self._prospects.awaited = False
        step, self._ending = self._ending, None
        groups = [] if step is None else step.groups.values()
        closings = [closing for group in groups if (closing := group.cancel(error)) is not None]
        # Otherwise the script could call hvd.join() before they end. Limited, since another worker may be late.
        PROGRESS.wait(closings, lambda: all(closing.ended for closing in closings), _CLOSING_PATIENCE)

    def _close(self, step: _Step) -> None:
        """Submit the remaining groups: all gradients of the step have arrived."""
        self._prospects.awaited = True
        self._hand_query(step)
        for index, present in enumerate(step.present):
            if present:
                self._hand_group(step, index, self._names[index])
        self._hand_rest(step, [name for name in step.pending if name not in self._bucket_of])
        self._last_passes = len(step.passes)
        self._ending, self._step = step, None

    def _hand_rest(self, step: _Step, names: Iterable[str]) -> None:
        """Submit gradients in groups that are cut in alphabetical order of names."""
        pending = [step.pending[name] for name in sorted(names)]
        members = [Member(each.name, each.scheme, each.bytes) for each in pending]
        groups = cut(members, self._group_bytes, self._operations)
        for index, group in enumerate(groups, start=len(self._names)):
            self._hand_group(step, index, group)

    def _wait_for(self, job: Group | ActiveRankQuery) -> None:
        if not job.has_result:
            with job.stage_range("wait") if isinstance(job, Group) else named_range("wait", job.name):
                PROGRESS.wait([job], lambda: job.has_result)

    def _cut_by_name(self) -> None:
        """Cut groups in alphabetical order of names, because the workers' orders differ."""
        step = self._ending
        assert step is not None
        self._agreed = True
        self._set_buckets(sorted(self._expected, key=lambda member: member.name))
        step.present = []
        step.groups = {}
        self._hand_rest(step, step.pending)

    def delivered(self, pending: PendingTensor, factor: float) -> None:
        """Record that a gradient has been decoded.

        The last one ends the step.

        Args:
            pending: the gradient.
            factor: the factor by which Horovod multiplied the sum.
        """
        self._agreed = True
        self._prospects.factor = factor
        step = self._ending
        if step is None:
            return
        step.pending.pop(pending.name, None)
        if not step.pending:
            self._ending = None
            self._prospects.awaited = False


class DirectBuckets(threading.local):
    """Buckets of direct calls, by their names.

    Keeps a limited number of recently used names, since a script may use a new name for each call. Each thread has a
    separate object: the kept names must be the same on all workers, and a thread makes its calls in the same order on
    all of them.

    Args:
        first_step: the initial count of each thread.

    Attributes:
        first_step: the count from which names start that are not kept.
    """

    def __init__(self, first_step: int) -> None:
        self.first_step = first_step
        self._buckets: OrderedDict[str, dict[int, Buckets]] = OrderedDict()

    def used(self, name: str, forget: Callable[[str], None]) -> dict[int, Buckets]:
        """Return the buckets of a name, now the most recently used.

        Keys are the numbers of process sets. Call it for each tensor of an operation. Beyond `REMEMBERED_NAMES` names
        it drops the least recently used one.

        Args:
            name: the operation's name.
            forget: called with the dropped name.
        """
        found = self._buckets.setdefault(name, {})
        self._buckets.move_to_end(name)
        if len(self._buckets) > REMEMBERED_NAMES:
            forget(self._buckets.popitem(last=False)[0])
        return found
