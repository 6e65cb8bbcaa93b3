"""PyTorch's side of `exchange`: ``hvd.DistributedOptimizer``, from the backward pass to ``optimizer.synchronize()``.

The backward pass visits the parameters in reverse order, as a model's would. The gradients are filled with the same
values before every exchange, outside the measurement.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from typing import Any, Callable
from unittest.mock import patch

import horovod.torch as hvd
import horovod.torch.optimizer as horovod_optimizer
import numpy as np
import torch

import horovod_quant.torch as hvq
from horovod_quant import kernels
from horovod_quant.analysis.models import Shapes, elements
from horovod_quant.torch import exchange

PHASES = {
    "norms": ["bucket_maxima", "bucket_square_sums", "norms_of_square_sums"],
    "quantize": ["encode_uniform_sum", "encode_uniform_codes", "encode_exponential", "binarize", "vote"],
    "decode": ["decode_uniform_sum", "decode_uniform_codes", "decode_exponential", "decode_signs"],
}
LAUNCH, WAIT, HOROVOD_WAIT, REST = "launch", "wait", "wait (Horovod)", "rest"
LAUNCHES = ["allreduce_async_", "allgather_async", "alltoall_async"]
COLUMNS = ["norms", "quantize", LAUNCH, WAIT, HOROVOD_WAIT, "decode", REST]

NAME = "PyTorch"


def configure() -> None:
    torch.set_num_threads(1)


def barrier() -> None:
    hvd.barrier()


def allgather(array: np.ndarray, name: str) -> np.ndarray:
    return hvd.allgather(torch.from_numpy(array), name=name).numpy()


# ---- one exchange ------------------------------------------------------------------------------------------------


class Visit(torch.autograd.Function):
    """Passes a number through. On the way back it touches a parameter, whose gradient stays as it is."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor, parameter: torch.Tensor, until: Callable[[], float]) -> Any:
        ctx.until = until
        return number.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        left = ctx.until() - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return gradient, None, None


class Gradients:
    """The gradients' values and the memory that they are exchanged in, which all methods share."""

    def __init__(self, shapes: Shapes, values: np.ndarray) -> None:
        self.shapes = shapes
        self._values = torch.from_numpy(values)
        self._sizes = list(map(prod, shapes.values()))
        # Apart, as they would be in a training run.
        self._memory = [torch.empty(shape) for shape in shapes.values()]

    def give(self, parameters: list[torch.nn.Parameter]) -> None:
        for parameter, memory, values in zip(parameters, self._memory, self._values.split(self._sizes)):
            memory.view(-1).copy_(values)
            parameter.grad = memory.detach()  # another tensor on the same memory: Horovod may replace it


class Trial:
    """A model and its optimizer, ready to exchange gradients with one method."""

    def __init__(self, variant: Any, gradients: Gradients, options: Any) -> None:
        self.variant = variant
        self._gradients = gradients
        self._backward = options.backward
        self._begin = 0.0
        self._loss: Any = None
        self._parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in gradients.shapes.values()]
        self._optimizer = self.compression = None
        if variant.exchanges:
            ours = {"overlap": options.overlap} if variant.ours else {}
            self.compression = variant.compression(hvd, hvq, **ours)
            plain = (hvq.optim.BinSGDM if variant.is_binsgdm else torch.optim.SGD)(self._parameters, lr=0.1)
            # Other names for each variant: the same name with another shape would be a miss in Horovod's cache.
            names = [f"{variant.label(True)}: {name}" for name in gradients.shapes]
            self._optimizer = hvd.DistributedOptimizer(
                plain, named_parameters=list(zip(names, self._parameters)), compression=self.compression
            )

    def prepare(self) -> None:
        """Fills the gradients, and runs the forward pass."""
        self._gradients.give(self._parameters)
        # Layer i's part of the backward pass ends when its share of the pass's time is over.
        loss, left, total = torch.zeros((), requires_grad=True), 0, elements(self._gradients.shapes)
        for parameter in self._parameters:
            loss = Visit.apply(loss, parameter, functools.partial(self._deadline, 1 - left / total))
            left += parameter.numel()
        self._loss = loss

    def _deadline(self, share: float) -> float:
        return self._begin + share * self._backward if self._backward else 0.0

    def run(self) -> None:
        """What is measured."""
        self._begin = time.perf_counter()
        self._loss.backward()
        if self._optimizer is not None:
            self._optimizer.synchronize()

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


# ---- where the time goes -----------------------------------------------------------------------------------------


class Stopwatch:
    """Adds up wall and CPU seconds of the calling thread, by phase."""

    def __init__(self) -> None:
        self._seconds: dict[str, np.ndarray] = {}

    def restart(self) -> None:
        self._seconds = {phase: np.zeros(2) for phase in COLUMNS}

    def timed(self, phase: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            begin = np.array([time.perf_counter(), time.thread_time()])
            try:
                return function(*arguments, **named)
            finally:
                self._seconds[phase] += [time.perf_counter(), time.thread_time()] - begin

        return wrapper

    def split(self, wall: float, cpu: float) -> list[np.ndarray]:
        """Seconds of the phases, whose sum is the whole."""
        self._seconds[REST] = np.array([wall, cpu]) - sum(self._seconds.values())
        return [self._seconds[phase] for phase in COLUMNS]


@contextmanager
def instrumented() -> Iterator[Stopwatch]:
    """Compressors that start to work in here have their kernels and Horovod's operations timed."""
    stopwatch = Stopwatch()
    backend = SimpleNamespace(**vars(kernels.get()))
    for phase, names in PHASES.items():
        for name in names:
            setattr(backend, name, stopwatch.timed(phase, getattr(backend, name)))
    patches = [
        patch.object(kernels, "get", lambda name="auto": backend),
        patch.object(exchange, "_collect", stopwatch.timed(WAIT, exchange._collect)),
        patch.object(
            horovod_optimizer, "synchronize", stopwatch.timed(HOROVOD_WAIT, horovod_optimizer.synchronize)
        ),
    ]
    for owner in (hvd, horovod_optimizer):
        for name in set(LAUNCHES) & set(vars(owner)):
            patches.append(patch.object(owner, name, stopwatch.timed(LAUNCH, getattr(owner, name))))
    for each in patches:
        each.start()
    try:
        yield stopwatch
    finally:
        for each in patches:
            each.stop()
