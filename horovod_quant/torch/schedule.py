"""When the exchanges of a step are launched: overlapped with the backward pass, and never so that a worker hangs.

Three facts shape the rules. Horovod names a user's unnamed operation by the number of operations before it: wherever
the user starts one, every worker must have launched equally many. A worker must not wait in a gradient hook for
something that another one has not started. Workers may finish their gradients in different orders.

1. In an optimizer's first step everything is launched at the first ``decompress``: Horovod has then asked for the
   compression of every gradient on every worker. The workers agree on an order: a gradient's place is the latest
   that it had on any of them. Groups are cut in this order.
2. From then on a group's first collective is launched when its last gradient arrives.
3. Every gradient that arrives also finds out which stages have ended, and launches those that follow; it waits for
   none. When a stage has ended differs between workers. Hence nobody does so unless the first step has shown, on every
   worker, that nothing but this optimizer starts operations between the first gradient and the first ``decompress``.
4. At the end of the backward pass every worker launches whatever is left of the agreed groups: the first stages, then
   the further ones as those before them end. A gradient that this backward pass did not produce is exchanged as Horovod
   will do it in ``synchronize``: as it is, or as zeros.
5. The first ``decompress`` of the step launches what belongs to no agreed group and waits for the last stages.
6. A group that fails without a worker that has called ``hvd.join()`` is launched when a roll call has told who is
   there. Every worker launches the roll call at its first gradient, before it waits for anything. Where several
   optimizers share a backward pass such groups wait for the end of it, since another worker's first gradient may be
   another optimizer's.

Nobody waits for ever: whoever waits for some stages to end launches what follows any of them, and every worker launches
all first stages without waiting.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, NamedTuple

import torch

from horovod_quant.nodes import Nodes
from horovod_quant.schemes.base import Scheme
from horovod_quant.torch.exchange import Group, Pauses, Submission, needs_everybody
from horovod_quant.torch.memory import Memory
from horovod_quant.torch.roll_call import RollCall

_NEVER = 2**30
"""Place of a gradient that arrives outside of the backward pass."""

# Horovod's response cache has 1,024 places, and each of the optimizer's own operations takes one.
_CACHE_PLACES = 1000
_COLLECTIVES_PER_GROUP = 3

_PASSES_AT_A_TIME = 64
_FEWEST_GROUPS = 4


class Plan(NamedTuple):
    """The agreed groups: names in order, the groups in the order in which they complete; which of them need a roll
    call; and all names.
    """

    groups: list[list[str]]
    group_of: dict[str, int]
    after_roll_call: frozenset
    names: frozenset


class Schedule:
    """The exchanges of one optimizer, step by step.

    Args:
        process_set: Horovod's workers that take part.
        nodes: tells the workers and their groups; called when nobody waits for anything else.
        memory: where the gradients are.
        group_bytes: bytes of gradients that share collectives.
        overlap: whether to launch exchanges during the backward pass.
        operations: number of operations that the optimizer itself takes in a step.
        handles: Horovod's of those that the optimizer has under way.
        count: called with a gradient's name and the bytes that this worker sends for it.
        label: of the roll calls, the same on every worker whatever arguments its compressor has.
        arguments: that must be the same on all workers: see `horovod_quant.agreement`.
    """

    def __init__(
        self,
        process_set: Any,
        nodes: Callable[[], Nodes],
        memory: Memory,
        group_bytes: int,
        overlap: bool,
        operations: int,
        handles: Callable[[], Iterable[Any]],
        count: Callable[[str, float], None],
        label: str,
        arguments: Mapping[str, str],
    ) -> None:
        self._process_set = process_set
        self._nodes = nodes
        self._memory = memory
        self._group_bytes = group_bytes
        self._overlap = overlap
        self._operations = operations
        self._handles = handles
        self._count = count
        self._label = label
        self._arguments = arguments
        self._agreed = False  # whether all workers have the same arguments
        self._plan: Plan | None = None
        self._undisturbed = False  # whether nothing else starts operations during a backward pass
        self._session: Any = None
        self._repeats: dict[str, Callable[[], Submission]] = {}
        self.factor: float | None = None  # what Horovod multiplied the last sum by
        self.alone = True  # whether no other schedule ever shared a backward pass with this one
        self._begin_step()

    def _begin_step(self) -> None:
        self._submitted: dict[str, Submission] = {}
        self._places: dict[str, int] = {}
        self._passes: set[int] = set()
        self._forced: dict[str, Submission] = {}
        self._missing = [set(names) for names in self._plan.groups] if self._plan else []
        self._running: dict[int, Group] = {}
        self._unfinished: deque[Group] = deque()  # have collectives to launch; by the time of the latest
        self._decoded: set[int] = set()
        self._roll_call: RollCall | None = None

    @property
    def memory(self) -> Memory:
        return self._memory

    def submit(
        self, name: str, make: Callable[[], Submission], repeat: Callable[[], Submission]
    ) -> Submission:
        """Takes a gradient that Horovod wants compressed; returns the submission that stands for it.

        Args:
            name: of the gradient.
            make: makes the submission.
            repeat: makes one in a later step, of the gradient as it is then, should no backward pass produce it.

        Raises:
            RuntimeError: a second backward pass changes a gradient whose exchange is under way.
        """
        self._drop_stale()
        backward_pass = _BACKWARD.join(self) if self._overlap else None
        if name in self._forced:
            if backward_pass is not None:
                raise RuntimeError(
                    f"{name}: its exchange started at the end of a backward pass that did not produce it, and now "
                    f"another backward pass does; construct the compressor with overlap=False"
                )
            return self._forced.pop(name)
        if backward_pass is not None:
            self.call_roll()
        submission = make()
        self._repeats[name] = repeat
        self._places[name] = _NEVER if backward_pass is None else len(self._submitted)
        self._submitted[name] = submission
        if backward_pass is not None:
            self._passes.add(backward_pass)
            if self._plan is not None and name in self._plan.group_of:
                self._arrived(name, self._plan.group_of[name])
            if self._undisturbed:
                self._follow_up()
        return submission

    def finish(self, submission: Submission) -> Group:
        """A gradient's group, launched; the first gradient asked for in a step launches everything that is left."""
        if self._submitted.get(submission.name) is submission:
            self._launch_rest()
        assert submission.group is not None
        return submission.group

    def _launch_rest(self) -> None:
        before = self._launched()
        if not self._agreed:
            self._present()
            self._agreed = True
        unclaimed = set(self._forced)  # Horovod asks for these no longer: a parameter has been frozen, say
        asked = {name: submission for name, submission in self._submitted.items() if name not in unclaimed}
        self._start_complete_groups()
        self._start_rest([submission for submission in asked.values() if submission.group is None])
        self.advance_all()
        if self._overlap and (self._plan is None or self._plan.names != frozenset(asked)):
            self._plan, self._undisturbed = self._agree(asked, self._knows_all(before))
        self._begin_step()

    def _drop_stale(self) -> None:
        """Forgets what was launched before Horovod was initialized again: nobody will answer it."""
        from horovod.torch import mpi_ops

        if mpi_ops._handle_map is not self._session:
            self._session = mpi_ops._handle_map
            self._plan = None
            self._agreed = self._undisturbed = False
            self._begin_step()

    # ---- during and at the end of a backward pass ------------------------------------------------------------

    def _arrived(self, name: str, index: int) -> None:
        self._missing[index].discard(name)
        if self._missing[index] or index in self._running:
            return
        assert self._plan is not None
        if not self.alone and index in self._plan.after_roll_call:
            return
        self._start_planned(index)

    def _follow_up(self) -> None:
        """Launches what follows stages that have ended; waits for none.

        Horovod performs operations in much the order in which they are launched: if one has not ended, those launched
        later are hardly worth a look.
        """
        while self._unfinished and self._unfinished[0].poll():
            self._continue(self._unfinished.popleft())

    def _continue(self, group: Group) -> None:
        """Launches what follows a stage that has ended."""
        if not group.in_last_stage:
            group.advance()
        if not group.all_launched:
            self._unfinished.append(group)

    def call_roll(self) -> None:
        """Launches the step's roll call, where an agreed group needs one."""
        if self._plan is not None and self._plan.after_roll_call:
            self._call_roll()

    def _call_roll(self) -> RollCall:
        if self._roll_call is None:
            self._roll_call = RollCall(self._process_set, self._label, self._arguments)
        return self._roll_call

    def _present(self) -> Sequence[int]:
        """The ranks of the workers that have not called ``hvd.join()``."""
        return self._call_roll().ranks()

    def start_all(self) -> None:
        """Launches the first stage of every agreed group; waits for nothing but the roll call."""
        if self._plan is None:
            return
        for index, names in enumerate(self._plan.groups):
            if index not in self._running:
                for name in names:
                    if name not in self._submitted:
                        self._submitted[name] = self._forced[name] = self._repeats[name]()
                self._start_planned(index)

    def advance_all(self) -> None:
        """Brings every group that has started to its last stage."""
        pauses = Pauses()
        while self._unfinished:
            ended = [group for group in self._unfinished if group.poll()]
            for group in ended:
                self._unfinished.remove(group)
                self._continue(group)
            if ended:
                pauses = Pauses()
            else:
                pauses.sleep()

    def decode_all(self) -> None:
        """Waits for the last stage of every group that has started; decodes each when it has ended."""
        pauses = Pauses()
        while True:
            if self._decode_next():
                pauses = Pauses()
            elif all(group.poll() for group in self._running.values()):
                break
            else:
                pauses.sleep()

    def _decode_next(self) -> bool:
        """Decodes a group that has ended, with the factor of the step before; whether there was one."""
        if self.factor is None:
            return False
        for index, group in self._running.items():
            if index not in self._decoded and group.all_launched and group.poll():
                group.deliver_all(self.factor)
                self._decoded.add(index)
                return True
        return False

    def _launched(self) -> set[int]:
        """Horovod's handles of what this schedule has launched in this step."""
        roll_call = set() if self._roll_call is None else {self._roll_call.handle}
        return roll_call.union(*(group.handles for group in self._running.values()))

    def _knows_all(self, before: set[int]) -> bool:
        """Whether all operations since the first gradient are this optimizer's; Horovod numbers its handles.

        Args:
            before: the handles of what this schedule had launched at the first ``decompress``.
        """
        launched = self._launched()
        theirs = {handle for handle in self._handles() if handle is not None}
        since = launched - before
        if not since or not all(isinstance(handle, int) for handle in theirs):
            return False
        known = launched | theirs
        return known.issuperset(range(min(known), min(since)))

    @property
    def order(self) -> str:
        """Orders schedules alike on every worker."""
        return min(self._submitted, default="")

    # ---- groups ----------------------------------------------------------------------------------------------

    def _start_complete_groups(self) -> None:
        for index, names in enumerate(self._plan.groups if self._plan else []):
            if index not in self._running and all(name in self._submitted for name in names):
                self._start_planned(index)

    def _start_planned(self, index: int) -> None:
        assert self._plan is not None
        members = [self._submitted[name] for name in self._plan.groups[index]]
        self._start(index, members, min(self._plan.names))

    def _start_rest(self, rest: list[Submission]) -> None:
        first = len(self._plan.groups) if self._plan else 0
        by_name = {submission.name: submission for submission in rest}
        label = min(by_name, default="")
        for offset, names in enumerate(self._cut([(by_name[name], 0) for name in sorted(by_name)])):
            self._start(first + offset, [by_name[name] for name in names], label)

    def _start(self, index: int, members: Sequence[Submission], label: str) -> None:
        name = f"horovod_quant.{label}.{index}"
        group = Group(members, name, self._memory, self._nodes(), self._count, self._present)
        self._running[index] = group
        group.start()
        if not group.all_launched:
            self._unfinished.append(group)

    def _cut(self, placed: Sequence[tuple[Submission, int]]) -> list[list[str]]:
        """Groups of one scheme each, in the order in which their last members come."""
        total = sum(submission.bytes for submission, _ in placed)
        deepest = max((len(submission.scheme.collectives) for submission, _ in placed), default=0)
        collectives = max(deepest, _COLLECTIVES_PER_GROUP)
        most_groups = max(_FEWEST_GROUPS, (_CACHE_PLACES - self._operations) // collectives)
        room_of_group = max(self._group_bytes, total // most_groups)
        open_groups: dict[Scheme, list[str]] = {}
        room: dict[Scheme, int] = {}
        groups: list[list[str]] = []
        for submission, _ in placed:
            scheme = submission.scheme
            if scheme in open_groups and submission.bytes > room[scheme]:
                groups.append(open_groups.pop(scheme))
            if scheme not in open_groups:
                open_groups[scheme], room[scheme] = [], room_of_group
            open_groups[scheme].append(submission.name)
            room[scheme] -= submission.bytes
        groups.extend(open_groups.values())
        at = {submission.name: position for position, (submission, _) in enumerate(placed)}
        return sorted(groups, key=lambda names: at[names[-1]])

    def _agree(self, submitted: dict[str, Submission], knows_all: bool) -> tuple[Plan, bool]:
        """The plan for the coming steps: one maximum over the workers of each gradient's place. And whether all know of
        no other operations.
        """
        import horovod.torch as hvd

        names = sorted(submitted)
        # Where a step takes several backward passes (or one inside another), the end of one is not the end of all.
        single = len(self._passes) == 1
        places = [self._places[name] if single else _NEVER for name in names]
        own = torch.tensor([*places, not knows_all], dtype=torch.int32)
        label = f"horovod_quant.{names[0]}.order"
        *agreed, others = hvd.allreduce(own, op=hvd.Max, name=label, process_set=self._process_set).tolist()
        placed = [(submitted[name], place) for name, place in zip(names, agreed) if place < _NEVER]
        groups = self._cut(sorted(placed, key=lambda item: item[1]))
        group_of = {name: index for index, members in enumerate(groups) for name in members}
        nodes = self._nodes()
        after_roll_call = [
            index
            for index, members in enumerate(groups)
            if needs_everybody([submitted[name] for name in members], nodes, self._memory)
        ]
        return Plan(groups, group_of, frozenset(after_roll_call), frozenset(names)), not others


class _Backward:
    """The backward passes that are going on in this process, by number, and the schedules that take part in each.

    Each thread may have one, and one may run inside another.
    """

    def __init__(self) -> None:
        self._schedules: dict[int, list[Schedule]] = {}

    def join(self, schedule: Schedule) -> int | None:
        """Registers for the end of the backward pass; returns its number, None if there is none."""
        current = torch._C._current_graph_task_id()
        if current == -1:
            return None
        if current not in self._schedules:
            while len(self._schedules) >= _PASSES_AT_A_TIME:
                del self._schedules[min(self._schedules)]  # it failed, so that its end was never called
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._end, current))
            self._schedules[current] = []
        schedules = self._schedules[current]
        if schedule not in schedules:
            schedules.append(schedule)
            if len(schedules) > 1:
                for sharing in schedules:
                    sharing.alone = False
        return current

    def _end(self, number: int) -> None:
        schedules = self._schedules.pop(number, [])
        schedules.sort(key=lambda schedule: schedule.order)
        for schedule in schedules:
            schedule.call_roll()
        for schedule in schedules:
            schedule.start_all()
        for schedule in schedules:
            schedule.advance_all()
        if _few_cores():
            for schedule in schedules:
                schedule.decode_all()


@functools.cache
def _few_cores() -> bool:
    """Whether this host lacks a core for each worker's thread and one for each worker's Horovod thread.

    Then it is better to wait here, asleep, than soon after in ``synchronize``, where Horovod spins.
    """
    import horovod.torch as hvd

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores < 2 * hvd.local_size()


_BACKWARD = _Backward()
