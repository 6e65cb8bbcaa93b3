"""Errors in a graph, delayed until this worker has a gradient.

An error ends the run of a graph: a pending data set gives no batch any more, and operations that depend on the batch
never start. Of two workers with the same error, one may already have its batch, and pass gradients to Horovod; if the
other had none yet, the first would wait indefinitely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_quant.tensorflow.cached_subgraph import elementwise


def require(condition: tf.Tensor, message: Sequence[Any], gradient: tf.Tensor) -> Any:
    """Assert a condition, in a function after ``gradient`` is computed.

    The condition is a boolean scalar, as for ``tf.debugging.Assert``.
    """
    # Not in a session, which runs only what is fetched, and that may not need the gradient.
    if tf.compat.v1.get_default_graph().building_function:
        condition = _false_after(condition, opaque_false(gradient))
    return tf.debugging.Assert(condition, message)


@elementwise
def _false_after(condition: tf.Tensor, false: tf.Tensor) -> tf.Tensor:
    """Return ``condition``; if it is false, only after ``false`` is computed."""
    return tf.cond(condition, lambda: tf.constant(True), lambda: tf.identity(false))


def opaque_false(tensor: tf.Tensor) -> tf.Tensor:
    """Return False, computed from an element of ``tensor`` if it has one.

    TensorFlow removes operations that only serve a control dependency, or the size of a tensor of known size.
    """
    # Not "greater than infinity", a constant that tf.debugging.enable_check_numerics refuses.
    return tf.reduce_any(tf.sign(tf.cast(tf.reshape(tensor, [-1])[:1], tf.float64)) > 1.0)
