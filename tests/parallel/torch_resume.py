"""A model that PyTorch trains, saves and resumes. Used by resume_worker.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from resume_data import method_of
from torch_harness import net

import horovod_quant.torch as hvq


def start() -> None:
    hvd.init(process_sets=hvq.hierarchical_process_sets())
    torch.set_num_threads(1)


class Training:
    """A model with the optimizer and the compressor of one method."""

    def __init__(self, name: str) -> None:
        method, options = method_of(name)
        self._compression = method.compression(hvd, hvq, **(options if method.class_name else {}))
        self._model = net()
        parameters = self._model.parameters()
        plain: Any = (
            hvq.optim.BinSGDM(parameters, lr=3e-3)
            if method.class_name == "BinSGDM"
            else torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
        )
        self._optimizer = hvd.DistributedOptimizer(
            plain, self._model.named_parameters(), compression=self._compression
        )
        self._own: dict[str, np.ndarray] = {}
        for name, parameter in self._model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self._keep(name, gradient))

    def _keep(self, name: str, gradient: torch.Tensor) -> None:
        self._own[name] = gradient.detach().numpy().copy()

    def step(self, x: np.ndarray, y: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """One step; returns this worker's own gradients and the reduced ones."""
        self._optimizer.zero_grad()
        self._loss(x, y).backward()
        self._optimizer.synchronize()
        reduced = {name: p.grad.numpy().copy() for name, p in self._model.named_parameters()}
        with self._optimizer.skip_synchronize():
            self._optimizer.step()
        return dict(self._own), reduced

    def loss(self, x: np.ndarray, y: np.ndarray) -> float:
        with torch.no_grad():
            return self._loss(x, y).item()

    def _loss(self, x: np.ndarray, y: np.ndarray) -> torch.Tensor:
        return (self._model(torch.from_numpy(x)) - torch.from_numpy(y)).pow(2).mean()

    def state(self) -> dict[str, dict[str, Any]]:
        """All that must come through: "parameter", what the optimizer keeps, and "exchanges"."""
        found: dict[str, dict[str, Any]] = {"exchanges": self._compressor_state().get("exchanges", {})}
        for name, parameter in self._model.named_parameters():
            kept = {"parameter": parameter.detach(), **self._optimizer.state[parameter]}
            for kind, value in kept.items():
                found.setdefault(kind, {})[name] = np.array(value)
        return found

    def _compressor_state(self) -> dict[str, Any]:
        return self._compression.state_dict() if isinstance(self._compression, hvq.Compressor) else {}

    def prepare_to_save(self) -> None:
        """Called by all workers."""
        if isinstance(self._optimizer, hvq.optim.BinSGDM):
            self._optimizer.gather_state()

    def save(self, path: Path) -> None:
        torch.save(
            [self._model.state_dict(), self._optimizer.state_dict(), self._compressor_state()], f"{path}.pt"
        )

    def load(self, path: Path) -> None:
        model, optimizer, compressor = torch.load(f"{path}.pt", weights_only=False)
        self._model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)
        if compressor:
            self._compression.load_state_dict(compressor)

    def broadcast(self) -> None:
        """Gives all workers what rank 0 has."""
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self._optimizer, root_rank=0)
        compressor = hvd.broadcast_object(self._compressor_state(), root_rank=0)
        if compressor:
            self._compression.load_state_dict(compressor)
