"""The schedules of tensors that a script reduces itself, by the names that it gives them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Callable

from horovod_quant.frontends.frontend import REMEMBERED_NAMES
from horovod_quant.torch.schedule import Schedule


class DirectSchedules(threading.local):
    """Remembers those of the names that were used last; a script may make up a new one for each call.

    Each thread has its own: what is remembered has to be the same on all workers, and that it is, because a thread's
    calls come in the same order on all of them.

    Args:
        first_step: from which each thread counts at first.

    Attributes:
        first_step: the count from which names start that are not remembered.
    """

    def __init__(self, first_step: int) -> None:
        self.first_step = first_step
        self._schedules: OrderedDict[str, Schedule | None] = OrderedDict()

    def remember(self, name: str, forget: Callable[[str], None]) -> None:
        """To be called for each tensor of an operation.

        Args:
            name: of the operation.
            forget: called with a name that is remembered no longer.
        """
        self._schedules.setdefault(name, None)
        self._schedules.move_to_end(name)
        if len(self._schedules) > REMEMBERED_NAMES:
            forget(self._schedules.popitem(last=False)[0])

    def get(self, name: str, make: Callable[[], Schedule]) -> Schedule:
        """The schedule of a name that is remembered; ``make`` makes it."""
        schedule = self._schedules[name]
        if schedule is None:
            schedule = self._schedules[name] = make()
        return schedule
