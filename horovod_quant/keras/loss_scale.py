"""Mixed precision: all workers skip a step if one overflows.

Keras decides by the local gradients whether to apply them; other workers would wait for the averages with a worker that
skips.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import keras
import tensorflow as tf


class _Agreeing:
    """Mixin for a `keras.optimizers.LossScaleOptimizer` around a distributed optimizer."""

    inner_optimizer: Any

    @tf.autograph.experimental.do_not_convert
    def check_finite(self, grads: Any) -> Any:
        parent: Any = super()
        return self.inner_optimizer._horovod_quant_averaging().agree(parent.check_finite(grads))

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable's gradient from averaging; see ``scale_local_gradients``."""
        self.inner_optimizer.register_local_var(var)


@functools.cache
def _agreeing(kind: type) -> type:
    return type(kind.__name__, (_Agreeing, kind), {"__module__": "keras.optimizers", "__doc__": kind.__doc__})


def agree_on_overflows(loss_scale: Any) -> None:
    """Make a loss-scaling optimizer skip steps on all workers alike.

    Keeps its state.
    """
    if not isinstance(loss_scale, _Agreeing):
        kind: Any = type(loss_scale)
        loss_scale.__class__ = _agreeing(kind)


def loss_scale_around(optimizer: Any) -> Any:
    """Return the loss-scaling optimizer that is calling ``optimizer``, or None.

    A distributed optimizer has no other sign that ``model.compile`` has wrapped it.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if (
            isinstance(found, keras.optimizers.LossScaleOptimizer)
            and getattr(found, "inner_optimizer", None) is optimizer
        ):
            return found
        frame = frame.f_back
    return None


def require_agreement(optimizer: Any) -> None:
    """Raise ValueError if a loss-scaling optimizer that is calling ``optimizer`` skips alone."""
    loss_scale = loss_scale_around(optimizer)
    if loss_scale is not None and not isinstance(loss_scale, _Agreeing):
        raise ValueError(
            f"optimizer={type(optimizer).__name__}: the LossScaleOptimizer around it was built before, and would skip "
            f"steps on one worker alone; give the LossScaleOptimizer to hvq.DistributedOptimizer"
        )
