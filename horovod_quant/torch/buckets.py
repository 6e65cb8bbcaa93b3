"""The groups of an optimizer's gradients: fixed beforehand, handed to the progress thread as soon as each is complete.

Three facts shape the rules. No worker's step may wait for another's where Horovod alone does not wait. Gradients may
arrive in another order on every worker, in one backward pass, in several, or in ``synchronize()``. And Horovod asks for
the compression of every gradient of an optimizer's step, on every worker, before the first ``decompress``.

1. Groups are cut over the optimizer's own parameters, in the reverse of their order there, which all workers know
   (`horovod_quant.frontends.groups`). Should the workers' orders differ, by names: all learn it in their first step.
2. A group is handed to the progress thread when its last gradient has come, in the middle of a pass, in the first step
   as in any other. Nothing else is needed: the thread launches its stages while the script computes, or waits in an
   operation of its own. What a group lacks at the step's first ``decompress`` does not come on any worker; it is handed
   then as it is.
3. The thread launches first the active-rank query. Exchanges that fail if a worker has called ``hvd.join()`` wait for
   its answer, and in the first step all do, since it also compares arguments.
4. At the end of a pass the caller sleeps until the thread has done what it was handed, with a limit: Horovod's own
   wait, which comes next, spins.
5. How far the thread has got differs between workers at any moment. It does not matter, since all its operations have
   names, and the script's unnamed ones are numbered by themselves (`horovod_quant.torch.unnamed`).
6. Where a step fails on all workers, such as by gradients that differ, they may have come to different stages. Each
   takes its part in what others may have launched by something that makes Horovod fail it: nothing is left over.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import torch

from horovod_quant.frontends.groups import Member, cut
from horovod_quant.frontends.nodes import Nodes
from horovod_quant.frontends.stats import TrafficCounter
from horovod_quant.frontends.step_counts import REMEMBERED_NAMES
from horovod_quant.torch.control import ActiveRankQuery, Question
from horovod_quant.torch.exchange import Group, PendingTensor, Prospects
from horovod_quant.torch.memory import Memory
from horovod_quant.torch.ranges import named_range
from horovod_quant.torch.uncompiled import compiling, uncompiled
from horovod_quant.torch.waiting import Patience
from horovod_quant.transports.progress import PROGRESS

_NO_PASS = -1

PATIENCE = Patience()
"""Of all backward passes: another worker may run none in a step."""

_CLOSING_PATIENCE = 1.0
"""Seconds without progress that the end of a step that has failed waits for other workers."""

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that calls; -1 outside of any."""


def in_pass() -> bool:
    """Whether a backward pass calls."""
    return current_pass() != _NO_PASS


class _Step:
    """One step's gradients.

    Attributes:
        query: who is active; None for one worker.
        pending: the gradients that have not been delivered, by name.
        present: those of each bucket, by name.
        groups: that have been made, by number.
        passes: the numbers of the step's backward passes.
        latest: the number of the pass that brought the latest gradient.
    """

    def __init__(self, query: ActiveRankQuery | None, buckets: int) -> None:
        self.query = query
        self.pending: dict[str, PendingTensor] = {}
        self.present: list[dict[str, PendingTensor]] = [{} for _ in range(buckets)]
        self.groups: dict[int, Group] = {}
        self.passes: set[int] = set()
        self.latest = _NO_PASS


class Buckets:
    """The exchanges of one optimizer's gradients, step by step; or those of tensors that no optimizer gave.

    Args:
        process_set: Horovod's workers that participate.
        nodes: tells the workers and their groups, for which it may wait.
        memory: where the gradients are.
        traffic: counts what this worker sends for each gradient.
        label: of all its operations, the same on every worker whatever arguments its compressor has, and of no others
            that may be under way at the same time.
        arguments: that must be the same on all workers: see `horovod_quant.reductions.agreement`.
        group_bytes: bytes of gradients that share collectives.
        overlap: whether to hand groups over in the backward pass, not at its end.
        expected: the gradients of each step, in the order in which they probably come; others share groups that start
            when the step's first result is asked for.
        operations: number of operations that the optimizer itself takes in a step; 0 without an optimizer.
        is_under_way: whether Horovod has noted a gradient of the step under way.
        is_sparse: whether a gradient, by name, is sparse, so that Horovod gathers it.
    """

    def __init__(
        self,
        process_set: Any,
        nodes: Callable[[], Nodes],
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
        """Forget what was handed before Horovod was initialized again: no worker will answer it."""
        self._session = self._mpi_ops._handle_map
        self._agreed = False  # on arguments, and on the order of gradients
        self._prospects = Prospects()
        self._question = Question(
            self._process_set, self._label, self._arguments, [member.name for member in self._expected]
        )
        self._step: _Step | None = None
        self._ending: _Step | None = None  # of which results are being asked for
        self._last_passes = 1
        self._set_buckets(self._expected)

    def _set_buckets(self, expected: Sequence[Member]) -> None:
        self._names = cut(expected, self._group_bytes, self._operations)
        self._bucket_of = {name: index for index, names in enumerate(self._names) for name in names}

    # ---- gradients come --------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether a gradient of this step has come that is exchanged here."""
        return self._step is not None and self._session is self._mpi_ops._handle_map

    def arrive(self) -> _Step:
        """To be called for every gradient of the optimizer that Horovod wants compressed, exchanged here or not:
        workers whose arguments differ may differ in that.
        """
        if self._session is not self._mpi_ops._handle_map:
            self._begin_session()
        step = self._step
        if step is None:
            step = self._begin_step()
        # A script's own call may fail on all workers, of which some exchange nothing here: those of integers, say.
        if self._operations:
            self._hand_query(step)
        return step

    def _hand_query(self, step: _Step) -> None:
        query = step.query
        if query is not None and not query.taken:
            PROGRESS.hand(query)

    def asked_before(self, name: str, tensor: torch.Tensor) -> PendingTensor | None:
        """To be called before a gradient is submitted.

        Returns:
            The pending tensor of the same gradient, if it is past changing: Horovod asks again where an exception, such
            as a signal handler's, has kept it from noting that it had asked.
        """
        step = self.arrive()
        number = current_pass()
        if number != step.latest:
            step = self._note_pass(step, number)
        before = step.pending.get(name)
        if before is None or before.group is None:
            return None
        if before.destination is tensor and before.version == tensor._version:
            return before
        self._give_up(step)
        return None

    def submit(self, pending: PendingTensor) -> None:
        """Take the gradient that has just come."""
        step, name = self._step, pending.name
        assert step is not None
        step.pending[name] = pending
        index = self._bucket_of.get(name)
        if index is None:
            return
        present = step.present[index]
        present[name] = pending
        if len(present) == len(self._names[index]) and (self._overlap or step.latest == _NO_PASS):
            self._hand_bucket(step, index)

    def _begin_step(self) -> _Step:
        query = ActiveRankQuery(self._question) if self._question.size > 1 else None
        step = self._step = _Step(query, len(self._names))
        self._ending = None
        return step

    def _give_up(self, step: _Step) -> _Step:
        """Begin anew: the script has taken back what Horovod had noted of a step's gradients."""
        if step.groups:
            step = self._begin_step()
            self._hand_query(step)
        else:
            step.pending.clear()
            step.present = [{} for _ in self._names]
        return step

    def _note_pass(self, step: _Step, number: int) -> _Step:
        """A gradient from another pass than the latest, or from none."""
        if number != _NO_PASS and number not in step.passes:
            if step.pending and not self._is_under_way():
                step = self._give_up(step)
            step.passes.add(number)
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._end_pass, step))
        step.latest = number
        return step

    def _hand_bucket(self, step: _Step, index: int) -> None:
        if index not in step.groups:
            present = step.present[index]
            self._make(step, index, [present[name] for name in self._names[index] if name in present])
        PROGRESS.hand(step.groups[index])

    def _make(self, step: _Step, index: int, members: Sequence[PendingTensor]) -> None:
        step.groups[index] = Group(
            members,
            f"horovod_quant.{self._label}.{index}",
            self.memory,
            self._nodes,
            self._traffic,
            step.query,
            not self._agreed,
            self._prospects,
        )

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
                    self._hand_bucket(step, index)
        if len(step.groups) == len(self._names) or len(step.passes) >= self._last_passes:
            self._sleep(list(step.groups.values()))

    def _sleep(self, groups: Sequence[Group]) -> None:
        """Until they have ended; not for long without progress, since another worker may have to come first."""
        self._prospects.awaited = True
        if not all(group.ended for group in groups):
            begin = time.perf_counter()
            with named_range("wait", self._label):
                done = PROGRESS.wait(groups, lambda: all(group.ended for group in groups), PATIENCE.seconds)
            self._traffic.seconds_waited += time.perf_counter() - begin
            PATIENCE.learn(in_vain=not done)

    # ---- decompress ------------------------------------------------------------------------------------------

    def close(self, pending: PendingTensor) -> None:
        """To be called when a gradient's result is asked for, before anything else: all of the step's have come.

        Raises:
            RuntimeError: the workers have other arguments.
        """
        step = self._step
        if step is not None and step.pending.get(pending.name) is pending:
            self._close(step)
        step = self._ending
        query = None if step is None else step.query
        if query is not None:
            self._wait_for(query)

    def finish(self, pending: PendingTensor) -> Group:
        """Return a gradient's group with its result, for which it waits.

        Raises:
            RuntimeError: some workers have called ``hvd.join()`` where none may.
            HorovodInternalError: a collective has failed.
        """
        group = pending.group
        assert group is not None, f"{pending.name}: its step was given up"
        try:
            self._wait_for(group)
            if group.void:
                self._cut_by_name()
                group = pending.group
                assert group is not None
                self._wait_for(group)
        except Exception as error:
            self._cancel(error)
            raise
        return group

    def fail(self, pending: PendingTensor, error: Exception) -> None:
        """To be called in place of `finish` where the workers mean different gradients, which all of them learn.

        Other workers may learn it of another gradient first, and wait for this one. So its step ends on all.
        """
        step = self._ending
        if step is not None and not self._agreed and step.query is not None and not step.query.same_order:
            self._cut_by_name()  # as the others do
        self._cancel(error)

    def _cancel(self, error: Exception) -> None:
        """End all of a step's exchanges: it has failed, on this worker as on the others."""
        self._prospects.awaited = False
        step, self._ending = self._ending, None
        groups = [] if step is None else step.groups.values()
        closings = [closing for group in groups if (closing := group.cancel(error)) is not None]
        # Lest the script calls hvd.join() before; not for long, since another worker may come to it late.
        PROGRESS.wait(closings, lambda: all(closing.ended for closing in closings), _CLOSING_PATIENCE)

    def _close(self, step: _Step) -> None:
        """Hand over what is left: all of the step's gradients have come."""
        self._prospects.awaited = True
        self._hand_query(step)
        for index, present in enumerate(step.present):
            if present:
                self._hand_bucket(step, index)
        rest = sorted(name for name in step.pending if name not in self._bucket_of)
        self._hand_rest(step, [step.pending[name] for name in rest])
        self._last_passes = len(step.passes)
        self._ending, self._step = step, None

    def _hand_rest(self, step: _Step, rest: Sequence[PendingTensor]) -> None:
        members = [Member(pending.name, pending.scheme, pending.bytes) for pending in rest]
        for index, names in enumerate(
            cut(members, self._group_bytes, self._operations), start=len(self._names)
        ):
            if index not in step.groups:
                self._make(step, index, [step.pending[name] for name in names])
            PROGRESS.hand(step.groups[index])

    def _wait_for(self, job: Group | ActiveRankQuery) -> None:
        if not job.has_result:
            with named_range("wait", job.name):
                PROGRESS.wait([job], lambda: job.has_result)
        if job.error is not None:
            raise job.error

    def _cut_by_name(self) -> None:
        """The workers' orders differ: they cut again by one that they all know."""
        step = self._ending
        assert step is not None
        self._agreed = True
        self._set_buckets(sorted(self._expected, key=lambda member: member.name))
        step.present = []
        step.groups = {}
        self._hand_rest(step, [step.pending[name] for name in sorted(step.pending)])

    def delivered(self, pending: PendingTensor, factor: float) -> None:
        """To be called when the gradient of a pending tensor has been decoded; the last one ends the step.

        Args:
            factor: what Horovod multiplied the sum by.
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
    """The buckets of tensors that a script reduces itself, by the names that it gives them.

    Remembers those of the names that were used last; a script may make up a new one for each call. Each thread has its
    own: what is remembered has to be the same on all workers, and that it is, because a thread's calls come in the same
    order on all of them.

    Args:
        first_step: from which each thread counts at first.

    Attributes:
        first_step: the count from which names start that are not remembered.
    """

    def __init__(self, first_step: int) -> None:
        self.first_step = first_step
        self._buckets: OrderedDict[str, Buckets | None] = OrderedDict()

    def remember(self, name: str, forget: Callable[[str], None]) -> None:
        """To be called for each tensor of an operation.

        Args:
            name: of the operation.
            forget: called with a name that is remembered no longer.
        """
        self._buckets.setdefault(name, None)
        self._buckets.move_to_end(name)
        if len(self._buckets) > REMEMBERED_NAMES:
            forget(self._buckets.popitem(last=False)[0])

    def get(self, name: str, make: Callable[[], Buckets]) -> Buckets:
        """The buckets of a name that is remembered; ``make`` makes them."""
        buckets = self._buckets[name]
        if buckets is None:
            buckets = self._buckets[name] = make()
        return buckets
