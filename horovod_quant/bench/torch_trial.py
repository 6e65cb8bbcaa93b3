"""PyTorch trials: ``hvd.DistributedOptimizer``, from the backward pass to ``optimizer.synchronize()``.

The backward pass visits the parameters in reverse order, as in a model. The gradients are filled with the same values
before every run, outside the measurement.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, Callable

import horovod.torch as hvd
import numpy as np
import torch

import horovod_quant.torch as hvq
from horovod_quant.analysis.models import Shapes, elements
from horovod_quant.bench.rounds import WARM_UP
from horovod_quant.bench.variants import Options, Variant

NAME = "PyTorch"


def configure() -> None:
    torch.set_num_threads(1)


def barrier() -> None:
    hvd.barrier()


def allgather(array: np.ndarray, name: str) -> np.ndarray:
    return hvd.allgather(torch.from_numpy(array), name=name).numpy()


class _Visit(torch.autograd.Function):
    """Identity function whose backward pass visits a parameter without changing its gradient."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor, parameter: torch.Tensor, until: Callable[[], float]) -> Any:
        ctx.until = until
        return number.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        left = ctx.until() - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return gradient, None, None


class Gradients:
    """The gradients' values and memory, which all methods share.

    Args:
        shapes: the shapes of the gradients.
        values: the local values.
        device: the gradients' device.
    """

    def __init__(self, shapes: Shapes, values: Sequence[np.ndarray], device: str = "cpu") -> None:
        self.shapes = shapes
        self.device = device
        self._values = [torch.from_numpy(array).to(device) for array in values]
        # Separate tensors, as in a training run.
        self._memory = [torch.empty(shape, device=device) for shape in shapes.values()]

    def give(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        for parameter, memory, values in zip(parameters, self._memory, self._values):
            memory.copy_(values)
            parameter.grad = memory.detach()  # a separate tensor with the same memory: Horovod may replace it


class Model(torch.nn.Module):
    """Parameters with a backward pass of a given duration.

    It visits each parameter after its share of the time.

    Args:
        shapes: the shapes of the parameters.
        backward: seconds that the backward pass sleeps.
        device: the parameters' device.
    """

    def __init__(self, shapes: Shapes, backward: float, device: str = "cpu") -> None:
        super().__init__()
        self.visited = torch.nn.ParameterList(torch.empty(shape, device=device) for shape in shapes.values())
        self.begin = 0.0
        self._backward = backward
        self._total = elements(shapes)

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        left = 0
        for parameter in self.visited:
            loss = _Visit.apply(loss, parameter, functools.partial(self._deadline, 1 - left / self._total))
            left += parameter.numel()
        return loss

    def _deadline(self, share: float) -> float:
        return self.begin + share * self._backward if self._backward else 0.0


class Trial:
    """A model and its optimizer, ready to reduce gradients with one method."""

    warm_up = WARM_UP

    def __init__(self, variant: Variant, gradients: Gradients, options: Options) -> None:
        self.variant = variant
        self.has_average = variant.averages
        self._gradients = gradients
        self._model = Model(gradients.shapes, options.backward, gradients.device)
        self._parameters = list(self._model.parameters())
        self._loss: Any = None
        self._exchanges = 0
        self._optimizer: Any = None
        self._compression: Any = None
        if variant.method is not None:
            ours = {"overlap": options.overlap} if variant.ours else {}
            self._compression = variant.compression(hvd, hvq, **ours)
            own = variant.own_optimizer
            plain = (torch.optim.SGD if own is None else getattr(hvq.optim, own))(self._parameters, lr=0.1)
            # Unique names for each variant: a known name with another shape misses in Horovod's cache.
            names = [f"{variant.label}: {name}" for name in gradients.shapes]
            self._optimizer = hvd.DistributedOptimizer(
                plain, named_parameters=list(zip(names, self._parameters)), compression=self._compression
            )

    def prepare(self, keep: bool = False) -> None:
        """Fill the gradients, and run the forward pass."""
        self._gradients.give(self._parameters)
        self._loss = self._model(torch.zeros((), device="cpu", requires_grad=True))

    def run(self) -> None:
        """Run the measured part."""
        self._model.begin = time.perf_counter()
        self._loss.backward()
        if self._optimizer is not None:
            self._optimizer.synchronize()

    def averages(self) -> list[np.ndarray]:
        """Return the gradients after a run."""
        return [parameter.grad.cpu().numpy() for parameter in self._parameters]

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._exchanges += 1

    def bytes_sent(self) -> float:
        """Return the counted bytes that this worker has sent in all runs."""
        if self.variant.ours:
            return self._compression.stats().total.bytes_sent
        return self._exchanges * self.variant.plain_bytes(elements(self._gradients.shapes), hvd.size())
