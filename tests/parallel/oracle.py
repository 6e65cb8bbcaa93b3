"""Predicts the gradients that a compressor delivers, by the simulator, from what every worker had."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import numpy as np

from horovod_quant import simulator
from horovod_quant.frontends.binsgdm import DEFAULT_BETA, clipped, moves_by_averages
from horovod_quant.kernels import reference
from horovod_quant.schemes import BinSGDM
from horovod_quant.schemes.base import BinaryState, Scheme, Workers


class Oracle:
    """Follows one compressor.

    Args:
        compressor: whose policy and seed count.
        beta: of BinSGDM's optimizer.
        clip_norm: of BinSGDM's optimizer.
        step: the number that keys are drawn with, of a gradient's exchange 0, 1, ...
    """

    def __init__(
        self,
        compressor: Any,
        beta: float = DEFAULT_BETA,
        step: Callable[[int], int] = int,
        clip_norm: float | None = None,
    ) -> None:
        self.compressor = compressor
        hierarchical = compressor.hierarchical
        self._local_size = _host_size() if hierarchical is True else int(hierarchical) or 1
        self._beta = beta
        self._step = step
        self._clip_norm = clip_norm
        self._exchanges: dict[str, int] = {}
        self._states: dict[str, list[list[BinaryState]]] = {}

    def expected(
        self, everyone: Sequence[Mapping[str, np.ndarray]], name: str, factor: float
    ) -> np.ndarray | None:
        """``factor`` times the sum of the workers' gradients, float32 and flat; None if Horovod reduces it itself.

        Args:
            everyone: the workers' gradients by name, in rank order.
            name: which one.
            factor: what the sum is multiplied by.
        """
        arrays = [clipped(reference, own[name].reshape(-1), self._clip_norm) for own in everyone]
        elements = arrays[0].size
        scheme = self.compressor.policy.scheme_for(name, elements)
        if scheme is None:
            return None
        exchange = self._exchanges.get(name, 0)
        self._exchanges[name] = exchange + 1
        if name not in self._states:
            owned = [scheme.owned(name, elements, worker) for worker in self._workers(len(arrays))]
            zeros = [np.zeros((2, stop - start), np.float32) for start, stop in owned]
            self._states[name] = [[BinaryState(m, s, self._beta)] for m, s in zeros]
        result = simulator.run(
            scheme,
            arrays,
            seed=self.compressor.seed,
            names=[name],
            step=self._step(exchange),
            factor=factor,
            states=self._states[name],
            kernels="numpy",
            local_size=self._local_size,
        )
        is_binsgdm = isinstance(getattr(scheme, "inner", scheme), BinSGDM)
        if is_binsgdm and not any(array.any() for array in arrays):
            return np.zeros(elements, np.float32)  # nobody has a gradient, so nothing moves
        return result.decoded[0][0]

    def _workers(self, size: int) -> list[Workers]:
        return [Workers(rank, size, local_size=self._local_size) for rank in range(size)]


def assert_average(
    scheme: Scheme | None, gradients: Sequence[np.ndarray], reduced: np.ndarray, what: str, is_binsgdm: bool
) -> None:
    """``reduced`` is the average of the workers' gradients, as well as the method knows it; BinSGDM's is of signs.

    For where an `Oracle` cannot follow, because workers come and go.

    Args:
        scheme: None if Horovod reduced the gradient itself.
    """
    if is_binsgdm and scheme is not None:
        magnitudes = set(np.unique(np.abs(reduced)))
        assert max(magnitudes) <= 1.0001 if moves_by_averages(scheme) else magnitudes == {1.0}
        return
    exact = np.mean(gradients, axis=0, dtype=np.float64)
    error = np.sum((reduced.reshape(-1) - exact) ** 2) / np.sum(exact**2)
    usual = 1e-8 if scheme is None else simulator.run(scheme, gradients).nmse
    assert error < 4 * usual, f"{what}: relative error {error}, usual is {usual}"


def unlike_neighbours(rank: int, step: int = 0) -> np.ndarray:
    """A gradient, float32 and flat, of which one in 16 buckets is the same on all workers while the others cancel: by
    their estimate its sum has no room in its field, if Global-QSGD rotates.
    """
    values = np.random.default_rng(step).standard_normal((10, 16, 1024)).astype(np.float32)
    values[:, 1:] *= (-1) ** rank
    return values.reshape(-1)


def _host_size() -> int:
    """The number of workers on each host, as the launchers tell."""
    names = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return next(int(os.environ[name]) for name in names if name in os.environ)
