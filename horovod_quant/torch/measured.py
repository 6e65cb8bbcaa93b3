"""The nmse that exchanges really have: every so many steps, on a sample of the gradients.

1. When a gradient comes, some of its blocks of 1,024 elements are kept, the same ones on every worker.
2. When Horovod asks for the first result of the step, one allreduce sums what was kept, in float32.
3. The same blocks of each result are kept, and when the last is there, both are compared. Blocks of a gradient stand
   for all of its blocks.

A step counts if every worker has taken part in the allreduce, as a number beside the blocks tells.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

from horovod_quant.frontends.sample import REMEMBERED, sampled


class _Step:
    """A step of one optimizer: what is kept of its gradients."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.delivering = False
        self.places: dict[str, tuple[torch.Tensor, float]] = {}
        self.own: dict[str, torch.Tensor] = {}
        self.found: dict[str, torch.Tensor] = {}
        self.handle: Any = None
        self.session: Any = None


class ErrorSampler:
    """Measures the nmse of an optimizer's exchanges.

    Args:
        every: steps from one measurement to the next; 0 for none.
        share: of a gradient's elements that are compared, from 0 to 1; at least one block.
    """

    def __init__(self, every: int, share: float) -> None:
        self.every, self.share = every, share
        self._steps: Any = weakref.WeakKeyDictionary()
        self._errors: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)

    def __bool__(self) -> bool:
        """True if it measures at all."""
        return self.every > 0

    @property
    def nmse(self) -> float | None:
        """Of the last steps that were measured; None before the first."""
        squares = sum(square for _, square in self._errors)
        return sum(error for error, _ in self._errors) / squares if squares else None

    def take(self, call: Any, tensor: torch.Tensor) -> None:
        """To be called with each gradient of an optimizer that is going to be exchanged."""
        from horovod.torch import mpi_ops

        step = self._steps.get(call.optimizer)
        if step is None or step.session is not mpi_ops._handle_map:
            step = self._steps[call.optimizer] = _Step(1)
            step.session = mpi_ops._handle_map
        elif step.delivering or call.name in step.own:
            session, step = step.session, _Step(step.number + 1)
            step.session = session
            self._steps[call.optimizer] = step
        if step.number % self.every == 0:
            chosen = torch.from_numpy(sampled(call.name, step.number, tensor.numel(), self.share))
            step.places[call.name] = chosen.to(tensor.device), tensor.numel() / len(chosen)
            step.own[call.name] = tensor.reshape(-1)[step.places[call.name][0]].to(torch.float32)

    def compare(self, call: Any, control_tensor: torch.Tensor, result: torch.Tensor) -> None:
        """To be called with each result, and the reduced control tensor, whose first number was 1 on each worker."""
        step = self._steps.get(call.optimizer)
        if step is None:
            return
        if not step.delivering:
            step.delivering = True
            if step.own:
                self._sum(step, call)
        if step.handle is not None and call.name in step.places:
            scaled = result.reshape(-1)[step.places[call.name][0]].to(torch.float32)
            # Horovod multiplies by whatever it is told to; of an average 1 is left.
            step.found[call.name] = scaled / float(control_tensor.reshape(-1)[0])
            if len(step.found) == len(step.own):
                self._finish(step, call.process_set.size())

    def _sum(self, step: _Step, call: Any) -> None:
        import horovod.torch as hvd

        own = torch.cat([torch.ones(1), *(step.own[name].cpu() for name in sorted(step.own))])
        step.handle = hvd.allreduce_async(
            own, op=hvd.Sum, name=f"horovod_quant.nmse.{min(call.names)}", process_set=call.process_set
        )

    def _finish(self, step: _Step, size: int) -> None:
        import horovod.torch as hvd

        total = hvd.synchronize(step.handle)
        if float(total[0]) != size:
            return
        error = square = 0.0
        names = sorted(step.own)
        parts = (total[1:] / size).split([len(step.own[name]) for name in names])
        for name, exact in zip(names, parts):
            weight = step.places[name][1]
            error += weight * float((step.found[name].cpu() - exact).square().sum(dtype=torch.float64))
            square += weight * float(exact.square().sum(dtype=torch.float64))
        self._errors.append((error, square))
