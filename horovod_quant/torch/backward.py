"""The backward passes that are going on, and what happens at their ends: the one place that knows all schedules."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Callable

import torch

from horovod_quant.torch.uncompiled import compiling, uncompiled
from horovod_quant.torch.waiting import Patience, wait_while

if TYPE_CHECKING:
    from horovod_quant.torch.schedule import Schedule

_PASSES_AT_A_TIME = 64


class Backward:
    """The backward passes of this process, by number, and the schedules that take part in each.

    Each thread may have one, and one may run inside another.
    """

    def __init__(self) -> None:
        self._schedules: dict[int, list[Schedule]] = {}
        self._patience = Patience()

    @property
    def current(self) -> int | None:
        """The number of the pass that calls; None outside of any."""
        number = torch._C._current_graph_task_id()
        return None if number == -1 else number

    def join(self, schedule: Schedule) -> int | None:
        """Registers for the end of the pass that calls; returns its number, None outside of any."""
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
        return current

    def _end(self, number: int) -> None:
        if compiling() is not None:
            return uncompiled(self._end, number)
        schedules = [schedule for schedule in self._schedules.pop(number, []) if schedule.takes_part]
        if not schedules:
            return
        try:
            self._finish_pass(schedules)
        except BaseException as error:  # such as a signal handler's
            for schedule in schedules:
                schedule.interrupt(error)
            raise

    def _finish_pass(self, schedules: Sequence[Schedule]) -> None:
        ended = self._wait_for_stages(schedules)
        for schedule in schedules:
            schedule.end_pass()
        quiet = knows_all(schedules)
        for schedule in schedules:
            schedule.note(quiet)
        if ended and _few_cores():
            self._wait(
                lambda: any(schedule.has_more_to_decode for schedule in schedules),
                lambda: any(schedule.has_more_to_decode and schedule.decode() for schedule in schedules),
            )

    def _wait(self, is_waiting: Callable[[], bool], progresses: Callable[[], bool]) -> bool:
        """See `wait_while`; as long as it has seemed worth while."""
        if not is_waiting():
            return True
        done = wait_while(is_waiting, progresses, self._patience.seconds)
        self._patience.learn(in_vain=not done)
        return done

    def _wait_for_stages(self, schedules: Sequence[Schedule]) -> bool:
        """Launches one stage after another for all schedules together; whether all of their groups got to their last.

        Asleep in between. Without this the stages would be launched in ``decompress``, but only when Horovod, which
        spins, has waited for the optimizer's own operations.
        """
        return self._wait(
            lambda: any(schedule.has_more_to_launch for schedule in schedules),
            lambda: sum(schedule.advance() for schedule in schedules) > 0,
        )


def knows_all(schedules: Sequence[Schedule]) -> bool:
    """Whether all operations from these optimizers' first one to their last in this step are theirs.

    Horovod numbers its handles; an operation of another kind has none.
    """
    known = set().union(*(schedule.known_operations() for schedule in schedules))
    if not known or set(map(type, known)) != {int}:
        return False
    return len(known) == max(known) - min(known) + 1


@functools.cache
def _few_cores() -> bool:
    """Whether this host lacks a core for each worker's thread and one for each worker's Horovod thread.

    Then it is better to wait here, asleep, than soon after in ``synchronize``, where Horovod spins.
    """
    import horovod.torch as hvd

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores < 2 * hvd.local_size()


BACKWARD = Backward()
