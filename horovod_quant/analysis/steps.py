"""Time of training steps including communication, and break-even bandwidths."""

from __future__ import annotations

import math
from dataclasses import dataclass

from horovod_quant.analysis.cost_model import NONE, Method, Setting, exchange_cost


@dataclass(frozen=True)
class Step:
    """A training step on one worker, without step communication.

    Args:
        seconds: seconds of the whole step.
        backward: seconds of it in which gradients become ready, so that step communication can overlap.
        accelerator: whether the backward pass leaves this host's cores free.

    Raises:
        ValueError: the backward pass is longer than the step, or negative.
    """

    seconds: float
    backward: float = 0.0
    accelerator: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.backward <= self.seconds < math.inf:
            raise ValueError(
                f"backward={self.backward!r}: use seconds from 0 to those of the step, {self.seconds!r}"
            )


def step_seconds(method: Method, setting: Setting, step: Step) -> float:
    """Return the seconds of a training step, including communication.

    Args:
        method, setting: see `exchange_cost`.
        step: the step without step communication.
    """
    cost = exchange_cost(method, setting, backward=step.backward, accelerator=step.accelerator)
    return step.seconds + cost.exposed


def break_even_bandwidth(method: Method, setting: Setting, step: Step) -> float:
    """Return the bytes per second between hosts below which a method pays.

    Args:
        method, setting, step: see `step_seconds`; the network's ``bandwidth`` is ignored.

    Returns:
        0 if it never does; inf if it does at 1e15 bytes per second, and so at every speed. On a single host, where
        bandwidth does not matter, it is one of the two.
    """

    def gain(bandwidth: float) -> float:
        changed = setting.with_network(bandwidth=bandwidth)
        return step_seconds(NONE, changed, step) - step_seconds(method, changed, step)

    lowest, highest, precision = 1e3, 1e15, 1.001
    if gain(lowest) <= 0:
        return 0.0
    # The lowest bandwidth at which it no longer pays: gains are not monotonic where much is hidden.
    low, high = lowest, lowest
    while gain(high) > 0:
        low, high = high, 2 * high
        if high > highest:
            return math.inf
    while high > precision * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low
