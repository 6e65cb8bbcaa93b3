"""Which of the tensors that a script reduces itself, outside of graphs, are remembered."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from horovod_quant.frontends.step_counts import REMEMBERED_NAMES

Key = tuple[str, "int | None"]


class RecentNames:
    """Names, with numbers of elements where they count separately; a script may make up a new one for each call.

    Graphs keep what they count with, so a name that occurs in one is never forgotten.

    Args:
        forget: called with a name and its elements that have not been used for long, and whether the name is not
            remembered with other elements.
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
