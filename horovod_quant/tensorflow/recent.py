"""Recent names of direct calls outside graphs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from horovod_quant.frontends.step_counts import REMEMBERED_NAMES

Key = tuple[str, "int | None"]


class RecentNames:
    """Limited set of recent names.

    Names with other numbers of elements may count separately. A script may use a new name for each call. Graphs keep
    their counters, so a name in a graph is never dropped.

    Args:
        forget: called with a name and number of elements that have not been used recently, and with whether the name is
            not kept with other numbers of elements.
    """

    def __init__(self, forget: Callable[[str, int | None, bool], None]) -> None:
        self._forget = forget
        self._used: OrderedDict[Key, None] = OrderedDict()
        self._in_graphs: set[str] = set()
        self._lock = threading.Lock()

    def use_in_graph(self, name: str) -> None:
        self._in_graphs.add(name)

    def use(self, name: str, elements: int | None) -> None:
        if name in self._in_graphs:
            return
        with self._lock:
            self._used[name, elements] = None
            self._used.move_to_end((name, elements))
            if len(self._used) <= REMEMBERED_NAMES:
                return
            (old, size), _ = self._used.popitem(last=False)
            if old not in self._in_graphs:
                self._forget(old, size, all(other != old for other, _ in self._used))
