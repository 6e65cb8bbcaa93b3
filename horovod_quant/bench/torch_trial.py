"""Horovod with PyTorch: ``hvd.DistributedOptimizer``, from the backward pass to ``optimizer.synchronize()``."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

import horovod_quant.torch as hvq
from horovod_quant.analysis.models import elements
from horovod_quant.bench.rounds import WARM_UP
from horovod_quant.bench.torch_model import Gradients, Model
from horovod_quant.bench.variants import Options, Variant

workers = hvd


def configure() -> None:
    torch.set_num_threads(1)


def barrier() -> None:
    hvd.barrier()


def allgather(array: np.ndarray, name: str) -> np.ndarray:
    return hvd.allgather(torch.from_numpy(array), name=name).numpy()


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
