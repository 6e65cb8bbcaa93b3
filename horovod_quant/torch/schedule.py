"""When the exchanges of a step are launched: overlapped with the backward pass, and never so that a worker hangs.

Four facts shape the rules. A backward pass must not wait for anything that another worker's backward pass or script has
to start first: workers may run no backward pass in a step, part of one, or several; they may share it with other
optimizers; and they may call Horovod before they get to ``step()``. Gradients may arrive in another order on every
worker. Horovod calls a script's unnamed operation by the number of operations before it, so wherever Horovod alone has
started equally many on all workers, so must exchanges. And most scripts do the same on all workers in every step.

1. An optimizer's first step launches everything at the first ``decompress``: Horovod has then asked for the compression
   of every gradient on every worker. When the step is over, the workers agree on a plan: groups of gradients, in the
   order in which they come (`horovod_quant.torch.plan`). A plan that is not as good as it could be is made again, after
   steps 2, 3, 5, 9, ...
2. From then on a group's first collective is launched when its last gradient arrives, in the step's first backward
   pass. Some exchanges depend on who has called ``hvd.join()``; those are launched when a roll call, which is launched
   at the pass's first gradient, has been answered.
3. Gradients that arrive also find out, every tenth of a millisecond at most, which stages have ended, and launch those
   that follow; they wait for none. When that happens differs between workers. If the pass on which the plan was made
   had operations of somebody else, nothing is launched at such moments during a pass, and first collectives when as
   many gradients have come as the plan says.
4. At the end of the pass every worker goes on with this for a while, asleep in between, as long as there is progress
   (`horovod_quant.torch.backward`). Usually all there is to launch is launched then, and often decoded. Whatever is
   not, it *spends* (`horovod_quant.torch.tally`); until the first ``decompress`` it launches nothing more.
5. The first ``decompress`` of the step launches the rest, and what belongs to no group, and waits for the last stages.

Nobody waits for ever where Horovod alone would not, if all workers step optimizers in the same order, and each starts
a script's operations on the same side of a ``step()``:

- Inside a backward pass nobody waits without a limit (4).
- Whoever waits in ``decompress`` has launched every first collective of the step, without having waited for more than
  the roll call and what an earlier step has left, and launches what follows any stage that ends. Horovod alone waits
  there until every worker has come to its ``synchronize`` of the same optimizer, and a worker that comes there comes to
  its ``decompress``, since all of Horovod's own operations have been launched.
- Wherever Horovod alone has started equally many operations on all workers, so have exchanges. Before a step's first
  gradient: none of the step's. After a backward pass that has brought a gradient, and before ``decompress``: the roll
  call, the plan's collectives, launched or spent, and the announcement; if one worker has run such a pass and another
  none, they differ with Horovod alone, too. After the last ``decompress``: all of these, and as many spent ones as the
  announcement has told all. During a pass: under 3 the same, if the pass on which the plan was made had such
  operations; this is the one case in which a script has to give names to operations (docs/reliability.md).
- All workers have the same plan: it is only made when all are present, and when any of them wants it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

from horovod_quant.frontends.groups import cut
from horovod_quant.frontends.nodes import Nodes
from horovod_quant.frontends.stats import TrafficCounter
from horovod_quant.torch.backward import BACKWARD, knows_all
from horovod_quant.torch.exchange import Group, Member, Submission, needs_everybody
from horovod_quant.torch.memory import Memory
from horovod_quant.torch.plan import NEVER, Plan, agree
from horovod_quant.torch.roll_call import RollCall
from horovod_quant.torch.tally import Tally
from horovod_quant.torch.waiting import WATCH, wait_while

_BETWEEN_LOOKS = 1e-4
"""Seconds between two looks at stages in flight: many small gradients come in the time that a stage takes."""


class Schedule:
    """The exchanges of one optimizer, step by step; or those of tensors that no optimizer gave.

    Args:
        process_set: Horovod's workers that take part.
        nodes: tells the workers and their groups; called when nobody waits for anything else.
        memory: where the gradients are.
        group_bytes: bytes of gradients that share collectives.
        overlap: whether to launch exchanges during the backward pass.
        operations: number of operations that the optimizer itself takes in a step.
        handles: Horovod's of those that the optimizer has under way.
        traffic: counts what this worker sends for each gradient.
        label: of all its operations, the same on every worker whatever arguments its compressor has, and of no other
            schedule that may have some under way at the same time.
        arguments: that must be the same on all workers: see `horovod_quant.reductions.agreement`.

    Attributes:
        factor: what Horovod multiplied the last sum by; None before the first.
        waiting_since: see `horovod_quant.torch.waiting.Waiting`.
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
        traffic: TrafficCounter,
        label: str,
        arguments: Mapping[str, str],
    ) -> None:
        from horovod.torch import mpi_ops

        self._mpi_ops = mpi_ops
        self._process_set = process_set
        self._nodes = nodes
        self._memory = memory
        self._group_bytes = group_bytes
        self._overlap = overlap
        self._operations = operations
        self._handles = handles
        self._traffic = traffic
        self._label = label
        self._arguments = arguments
        self._session: Any = None
        self._number: int | None = None  # of the backward pass that brought the latest gradient
        self.factor: float | None = None
        self.waiting_since: float | None = None
        self._begin_session()

    def _begin_session(self) -> None:
        self._agreed = False  # whether all workers have the same arguments
        self._plan: Plan | None = None
        self._steps = 0
        self._members: dict[str, Member] = {}  # the gradients of the last step
        self._ending: _Ending | None = None
        self._interrupted_by: BaseException | None = None
        self._begin_step()

    def _begin_step(self) -> None:
        self._submitted: dict[str, Submission] = {}
        self._places: dict[str, int] = {}
        self._passes: set[int] = set()
        self._pass_is_over = False
        self._quiet = False  # whether the pass had only operations that are known here
        self._missing = [set(names) for names in self._plan.groups] if self._plan else []
        self._ready: list[int] = []  # groups that are complete and have not been started
        self._next_look = 0.0  # at stages that have ended
        self._running: dict[int, Group] = {}
        self._unfinished: deque[Group] = deque()  # have collectives to launch; by the time of the latest
        self._decoded: set[int] = set()
        self._roll_call: RollCall | None = None
        self._tally = Tally(self._process_set, self._label, sum(self._plan.stages) if self._plan else 0)

    @property
    def memory(self) -> Memory:
        return self._memory

    # ---- gradients arrive ------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """To be called for every gradient of the optimizer that Horovod wants compressed, whoever reduces it."""
        self._drop_stale()
        self._refuse_interrupted()
        number = BACKWARD.current
        if number is not None and number in self._passes:  # as for all gradients of a pass but the first
            self._number = number
            return
        self._number = number if number is None or not self._overlap else BACKWARD.join(self)
        if self._number is None or not self._overlap:
            return
        self._passes.add(self._number)
        if self._plan is not None and self._plan.after_roll_call and self._is_launching:
            self._call_roll()

    def submit(self, submission: Submission) -> None:
        """Takes the gradient that has just arrived, if it is to be exchanged here."""
        name = submission.name
        if self._plan is not None and name in self._submitted:
            # Horovod asks again for a gradient whose operation an exception has kept it from noting.
            self.interrupt(RuntimeError(f"an exception while Horovod started the reduction of {name}"))
            self._refuse_interrupted()
        if self._number is None:
            WATCH.begin(self)
        in_pass = self._overlap and self._number is not None
        self._places[name] = len(self._submitted) if in_pass else NEVER
        self._submitted[name] = submission
        plan = self._plan
        if plan is None or not (in_pass and self._is_launching):
            return
        index = plan.group_of.get(name)
        if index is not None:
            missing = self._missing[index]
            missing.discard(name)
            if not missing:
                self._ready.append(index)
        if self._ready:
            self._start_ready(in_pass=True)
        if self._unfinished and plan.quiet and time.monotonic() >= self._next_look:
            self._follow_up()
            self._next_look = time.monotonic() + _BETWEEN_LOOKS

    def interrupt(self, error: BaseException) -> None:
        """To be called where an exception has left a gradient's or a stage's work half done."""
        if self._interrupted_by is None:
            self._interrupted_by = error

    def _refuse_interrupted(self) -> None:
        error = self._interrupted_by
        if error is not None:
            # Other workers wait for what this one has not launched, and cannot know that it never will. Elastic
            # training starts Horovod again when it gets this.
            from horovod.common.exceptions import HorovodInternalError

            self.waiting_since = None
            raise HorovodInternalError(
                f"{self.waits_for()} was interrupted in this step by {type(error).__name__}({error}), and no worker "
                f"can finish the step; hvd.elastic.run restores the last commit, other scripts have to end"
            ) from error

    @property
    def has_begun(self) -> bool:
        """Whether a gradient of this step has come that is exchanged here."""
        return bool(self._submitted)

    @property
    def _is_launching(self) -> bool:
        """Whether this step's first backward pass is going on."""
        return not self._pass_is_over and len(self._passes) == 1

    def _drop_stale(self) -> None:
        """Forgets what was launched before Horovod was initialized again: nobody will answer it."""
        if self._mpi_ops._handle_map is not self._session:
            self._session = self._mpi_ops._handle_map
            self._begin_session()

    # ---- launching, without waiting --------------------------------------------------------------------------

    def _start_ready(self, in_pass: bool) -> bool:
        """Starts the complete groups that may be started now; whether there was one."""
        startable = [index for index in self._ready if self._may_start(index, in_pass)]
        for index in startable:
            self._ready.remove(index)
            self._start_planned(index)
        return bool(startable)

    def _may_start(self, index: int, in_pass: bool) -> bool:
        assert self._plan is not None
        if index in self._plan.after_roll_call:
            may_launch_whenever = self._plan.quiet or not in_pass
            return may_launch_whenever and self._roll_call is not None and self._roll_call.has_answer()
        return self._plan.quiet or not in_pass or len(self._submitted) >= self._plan.due[index]

    def _start_planned(self, index: int) -> None:
        assert self._plan is not None
        members = [self._submitted[name] for name in self._plan.groups[index]]
        self._start(index, members)

    def _start(self, index: int, members: Sequence[Submission]) -> None:
        name = f"horovod_quant.{self._label}.{index}"
        group = Group(members, name, self._memory, self._nodes(), self._traffic, self._present)
        self._running[index] = group
        group.start()
        if not group.all_launched:
            self._unfinished.append(group)

    def _follow_up(self) -> None:
        """Launches what follows stages that have ended.

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

    def advance(self) -> bool:
        """Launches all that can be launched now; whether there was something. Not for the middle of a pass."""
        started = self._start_ready(in_pass=False)
        ended = [group for group in self._unfinished if group.poll()]
        for group in ended:
            self._unfinished.remove(group)
            self._continue(group)
        progress = started or bool(ended)
        if progress and self.waiting_since is not None:
            self.waiting_since = time.monotonic()
        return progress

    @property
    def has_more_to_launch(self) -> bool:
        """Of what has been submitted and belongs to complete groups."""
        return bool(self._ready or self._unfinished)

    def decode(self) -> bool:
        """Decodes a group that has ended, with the factor of the step before; whether there was one."""
        assert self.factor is not None
        for index, group in self._running.items():
            if index not in self._decoded and group.all_launched and group.poll():
                group.deliver_all(self.factor)
                self._decoded.add(index)
                return True
        return False

    @property
    def has_more_to_decode(self) -> bool:
        """Of what has been launched, if the factor is known."""
        return self.factor is not None and len(self._decoded) < len(self._running)

    def _call_roll(self) -> RollCall:
        if self._roll_call is None:
            self._roll_call = RollCall(self._process_set, self._label, self._arguments)
        return self._roll_call

    def _present(self) -> Sequence[int]:
        """The ranks of the workers that have not called ``hvd.join()``."""
        return self._call_roll().ranks()

    # ---- the end of a backward pass --------------------------------------------------------------------------

    @property
    def takes_part(self) -> bool:
        """Whether the pass that ends is the step's first."""
        return not self._pass_is_over

    def end_pass(self) -> None:
        """Nothing more is launched before ``decompress``: announces what has been.

        Not in the first step: to workers with other arguments an announcement may mean nothing.
        """
        self._pass_is_over = True
        if self._agreed:
            launched = sum(group.launched for group in self._running.values())
            self._tally.announce(launched, self._wants_plan)
        if self.has_more_to_launch:
            WATCH.begin(self)

    def known_operations(self) -> set[Any]:
        """Horovod's handles of what the optimizer and its exchanges have launched."""
        known = {handle for handle in self._handles() if handle is not None}
        known.update(self._tally.handles, *(group.handles for group in self._running.values()))
        if self._roll_call is not None:
            known.add(self._roll_call.handle)
        return known

    def note(self, quiet: bool) -> None:
        """Notes whether a pass that has ended had only operations that are known."""
        self._quiet = quiet

    # ---- decompress ------------------------------------------------------------------------------------------

    def finish(self, submission: Submission) -> Group:
        """A gradient's group, launched; the first gradient asked for in a step launches everything that is left."""
        self._refuse_interrupted()
        if self._submitted.get(submission.name) is submission:
            self._launch_rest()
        assert submission.group is not None
        return submission.group

    def _launch_rest(self) -> None:
        WATCH.begin(self)
        if not self._agreed:
            self._present()
            self._agreed = True
        if self._overlap and not self._tally.is_announced:
            self._tally.announce(None, self._wants_plan)
            self._quiet = knows_all([self])
        self._start_rest()
        wait_while(lambda: self.has_more_to_launch, self.advance)
        if self._overlap:
            # Where a step takes several backward passes (or one inside another), the end of one is not the end of all.
            places = self._places if len(self._passes) == 1 else dict.fromkeys(self._places, NEVER)
            self._ending = _Ending(self._tally, places, self._quiet)
            if self._members.keys() != self._submitted.keys():
                self._members = {
                    name: Member(name, submission.scheme, submission.bytes)
                    for name, submission in self._submitted.items()
                }
        self._begin_step()
        if self._ending is None:
            self.waiting_since = None

    def _start_rest(self) -> None:
        """Starts every group that has not been started; those last that have to wait for the roll call."""
        if self._plan is not None and self._plan.after_roll_call:
            self._call_roll()
        self._ready += [
            index
            for index, names in enumerate(self._plan.groups if self._plan else [])
            if index not in self._running
            and index not in self._ready
            and all(n in self._submitted for n in names)
        ]
        self._start_ready(in_pass=False)
        planned = (
            {name for index in self._ready for name in self._plan.groups[index]} if self._plan else set()
        )
        rest = {
            name: submission
            for name, submission in self._submitted.items()
            if submission.group is None and name not in planned
        }
        first = len(self._plan.groups) if self._plan else 0
        groups = cut([rest[name] for name in sorted(rest)], self._group_bytes, self._operations)
        members = {first + i: [rest[name] for name in names] for i, names in enumerate(groups)}
        waiting = [i for i in members if needs_everybody(members[i], self._nodes(), self._memory)]
        for index in members:
            if index not in waiting:
                self._start(index, members[index])
        for index in waiting:
            self._start(index, members[index])

    def delivered(self) -> None:
        """To be called when the gradient of a submission that is finished has been decoded; the last ends the step."""
        ending = self._ending
        if ending is None:
            return
        ending.outstanding -= 1
        if ending.outstanding:
            return
        self._ending = None
        answer = ending.tally.settle()
        self.waiting_since = None
        self._steps += 1
        if answer.wanting and answer.present == self._process_set.size():
            self._plan = agree(
                self._members,
                ending.places,
                ending.quiet,
                label=self._label,
                nodes=self._nodes(),
                memory=self._memory,
                group_bytes=self._group_bytes,
                operations=self._operations,
                process_set=self._process_set,
            )
            self._begin_step()

    @property
    def _wants_plan(self) -> bool:
        plan = self._plan
        if plan is None or plan.names != self._members.keys():
            return True
        # One without some gradient, or that knows of other operations, may come of a step that was unlike the others.
        steps = self._steps
        return not (plan.is_complete and plan.quiet) and steps & (steps - 1) == 0

    def waits_for(self) -> str:
        launched = [name for group in list(self._unfinished) for name in group.names]
        names = launched or list(self._submitted) or list(self._members)
        more = f" and {len(names) - 1} more gradients" if len(names) > 1 else ""
        return f"the exchange of {names[0]}{more}" if names else "an exchange"


class _Ending:
    """A step whose gradients have not all been decoded.

    Args:
        tally: the step's.
        places: as `agree` takes them.
        quiet: likewise.
    """

    def __init__(self, tally: Tally, places: dict[str, int], quiet: bool) -> None:
        self.tally = tally
        self.places = places
        self.quiet = quiet
        self.outstanding = len(places)
