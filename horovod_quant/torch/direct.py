"""The schedules of tensors that a script reduces itself, by the names that it gives them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Callable

from horovod_quant.frontend import REMEMBERED_NAMES
from horovod_quant.torch.schedule import Schedule


class DirectSchedules(threading.local):
    """Remembers those of the names that were used last; a script may make up a new one for each call.

    Each thread has its own: what is remembered has to be the same on all workers, and that it is, because a thread's
    calls come in the same order on all of them.
    """

    def __init__(self) -> None:
        self._schedules: OrderedDict[str, Schedule] = OrderedDict()

    def get(self, name: str, make: Callable[[], Schedule], forget: Callable[[str], None]) -> Schedule:
        """The schedule of a name.

        Args:
            name: of the operation.
            make: makes the schedule of a name that is new.
            forget: called with a name that is remembered no longer.
        """
        if name not in self._schedules:
            self._schedules[name] = make()
            if len(self._schedules) > REMEMBERED_NAMES:
                forget(self._schedules.popitem(last=False)[0])
        self._schedules.move_to_end(name)
        return self._schedules[name]
