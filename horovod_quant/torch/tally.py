"""Keeps the numbers of Horovod's operations alike on all workers.

Horovod calls an operation without a name after the number of operations that the worker has started before. A script
may start such ones wherever Horovod alone allows it: where all workers have started equally many. Exchanges, however,
start theirs at moments that differ between workers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from horovod_quant.torch.waiting import wait


class Answer(NamedTuple):
    """What all workers together have told.

    Attributes:
        present: how many there are, without those that have called ``hvd.join()``.
        wanting: how many of them want another plan.
        spent: how many operations they have spent at the end of a backward pass.
    """

    present: int
    wanting: int
    spent: int


class Tally:
    """One optimizer's operations in one step.

    When a worker's first backward pass of the step ends, it has started part of the plan's collectives. It *spends* the
    others: it starts as many operations in their place, sums of nothing. So wherever all workers have ended a backward
    pass, they have started equally many. When it launches the collectives after all, it has started more. The
    announcement tells the workers whether anybody has spent any; if so, each spends what it has not. So all have
    started equally many when the step is over: the plan's collectives once if nobody has spent any, else twice.

    Args:
        process_set: Horovod's workers.
        label: of the operations' names, the same on every worker.
        planned: how many collectives the plan has.
    """

    def __init__(self, process_set: Any, label: str, planned: int) -> None:
        self._process_set = process_set
        self._label = label
        self._planned = planned
        self._spent: list[int] = []
        self._announcement: int | None = None
        self.handles: list[int] = []

    @property
    def is_announced(self) -> bool:
        return self._announcement is not None

    def announce(self, launched: int | None, wants_plan: bool) -> None:
        """Launches the announcement, once a step: at the end of the first backward pass, or where a step begins without
        one.

        Args:
            launched: how many of the plan's collectives this worker has launched; None: it has run no backward pass,
                and spends nothing.
            wants_plan: whether this worker wants another plan for the coming steps.
        """
        if launched is not None:
            self._spend(self._planned - launched)
        own = torch.tensor([1, wants_plan, len(self._spent)], dtype=torch.int32, device="cpu")
        self._announcement = self._launch(own, "step")

    def settle(self) -> Answer:
        """At the end of the step: spends what is due. Waits for the other workers to get as far as their announcement,
        and, where some have spent operations, to the end of the step.
        """
        import horovod.torch as hvd

        assert self._announcement is not None
        wait(self._announcement)
        answer = Answer(*hvd.synchronize(self._announcement).tolist())
        if answer.spent:
            self._spend(self._planned - len(self._spent))
        for handle in self._spent:
            wait(handle)
            hvd.synchronize(handle)
        return answer

    def _spend(self, count: int) -> None:
        for _ in range(count):
            nothing = torch.zeros(1, dtype=torch.int32, device="cpu")
            self._spent.append(self._launch(nothing, f"spent.{len(self._spent)}"))

    def _launch(self, tensor: torch.Tensor, what: str) -> int:
        import horovod.torch as hvd

        name = f"horovod_quant.{self._label}.{what}"
        handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum, process_set=self._process_set)
        self.handles.append(handle)
        return handle
