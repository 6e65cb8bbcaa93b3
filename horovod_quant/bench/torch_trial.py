"""Horovod with PyTorch: ``hvd.DistributedOptimizer``, from the backward pass to ``optimizer.synchronize()``."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

import horovod_quant.torch as hvq
from horovod_quant.bench.torch_model import Gradients, TorchTrial
from horovod_quant.bench.torch_model import configure as configure
from horovod_quant.bench.variants import Options, Variant

workers = hvd
barrier = hvd.barrier


def allgather(array: np.ndarray, name: str) -> np.ndarray:
    return hvd.allgather(torch.from_numpy(array), name=name).numpy()


class Trial(TorchTrial):
    """A model and its optimizer, ready to reduce gradients with one method."""

    def __init__(self, variant: Variant, gradients: Gradients, options: Options) -> None:
        super().__init__(variant, gradients, options)
        self._optimizer: Any = None
        self._compression: Any = None
        if variant.method is not None:
            self._compression = variant.compression(hvd, hvq, overlap=options.overlap)
            own = variant.own_optimizer
            plain = (torch.optim.SGD if own is None else getattr(hvq.optim, own))(self._parameters, lr=0.1)
            # Unique names for each variant: a known name with another shape misses in Horovod's cache.
            names = [f"{variant.label}: {name}" for name in gradients.shapes]
            self._optimizer = hvd.DistributedOptimizer(
                plain, named_parameters=list(zip(names, self._parameters)), compression=self._compression
            )

    def run(self) -> None:
        super().run()
        if self._optimizer is not None:
            self._optimizer.synchronize()

    def bytes_sent(self) -> float:
        return self.variant.bytes_sent(self._compression, self._exchanges, self._gradients.shapes, hvd.size())
