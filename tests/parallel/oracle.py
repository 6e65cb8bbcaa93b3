"""Predicts the gradients that a compressor delivers, by the simulator, from what every worker had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable

import numpy as np

from horovod_quant import simulator
from horovod_quant.schemes.base import BinaryState


class Oracle:
    """Follows one compressor.

    Args:
        compressor: whose policy and seed count.
        beta: of BinSGDM's optimizer.
        step: the number that keys are drawn with, of a gradient's exchange 0, 1, ...
    """

    def __init__(self, compressor: Any, beta: float = 0.95, step: Callable[[int], int] = int) -> None:
        self.compressor = compressor
        self._beta = beta
        self._step = step
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
        arrays = [own[name].reshape(-1) for own in everyone]
        elements = arrays[0].size
        scheme = self.compressor.policy.scheme_for(name, elements)
        if scheme is None:
            return None
        exchange = self._exchanges.get(name, 0)
        self._exchanges[name] = exchange + 1
        if name not in self._states:
            zeros = [np.zeros((2, elements), np.float32) for _ in arrays]
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
        )
        return result.decoded[0][0]
