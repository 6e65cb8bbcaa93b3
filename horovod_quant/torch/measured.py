"""Measured nmse on a sample of the gradients, every N steps.

1. When a gradient arrives, some of its blocks of 1,024 elements are copied, the same ones on every worker.
2. At the step's first ``decompress``, one allreduce sums the copies in float32.
3. The same blocks of each result are copied, and after the last result both are compared. The sampled blocks represent
   all blocks of a gradient.

A step counts if every worker participated in the allreduce, which a number beside the blocks shows.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from horovod_quant.frontends.sample import BaseSampler, sampled


class _Step:
    """Samples of the gradients of one optimizer's step."""

    def __init__(self, session: Any, number: int) -> None:
        self.session = session
        self.number = number
        self.delivering = False
        self.indices: dict[str, tuple[torch.Tensor, float]] = {}
        self.local: dict[str, torch.Tensor] = {}
        self.found: dict[str, torch.Tensor] = {}
        self.handle: Any = None


class ErrorSampler(BaseSampler):
    """Measurement of the nmse of an optimizer's reductions; see `BaseSampler`."""

    def __init__(self, every: int, share: float) -> None:
        super().__init__(every, share)
        self._steps: Any = weakref.WeakKeyDictionary()

    def take(self, call: Any, tensor: torch.Tensor) -> None:
        """Sample a gradient of an optimizer before it is reduced."""
        from horovod.torch import mpi_ops

        session, step = mpi_ops._handle_map, self._steps.get(call.optimizer)
        if step is None or step.session is not session:
            step = self._steps[call.optimizer] = _Step(session, 1)
        elif step.delivering or call.name in step.local:
            step = self._steps[call.optimizer] = _Step(session, step.number + 1)
        if step.number % self.every == 0:
            indices = torch.from_numpy(sampled(call.name, step.number, tensor.numel(), self.share))
            indices = indices.to(tensor.device)
            step.indices[call.name] = indices, tensor.numel() / len(indices)
            step.local[call.name] = tensor.reshape(-1)[indices].to(torch.float32)

    def compare(self, call: Any, scale: float, result: torch.Tensor) -> None:
        """Sample a result; after the last one of the step, compare.

        Args:
            call: the gradient's call.
            scale: the control tensor's first element, which was 1 on each worker, after the reduction.
            result: the gradient's result.
        """
        step = self._steps.get(call.optimizer)
        if step is None:
            return
        if not step.delivering:
            step.delivering = True
            if step.local:
                self._sum(step, call)
        if step.handle is not None and call.name in step.indices:
            scaled = result.reshape(-1)[step.indices[call.name][0]].to(torch.float32)
            # Undoes Horovod's prescale and postscale factors; for an average this is 1.
            step.found[call.name] = scaled / scale
            if len(step.found) == len(step.local):
                self._finish(step, call.process_set.size())

    def _sum(self, step: _Step, call: Any) -> None:
        import horovod.torch as hvd

        local = torch.cat(
            [torch.ones(1, device="cpu"), *(step.local[name].cpu() for name in sorted(step.local))]
        )
        step.handle = hvd.allreduce_async(
            local, op=hvd.Sum, name=f"horovod_quant.nmse.{call.label}", process_set=call.process_set
        )

    def _finish(self, step: _Step, size: int) -> None:
        import horovod.torch as hvd

        total = hvd.synchronize(step.handle)
        if float(total[0]) != size:
            return
        error = square = 0.0
        names = sorted(step.local)
        parts = (total[1:] / size).split([len(step.local[name]) for name in names])
        for name, exact in zip(names, parts):
            weight = step.indices[name][1]
            error += weight * float((step.found[name].cpu() - exact).square().sum(dtype=torch.float64))
            square += weight * float(exact.square().sum(dtype=torch.float64))
        self._record("all", error, square)
