"""PyTorch model with given gradients, whose backward pass visits parameters in reverse.

The gradients are filled with the same values before every reduction, outside the measurement.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import torch

from horovod_quant.analysis.models import Shapes, elements
from horovod_quant.bench.rounds import WARM_UP
from horovod_quant.bench.variants import Options, Variant


def configure() -> None:
    torch.set_num_threads(1)


class _Visit(torch.autograd.Function):
    """Identity function whose backward pass waits, and leaves the parameter's gradient unchanged."""

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
    """Values and shared memory of the gradients of all methods.

    Args:
        shapes: shapes of the gradients.
        values: this worker's gradients.
        device: device of the gradients.
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
            parameter.grad = memory.detach()  # another tensor on the same memory: Horovod may replace it


class Model(torch.nn.Module):
    """Model whose backward pass takes a given time, divided by parameter sizes.

    Args:
        shapes: shapes of the parameters.
        backward: seconds that the backward pass sleeps.
        device: device of the parameters.
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


class TorchTrial:
    """Model whose gradients one method reduces; base class of trials.

    Attributes:
        variant: the method.
        has_average: whether the nmse of its average has a meaning.
        warm_up: number of steps before the measured ones.
    """

    warm_up = WARM_UP

    def __init__(self, variant: Variant, gradients: Gradients, options: Options) -> None:
        self.variant = variant
        self.has_average = variant.averages
        self._gradients = gradients
        self._model = Model(gradients.shapes, options.backward, gradients.device)
        self._parameters = list(self._model.parameters())
        self._called: Any = self._model
        self._loss: Any = None
        self._exchanges = 0

    def prepare(self, keep: bool = False) -> None:
        """Fill the gradients, and run the forward pass."""
        self._gradients.give(self._parameters)
        self._loss = self._called(torch.zeros((), device="cpu", requires_grad=True))

    def run(self) -> None:
        """Run the measured part."""
        self._model.begin = time.perf_counter()
        self._loss.backward()

    def averages(self) -> list[np.ndarray]:
        """Return the gradients after a run."""
        return [parameter.grad.cpu().numpy() for parameter in self._parameters]

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._exchanges += 1
